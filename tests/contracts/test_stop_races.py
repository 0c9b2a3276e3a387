"""Stop against everything that happens at the same moment, on a real store, as often as it takes (L5, L9)."""

import asyncio
import random
from collections import Counter
from itertools import count

import pytest
from running_scheduler import FickleLog, scheduler
from store_world import ALICE, World
from streaming import soon, until

from chatsvc.errors import EngineUnavailable
from chatsvc.run import RunStatus

LANES = 10
WINDOW_S = 0.005


class WatchedLog(FickleLog):
    """Says when a reply's first and last events are in it."""

    def __init__(self):
        super().__init__()
        self._moments = {}

    def moment(self, response_id, name):
        """A future: the loop's time when the first event of that name was appended."""
        return self._moments.setdefault((response_id, name), asyncio.get_running_loop().create_future())

    async def append(self, batch):
        results = await super().append(batch)
        for one in batch:
            for logged in one.entries:
                moment = self.moment(one.response_id, logged.event)
                if not moment.done():
                    moment.set_result(asyncio.get_running_loop().time())
        return results


async def one_end(world, log, run):
    """The status that run, message and log agree upon; the log has one end, and nothing behind it."""
    await log.moment(run.id, "done")
    entries = (await log.read(run.id, 0)).entries
    ended = await world.store.runs.get(run.user_id, run.id)
    message = await world.message(run)
    assert [one.event for one in entries if one.event in {"done", "error"}] == ["done"]
    assert (entries[-1].event, entries[-1].seq) == ("done", ended.last_seq)
    assert message.status is ended.status
    said = b'"finish_reason":"stopped"' in entries[-1].data
    assert said == (ended.status is RunStatus.STOPPED) == (ended.finish_reason == "stopped")
    shown = "".join(json_text(one) for one in entries if one.event == "delta")
    assert shown == message.content
    return ended.status


def json_text(one):
    return one.data.decode().removeprefix('{"text":"').removesuffix('"}')


async def stops_around_the_end(store, tmp_path, times):
    """So many replies of four words, each stopped within 5 ms of its end; how often each status came of it.

    Where the end lies is learned from what came of it: on a busy machine both, the end and the stop, are late.
    """
    pace = 200
    world, chance, log, numbers, ends = World(store), random.Random(9), WatchedLog(), count(), Counter()
    script = f"tokens_per_s={pace}&tokens=4&slots=64"
    async with scheduler(store, tmp_path, log, script=script) as made:
        loop = asyncio.get_running_loop()
        lean = 0.0

        async def lane():
            nonlocal lean
            conversation = await world.conversation()
            while next(numbers) < times:
                run = await world.queued(conversation)
                end = await log.moment(run.id, "delta") + 3 / pace + lean
                await asyncio.sleep(max(0, end + chance.uniform(-WINDOW_S, WINDOW_S) - loop.time()))
                if chance.random() < 0.5:
                    await made.stop(ALICE.user_id, run.id)
                else:  # through a replica that does not run it
                    await store.runs.request_stop(ALICE.user_id, run.id)
                status = await soon(one_end(world, log, run))
                ends[status] += 1
                lean += WINDOW_S / 20 if status is RunStatus.STOPPED else -WINDOW_S / 20

        await asyncio.gather(*(lane() for _ in range(LANES)))
        load = made.engine.load()
        assert (load.running, load.waiting, made.dispatcher.active_count) == (0, 0, 0)
    return ends


async def test_stop_at_done_plus_or_minus_5_ms_1000_times_gives_one_end_the_same_in_log_and_store(store, tmp_path):
    ends = await stops_around_the_end(store, tmp_path, 1000)
    assert ends.total() == 1000
    assert min(ends[RunStatus.COMPLETE], ends[RunStatus.STOPPED]) > 20, "both orders must have been tried"


STAGES = {
    "queued": ("tokens_per_s=20&tokens=2000&slots=1", ["done"]),
    "prefilling": ("first_token_ms=600000&tokens=10&slots=64", ["done"]),
    "decoding": ("tokens_per_s=50&tokens=4000&slots=64", ["delta", "done"]),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_stop_at_0_to_300_ms_200_times_at_each_stage_is_never_ignored(store, tmp_path, stage):
    script, seen = STAGES[stage]
    world, chance, log, numbers = World(store), random.Random(stage), WatchedLog(), count()
    async with scheduler(store, tmp_path, log, script=script) as made:
        blocker = await world.queued()
        await log.moment(blocker.id, "start")

        async def lane():
            conversation = await world.conversation()
            while next(numbers) < 200:
                run = await world.queued(conversation)
                if stage != "queued":
                    await log.moment(run.id, "delta" if stage == "decoding" else "start")
                await asyncio.sleep(chance.uniform(0, 0.3))
                await made.stop(ALICE.user_id, run.id)
                assert await soon(one_end(world, log, run)) is RunStatus.STOPPED
                names = [one.event for one in (await log.read(run.id, 0)).entries]
                assert [name for name in dict.fromkeys(names) if name in {"delta", "done"}] == seen

        await asyncio.gather(*(lane() for _ in range(2 * LANES)))
        await made.stop(ALICE.user_id, blocker.id)
        await until(lambda: not made.engine.load().running + made.engine.load().waiting)


async def test_each_attempt_has_a_request_id_of_its_own_so_that_an_old_abort_cannot_hit_the_new_one(store, tmp_path):
    world, asked, log = World(store), [], WatchedLog()
    async with scheduler(store, tmp_path, log, script="tokens=4&slots=2") as made:
        generate = made.engine.generate

        async def away_at_first(prompt, sampling, run_id, priority=0):
            asked.append(run_id)
            if len(asked) == 1:
                raise EngineUnavailable("not just now")
            async for chunk in generate(prompt, sampling, run_id, priority):
                yield chunk

        made.engine.generate = away_at_first
        run = await world.queued()
        async with asyncio.timeout(60):
            while len(asked) < 2:
                made.dispatcher.sweep_soon()
                await asyncio.sleep(0.05)
        assert await soon(one_end(world, log, run)) is RunStatus.COMPLETE
    assert len(asked) == len(set(asked)) == 2
    assert all(request_id.startswith(run.id) for request_id in asked)
