"""Who may call another worker's lease expired: only who has renewed his own without a gap for longer than it lasts."""

from types import SimpleNamespace

import pytest

from chatsvc.scheduler.lease import LeaseKeeper
from chatsvc.store import Beat

RENEW_S, TTL_S = 2.0, 6.0


class Workers:
    """The store's side: when the last heartbeat was, and whether anybody was judged."""

    def __init__(self):
        self.slept_s = 0.0
        self.judged = 0
        self.orphaned = []
        self._beats = 0

    async def heartbeat(self, worker_id, **_):
        self._beats += 1
        return Beat(stop_requested=(), held=(), gap_s=None if self._beats == 1 else RENEW_S + self.slept_s)

    async def take_over(self, worker_id):
        self.judged += 1
        taken, self.orphaned = self.orphaned[:100], self.orphaned[100:]
        return taken


class Nobody:
    """A dispatcher and a settler of orphans with nothing to do."""

    worker_id = "worker-1"

    def __init__(self):
        self.settled = []

    def attempts(self):
        return set()

    def run_ids(self):
        return set()

    def settle(self, run_id):
        self.settled.append(run_id)

    def settle_unserved(self):
        pass


class Hand:
    """A clock that is moved by hand."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s


class Turn:
    """One worker; ``beats`` lets it renew so many times, in time."""

    def __init__(self):
        self.workers, self.clock, self.orphans = Workers(), Hand(), Nobody()
        self.keeper = LeaseKeeper(
            store=self,
            dispatcher=Nobody(),
            orphans=self.orphans,
            roles=["worker"],
            capacity=1,
            renew_s=RENEW_S,
            ttl_s=TTL_S,
            clock=self.clock,
        )

    async def beats(self, count):
        """How often the others were judged meanwhile."""
        before = self.workers.judged
        for _ in range(count):
            await self.keeper.beat()
            self.clock.now_s += RENEW_S
        return self.workers.judged - before


@pytest.fixture
def turn():
    return Turn()


IN_A_LEASE = int(TTL_S / RENEW_S) + 1
"""Heartbeats that go by until the first is longer ago than a lease lasts."""


async def test_a_worker_judges_nobody_before_it_has_renewed_for_longer_than_a_lease_lasts(turn):
    assert await turn.beats(IN_A_LEASE) == 0
    assert await turn.beats(3) == 3


async def test_a_machine_or_a_database_that_slept_puts_judgement_off_though_no_heartbeat_failed(turn):
    await turn.beats(10)
    turn.workers.slept_s = 2.5
    assert await turn.beats(1) == 0
    turn.workers.slept_s = 0.0
    assert await turn.beats(IN_A_LEASE - 1) == 0
    assert await turn.beats(1) == 1


async def test_a_heartbeat_that_is_a_little_late_changes_nothing(turn):
    await turn.beats(10)
    turn.workers.slept_s = 1.5
    assert await turn.beats(5) == 5


async def test_all_runs_of_the_dead_are_taken_in_one_round_however_many_they_are(turn):
    await turn.beats(10)
    turn.workers.orphaned = [SimpleNamespace(id=f"resp_{number}") for number in range(256)]
    await turn.beats(1)
    assert len(turn.orphans.settled) == 256
