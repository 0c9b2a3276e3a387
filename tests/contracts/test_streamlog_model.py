"""Redis against the reference model: any sequence of calls has the same observable outcome on both (S1-S9)."""

import asyncio
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from chatsvc.events import Entry
from chatsvc.streamlog.base import Append, Fenced, Position
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.memory import MemoryLog

LOGS = st.sampled_from(["a", "b"])
ATTEMPTS = st.integers(1, 4)
SEQS = st.integers(1, 12)
DATA = st.lists(st.binary(max_size=20), min_size=1, max_size=4)


class StillClock:
    """Time passes when it is told to."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds


class TwoLogs(RuleBasedStateMachine):
    """Does everything twice and compares."""

    def __init__(self, url):
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = StillClock()
        self.prefix = f"resp_local_{uuid4().hex}_"
        self.model = self.runner.run(self.on_the_loop(lambda: MemoryLog(self.clock)))
        self.log = self.runner.run(self.on_the_loop(lambda: create_log(url, timeout_s=5, partitions=2)))

    @staticmethod
    async def on_the_loop(make):
        return make()

    def teardown(self):
        self.runner.run(self.log.delete([self.prefix + name for name in ("a", "b")]))
        self.runner.run(self.log.aclose())
        self.runner.close()

    def same(self, call):
        """The outcome, which is the same on both."""

        async def outcome(log):
            try:
                return await call(log)
            except Fenced:
                return Fenced

        expected = self.runner.run(outcome(self.model))
        found = self.runner.run(outcome(self.log))
        assert found == expected
        return expected

    @rule(name=LOGS, attempt=ATTEMPTS)
    def open(self, name, attempt):
        self.same(lambda log: log.open(self.prefix + name, attempt))

    @rule(
        appends=st.lists(st.tuples(LOGS, ATTEMPTS, SEQS, DATA, st.booleans()), min_size=1, max_size=3),
    )
    def append(self, appends):
        batch = [
            Append(
                response_id=self.prefix + name,
                entries=tuple(Entry(attempt, seq, "delta", data) for seq, data in enumerate(datas, first)),
                recreate=recreate,
            )
            for name, attempt, first, datas, recreate in appends
        ]

        async def results(log):
            return list(await log.append(batch))

        self.same(results)

    @rule(name=LOGS, attempt=ATTEMPTS, datas=DATA)
    def append_next(self, name, attempt, datas):
        """What a writer does: go on after the last event."""

        async def results(log):
            last = (await log.read(self.prefix + name, 0)).last
            entries = tuple(Entry(attempt, seq, "delta", data) for seq, data in enumerate(datas, last + 1))
            return list(await log.append([Append(response_id=self.prefix + name, entries=entries)]))

        self.same(results)

    @rule(name=LOGS, after=st.integers(0, 16), limit=st.integers(1, 6))
    def read(self, name, after, limit):
        self.same(lambda log: log.read(self.prefix + name, after, limit))

    @rule(places=st.dictionaries(LOGS, st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1))
    def tail(self, places):
        following = {self.prefix + name: Position(*place) for name, place in places.items()}

        async def heard(log):
            return {key: list(entries) for key, entries in (await log.tail(following, 0.002)).items()}

        self.same(heard)

    @rule(name=LOGS)
    def delete(self, name):
        self.same(lambda log: log.delete([self.prefix + name]))

    @rule(name=LOGS)
    def expire_soon(self, name):
        """A short time to live, and that time passes."""

        async def gone(log):
            await log.expire([self.prefix + name], 0.001)
            self.clock.seconds += 1
            while await log.position(self.prefix + name) is not None:
                await asyncio.sleep(0.001)

        self.same(gone)

    @rule(name=LOGS)
    def expire_late(self, name):
        self.same(lambda log: log.expire([self.prefix + name], 3600))

    @invariant()
    def everything_is_the_same(self):
        for name in ("a", "b"):
            self.same(lambda log, name=name: log.position(self.prefix + name))
            self.same(lambda log, name=name: log.read(self.prefix + name, 0))


def compare(redis_url, examples):
    run_state_machine_as_test(
        lambda: TwoLogs(redis_url),
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_redis_and_the_model_cannot_be_told_apart(redis_url):
    compare(redis_url, 25)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_redis_and_the_model_cannot_be_told_apart_for_long(redis_url):
    compare(redis_url, 150)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_redis_and_the_model_cannot_be_told_apart_for_very_long(redis_url):
    compare(redis_url, 500)
