"""Charged is delivered, as lines know it: whatever becomes of a run, its user is charged what it was given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatsvc.clock import SystemClock
from chatsvc.inference.base import EngineLimits
from chatsvc.limits import ServiceCost, TierName
from chatsvc.run import WaitingRun
from chatsvc.scheduler.lines import Lines

COST = ServiceCost()
WEIGHTS = {TierName.FREE: 1.0, TierName.PLUS: 4.0, TierName.PRO: 16.0}


class Engine:
    limits = EngineLimits(model="m", window=100_000, slots=3)


class OneRun:
    """What one run does until its end."""

    def __init__(self, prompt, cached, steps, end):
        self.prompt, self.cached, self.steps, self.end = prompt, min(cached, prompt), steps, end

    def delivered(self):
        if self.end in ("refund", "discard"):
            return 0.0
        read = COST.of_prompt(self.prompt, self.cached if self.end != "dies unread" else 0)
        return read + (0.0 if self.end == "dies unread" else COST.of_output(sum(self.steps)))


ENDS = ("complete", "stop", "failure", "dies unread", "refund", "discard")
runs = st.builds(
    OneRun,
    prompt=st.integers(1, 5_000),
    cached=st.integers(0, 5_000),
    steps=st.lists(st.integers(0, 60), max_size=20),
    end=st.sampled_from(ENDS),
)


def wish(number, one):
    return WaitingRun(
        id=f"run{number:04}",
        user_id="ann",
        tier=TierName.PLUS,
        model="m",
        prompt_tokens=one.prompt,
        conversation_id=f"c{number}",
    )


class Book:
    """What a line's queue charges, by run."""

    def __init__(self, queue):
        self.charged = {}
        self._end = queue.end
        queue.end = self.end

    def end(self, run_id, **how):
        if (charge := self._end(run_id, **how)) is not None:
            self.charged[run_id] = charge.service


@given(st.lists(runs, max_size=12), st.randoms(use_true_random=False))
def test_each_run_is_charged_what_was_delivered_whatever_its_end(histories, chance):
    lines = Lines({"m": Engine()}, {"m": 3}, WEIGHTS, SystemClock(), COST)
    [line] = lines
    book = Book(line.queue)
    waiting, left, under_way, ended = {}, dict(enumerate(histories)), {}, {}
    while left or waiting or under_way:
        for number in list(left)[: chance.randint(1, 3)]:
            waiting[f"run{number:04}"] = one = left.pop(number)
            lines.put(wish(number, one))
        for run_id in [each for each, one in waiting.items() if one.end == "discard"]:
            del waiting[run_id]
            lines.discard(run_id)
        for _, run_id in lines.take():
            under_way[run_id] = waiting.pop(run_id)
        for run_id in list(under_way)[: chance.randint(1, 3)]:
            ended[run_id] = under_way.pop(run_id)
            carry_out(lines.meter("m", run_id), ended[run_id])
    assert book.charged == pytest.approx({run_id: one.delivered() for run_id, one in ended.items() if one.delivered()})
    assert len(line.queue.left()) == 0


def carry_out(meter, one):
    """What a run receives, told to its line as the runner does."""
    if one.end != "dies unread":
        meter.started(one.prompt, one.cached)
        for tokens in one.steps:
            meter.delivered(tokens)
    if one.end == "refund":
        meter.refund()
    else:
        meter.end(complete=one.end == "complete")
