"""The text of a reply at some seq, from what is left of its log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming import DONE, delta

from chatsvc.events import Context, Snapshot, entry
from chatsvc.streamlog.snapshot import text_through

CONTEXT = Context(condensed=False, summary_through=None, retrieved=(), prompt_tokens=1, cached_tokens=0, window=9)


def context(seq):
    return entry(CONTEXT, attempt=1, seq=seq)


def snapshot(seq, text):
    return entry(Snapshot(text=text, reason="log_lost"), attempt=1, seq=seq)


def done(seq):
    return entry(DONE, attempt=1, seq=seq)


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], (0, "")),
        ([delta(1, "a"), delta(2, "b")], (2, "ab")),
        ([context(1), delta(2, "a")], (2, "a")),
        ([delta(2, "b")], None),
        ([delta(1, "a"), delta(3, "c")], None),
        ([snapshot(7, "whole"), delta(8, "!")], (8, "whole!")),
        ([delta(5, "e"), snapshot(9, "whole")], (9, "whole")),
        ([delta(1, "a"), delta(3, "c"), snapshot(9, "whole"), delta(10, "!")], (10, "whole!")),
        ([snapshot(7, "whole"), delta(9, "!")], None),
        ([delta(1, "a"), done(2)], (1, "a")),
        ([done(9)], None),
        ([delta(1, "a"), done(9)], None),
        ([delta(1, "a"), delta(1, "again", attempt=2), delta(2, "b", attempt=2)], (2, "ab")),
    ],
)
def test_a_log_is_read_as_a_client_reads_it(entries, found):
    assert text_through(entries) == found


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], (5, "saved")),
        ([delta(3, "x"), delta(4, "y"), delta(5, "z"), delta(6, "!")], (6, "saved!")),
        ([delta(3, "x"), delta(4, "y")], (5, "saved")),
        ([delta(7, "!")], None),
        ([delta(6, "!"), done(7)], (6, "saved!")),
        ([snapshot(8, "whole")], (8, "whole")),
    ],
)
def test_saved_text_goes_on_where_the_log_leads_on_from_it(entries, found):
    assert text_through(entries, seq=5, text="saved") == found


@given(st.lists(st.text(max_size=5), max_size=20), st.data())
def test_any_checkpoint_and_the_log_behind_any_cut_before_it_give_the_whole_text(texts, data):
    entries = [delta(seq, text) for seq, text in enumerate(texts, 1)]
    saved = data.draw(st.integers(0, len(texts)))
    cut = data.draw(st.integers(0, saved))
    found = text_through(entries[cut:], seq=saved, text="".join(texts[:saved]))
    assert found == (len(texts), "".join(texts))
