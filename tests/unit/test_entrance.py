"""Nobody is told that a message was taken in before its run is kept."""

import asyncio
from types import SimpleNamespace

import pytest

from chatsvc.errors import StoreUnavailable
from chatsvc.run import RunStatus
from chatsvc.scheduler import entrance
from chatsvc.scheduler.entrance import Entrance
from chatsvc.store import Moved, Submitted


class Runs:
    """Keeps a run once it is let to."""

    def __init__(self):
        self.may_keep = asyncio.Event()
        self.wanted = asyncio.Event()
        self.asked = []

    async def keep(self, run_id):
        self.asked.append(run_id)
        self.wanted.set()
        await self.may_keep.wait()


def written(status, **how):
    async def submit():
        return Submitted(SimpleNamespace(id="run", status=status), **how)

    return submit


HURRIED = {"created": True, "hurried": True}
FOUND = {"created": False}


@pytest.mark.parametrize("how", [HURRIED, FOUND], ids=["hurried", "another's"])
async def test_the_answer_waits_until_a_run_is_kept_that_may_be_lost(how):
    runs = Runs()
    answer = asyncio.create_task(Entrance(runs).enter(written(RunStatus.QUEUED, **how)))
    wanted = asyncio.create_task(runs.wanted.wait())
    await asyncio.wait((answer, wanted), return_when=asyncio.FIRST_COMPLETED)
    assert (answer.done(), wanted.done()) == (False, True)
    runs.may_keep.set()
    assert (await answer).run.id == "run"


@pytest.mark.parametrize(
    ("status", "how"),
    [(RunStatus.QUEUED, {"created": True}), (RunStatus.STREAMING, FOUND), (RunStatus.COMPLETE, FOUND)],
)
async def test_the_answer_waits_for_nothing_when_the_run_is_kept_already(status, how):
    runs = Runs()
    await Entrance(runs).enter(written(status, **how))
    assert not runs.asked


async def test_what_a_message_let_others_do_is_done_before_the_run_is_kept():
    runs, said = Runs(), []
    runs.may_keep.set()

    async def say():
        said.append(list(runs.asked))

    async def submit():
        saying.append(asyncio.create_task(say()))
        return await written(RunStatus.QUEUED, **HURRIED)()

    saying = []
    await Entrance(runs).enter(submit)
    assert said == [[]]


async def test_a_run_that_cannot_be_kept_is_not_answered_for():
    runs = Runs()

    async def fails(run_id):
        raise StoreUnavailable("The database cannot do this now.")

    runs.keep = fails
    with pytest.raises(StoreUnavailable):
        await Entrance(runs).enter(written(RunStatus.QUEUED, **HURRIED))


@pytest.mark.parametrize(("moves", "taken"), [(1, True), (1000, False)])
async def test_what_changed_once_while_it_was_long_waited_for_is_tried_again(monkeypatch, moves, taken):
    monkeypatch.setattr(entrance, "STOPPING_WAIT_S", 0)
    left = [Moved] * moves

    async def submit():
        if left:
            raise left.pop()
        return await written(RunStatus.STREAMING, **FOUND)()

    if taken:
        assert (await Entrance(Runs()).enter(submit)).run.id == "run"
    else:
        with pytest.raises(StoreUnavailable, match="changing too fast"):
            await Entrance(Runs()).enter(submit)
        assert left
