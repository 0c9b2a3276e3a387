"""A run that is put back is begun by another replica at once: none believes any more that it is under way."""

import asyncio

import pytest
from replica_processes import MODEL, processes, run, until

from chatsvc.scheduler.shared_state import Home


class Slow:
    """What one replica says takes effect at once, and is answered when a test wants."""

    def __init__(self, replica):
        self.answers = asyncio.Event()
        self.unanswered = 0
        self._publish = replica.replicas._state.publish
        replica.replicas._state.publish = self.publish

    async def publish(self, news):
        await self._publish(news)
        self.unanswered += 1
        await self.answers.wait()
        self.unanswered -= 1


def put_back(replica, one):
    """As the dispatcher does when the engine is away."""
    replica.lines.set_ready(MODEL, False)
    for reply in replica.replies:
        reply.cancel()
    replica.postgres.queued[one.id] = one
    replica.lines.meter(MODEL, one.id).refund()
    replica.replicas.tell_soon()
    replica.replicas.post_again(one)


@pytest.mark.parametrize("answered", [True, False], ids=["nothing under way", "the last saying not answered"])
async def test_a_run_that_is_put_back_is_begun_elsewhere_at_once(answered):
    async with processes("a", "b", reply_s=1000) as (a, b):
        a.post(run(1), Home("a"))
        await until(lambda: b.lines.line(MODEL).flights.holder("run00001") == "a")
        if not answered:
            slow = Slow(a)
            await until(lambda: slow.unanswered)
        put_back(a, run(1))
        await until(lambda: b.served, patience_s=10)
        assert b.served == ["run00001"]
