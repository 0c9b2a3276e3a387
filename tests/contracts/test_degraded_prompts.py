"""Less history when it is tight: said only where something was left out, and the same prompt whenever it is made."""

import asyncio

import msgspec
import pytest
from running_scheduler import Held, scheduler
from store_world import World
from streaming import soon

from chatsvc.limits import Principal, TierName
from chatsvc.run import RunStatus
from chatsvc.scheduler import NewMessage
from chatsvc.scheduler.news import News, Places, encode

FREE = Principal("alice", TierName.FREE)
SCRIPT = "tokens_per_s=100&tokens=20&slots=1&window=2000"


class Standing:
    """A ladder that stays where it is."""

    def __init__(self, step):
        self.step = step

    def observe(self, now, delays, waiting, *, load_below):
        return self.step


@pytest.fixture
def world(store):
    return World(store)


async def ended(store, made, run):
    """Its end is in the store, and its place is free again: that is a moment later."""
    while not (state := await store.runs.get(run.user_id, run.id)).status.ended or made.active(run.id):
        await asyncio.sleep(0.02)
    return state


def message(number, content="And what follows from that?"):
    return NewMessage(content=content, client_msg_id=f"client {number}", max_tokens=15)


async def test_history_is_named_only_where_it_was_cut_and_the_runner_cuts_it_alike(store, world, tmp_path):
    long, short = await world.conversation(), await world.conversation()
    await world.turns(long, 100)
    await world.turns(short, 1)
    async with scheduler(store, tmp_path, script=SCRIPT) as made:
        made.pressure._ladders["small"] = Standing(0)
        made.folds.may_work = lambda _model: False  # a summary in between would make another prompt
        before = (await made.submit(FREE, long.id, message(0))).run
        assert before.degraded == ()
        all_of_it = await store.runs.context(FREE.user_id, (await soon(ended(store, made, before))).id)
        made.pressure._ladders["small"] = Standing(4)
        held = Held(made.engine)
        at_once = (await made.submit(FREE, long.id, message(1))).run
        waits = (await made.submit(msgspec.structs.replace(FREE), short.id, message(2))).run
        assert (at_once.status, at_once.degraded) == (RunStatus.STREAMING, ("history",))
        assert (waits.status, waits.degraded) == (RunStatus.QUEUED, ())
        # Whether a step is still needed is judged by how full the engines are.
        assert made.pressure.fullness("small") == (1, 1.0, 0.0)
        held.go_on.set()
        await soon(ended(store, made, at_once))
        await soon(ended(store, made, waits))
        # While the engine is busy the next one waits, and its prompt is made by the runner.
        held.go_on.clear()
        busy = (await made.submit(FREE, short.id, message(3))).run
        later = (await made.submit(FREE, long.id, message(4))).run
        assert (later.status, later.degraded) == (RunStatus.QUEUED, ("history",))
        held.go_on.set()
        await soon(ended(store, made, busy))
        await soon(ended(store, made, later))
        cut = [await store.runs.context(FREE.user_id, run.id) for run in (at_once, later)]
    assert all_of_it.left_out < cut[0].left_out <= cut[1].left_out
    assert cut[1].prompt_tokens < 0.6 * all_of_it.window


async def test_without_the_small_model_here_only_what_surely_fits_moves_to_it_where_it_is_known_to_be_served(
    store, world, tmp_path
):
    conversations = [await world.conversation() for _ in range(5)]
    numbers = iter(range(9))

    async def submitted(made, content):
        number = next(numbers)
        new = NewMessage(content=content, client_msg_id=f"client {number}")
        run = (await made.submit(FREE, conversations[number].id, new)).run
        # No more than three may be open at once. What has moved is for a replica that is not there.
        while run.model == "small" and not await store.runs.ended([run.id]):
            await asyncio.sleep(0.01)
        return run

    async with scheduler(store, tmp_path, script="tokens_per_s=1000&tokens=20&slots=9&window=20000") as made:
        made.pressure._smaller["small"] = "tiny"
        made.pressure._ladders["small"] = Standing(4)
        assert (await submitted(made, "Hello.")).model == "small"  # nobody is known to serve the other one

        def heard(places):
            made.replicas._hear(encode(News(replica="another", models={"tiny": places})))

        heard(Places(slots=2))
        assert (await submitted(made, "Hello.")).model == "small"  # how much it takes is not known
        heard(Places(slots=2, window=2000, reply_tokens=500))
        assert (await submitted(made, "word " * 1000)).model == "small"
        moved = await submitted(made, "Hello.")
        # Neither the length of its replies nor any history was taken from it: that is not said to be given up.
        assert (moved.model, moved.degraded) == ("tiny", ("model",))
        heard(Places())
        assert (await submitted(made, "Hello.")).model == "small"
