"""Which runs give their places to replies that wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from chatsvc.run import RunKind
from chatsvc.scheduler.active import Interrupt
from chatsvc.scheduler.giving_way import MOST_TIMES, giving_way


def active(name, kind=RunKind.FOLD, *, attempt=1, why=None, settling=False) -> Any:
    run = SimpleNamespace(id=name, kind=kind, attempt=attempt)
    return SimpleNamespace(run=run, why=why, settling=settling)


def chosen(actives, held_up, by_turn=(), helps=lambda _: True):
    return [each.run.id for each in giving_way(actives, held_up, by_turn.__contains__, helps)]


def test_the_youngest_go_and_no_more_than_replies_wait():
    folds = [active("old"), active("middle"), active("young")]
    assert chosen(folds, 0) == []
    assert chosen(folds, 1) == ["young"]
    assert chosen(folds, 2) == ["young", "middle"]
    assert chosen(folds, 9) == ["young", "middle", "old"]


def test_never_a_reply():
    assert chosen([active("reply", RunKind.REPLY), active("fold"), active("other", RunKind.REPLY)], 3) == ["fold"]


def test_a_run_gives_way_so_often_and_then_finishes():
    assert chosen([active("often", attempt=MOST_TIMES)], 1) == ["often"]
    assert chosen([active("too often", attempt=MOST_TIMES + 1)], 1) == []


def test_one_that_was_begun_in_its_turn_finishes():
    assert chosen([active("turn"), active("idle")], 2, by_turn={"turn"}) == ["idle"]


@pytest.mark.parametrize("ends", [{"why": Interrupt.STOP}, {"settling": True}, {"why": Interrupt.GIVE_WAY}])
@pytest.mark.parametrize("kind", RunKind)
def test_places_that_become_free_anyway_count(ends, kind):
    assert chosen([active("fold"), active("ends", kind, **ends)], 1) == []
    assert chosen([active("fold"), active("ends", kind, **ends)], 2) == ["fold"]


def test_none_gives_way_where_no_reply_could_begin_all_the_same():
    folds = [active("old"), active("middle"), active("young")]
    assert chosen(folds, 1, helps=lambda _: False) == []
    # One of them does not have the room that the reply needs.
    assert chosen(folds, 1, helps=lambda ended: len(ended) >= 2) == ["young", "middle"]
    # What ends by itself helps too.
    ending = [*folds, active("ends", RunKind.REPLY, settling=True)]
    assert chosen(ending, 2, helps=lambda ended: set(ended) == {"ends", "young"}) == ["young"]
