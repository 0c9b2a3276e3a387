"""L13: Postgres sees at most one checkpoint of a reply in ten seconds, whatever its pace."""

from types import SimpleNamespace

from chatsvc.limits import Usage
from chatsvc.scheduler.active import ActiveRun
from chatsvc.scheduler.checkpoint import Checkpointer


class SteppedClock:
    """Stands still until it is moved."""

    def __init__(self):
        self.at = 1000.0

    def monotonic(self):
        return self.at


class Runs:
    """Keeps what is saved."""

    def __init__(self):
        self.saved = []

    async def checkpoint(self, batch):
        self.saved.append([(one.run_id, one.seq, one.text) for one in batch])
        return {one.run_id for one in batch}


class Growing:
    """A reply that says a word whenever it is told to."""

    def __init__(self):
        self.words = 0

    def checkpoint(self):
        return self.words, "word " * self.words


async def test_however_many_deltas_the_store_sees_one_checkpoint_in_ten_seconds_for_all_replies_together():
    clock, runs = SteppedClock(), Runs()
    checkpointer = Checkpointer(SimpleNamespace(runs=runs), clock, every_s=10.0)
    replies = {name: Growing() for name in ("resp_a", "resp_b")}
    for name, reply in replies.items():
        checkpointer.track(ActiveRun(SimpleNamespace(id=name, attempt=1), None), reply, Usage)
    for _ in range(600):  # a minute, looked at ten times a second
        clock.at += 0.1
        for reply in replies.values():
            reply.words += 5
        await checkpointer.save_due()
    assert 5 <= len(runs.saved) <= 6
    assert all(len(batch) == 2 for batch in runs.saved)
    assert runs.saved[-1][0][2] == "word " * runs.saved[-1][0][1]


async def test_a_reply_that_says_nothing_new_is_not_saved_again():
    clock, runs = SteppedClock(), Runs()
    checkpointer = Checkpointer(SimpleNamespace(runs=runs), clock, every_s=10.0)
    reply = Growing()
    checkpointer.track(ActiveRun(SimpleNamespace(id="resp_a", attempt=1), None), reply, Usage)
    reply.words = 1
    for _ in range(10):
        clock.at += 10.0
        await checkpointer.save_due()
    assert len(runs.saved) == 1
