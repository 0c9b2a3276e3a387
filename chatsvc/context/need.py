"""Does a new message need anything old? Pure. What is needed is ranked by ``retrieve``.

What is ranked first need not have to do with the message: something always is. And what is recalled is computed anew
in every turn, so an ordinary message, which goes on from what was said just now, recalls nothing. Four things tell:

    share      of the message's words, by their weight, what one old passage has of them and tells about: the greatest
    lately     of the same words, what occurs in what was said last and stands in the prompt anyway
    closeness  how much closer in meaning the closest old passage is than old passages usually are to this message
    need       share - ``LATELY`` x lately + closeness; at least ``NEEDED``, or nothing is recalled

More closeness than ``CLOSEST`` counts no more, so for most messages their words alone tell that nothing is needed, and
no vector has to be made (``Need.is_open``).

What is needed badly is recalled as far as it fits, what is hardly needed only in its best passages (``Need.enough``).
Where there is little room, in a small window, old turns crowd out newer ones and are most of what a turn has to
compute: they have to be needed more (``SCARCE``).

A word's weight is that of the ranking: a word that is rare in the old part weighs much, one that is everywhere next to
nothing. A message whose words are all common, or that brings many words of its own, has a small share in any single
passage; one that goes on about the last subject has its words there. So this works in any language that can be split
into words, and without vectors: where there are none (no embedder, or not all made yet), there is no closeness, and
``NEEDED_BY_WORDS`` is enough.

Two things would deceive: a passage that says little but what the message says itself ("Thanks!", "Wow, that looks
amazing!") has little to tell, so its share counts less (``TELLING``), and one that says nothing else is no reason at
all; and who asks once more what was asked a moment ago has not found the answer in what was said lately, so that turn
does not count (``lately``).

Laws (tests/unit/test_context_need.py): share, lately and closeness lie in 0 … 1; more that was said lately never makes
anything old more needed, nor does a greater ``NEEDED`` or less room; a message of one word that a single old passage
has, beside others, and nothing said lately, always needs it; by words alone nothing is needed by a message whose words
no passage has.

What the constants bring is measured by bench/recall_floor.py, see docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from chatsvc.context.passages import DAY_TERMS
from chatsvc.context.retrieve import Floats, Postings, weight
from chatsvc.context.words import terms
from chatsvc.conversation import Message, Role

NEEDED: Final = 0.55
NEEDED_BY_WORDS: Final = 0.08
CLOSEST: Final = NEEDED
"""So meaning alone may be just enough, where there is room. Without a limit 75 % of messages that go on about a subject
need nothing instead of 78 %, and 0.2 points more of what is asked for are found (0.4 in a small window)."""
ENOUGH: Final = 0.5
ENOUGH_BY_WORDS: Final = 0.3
"""Of the best score: what is less has next to none of the evidence, and costs as much. Words alone fall off steeply."""
ENOUGH_AT_LEAST: Final = 0.8
"""The same for a message that just needs something."""
PLAINLY: Final = 0.2
"""A need that is so much beyond the least is no doubtful one."""
ROOM: Final = 1000
"""Tokens in which nothing is scarce."""
SCARCE: Final = 0.2
SCARCE_BY_WORDS: Final = 0.1
"""So much more has to be needed where there is next to no room; where there is half of it, half as much more."""
LATELY: Final = 0.7
"""Not all of it: a question about something old may well use a word of the last subject."""
LATELY_CHARS: Final = 1600
"""Of either side, from the end of what stands verbatim in the prompt: the subject at hand. In much more text any word
occurs, and in the last reply alone, which may be long, there is less of it than in what the user wrote before."""
LEAST_WORDS: Final = 1.5
"""A message's words weigh at least so many words that occur once: "What do you think?" has less to be found by."""
TELLING: Final = 2.0
"""Words of its own, for each of the message's, that a passage has to have to count in full. One that has next to none
counts half: a plain fact is told in few words, too."""
TELLING_TERMS: Final = 40
"""So many of its own are enough for any message: few passages have more."""
AGAIN: Final = 2 / 3
"""Of the terms of either: a message that has so many in common with one before asks the same again."""
UNLIKE: Final = 16
"""So many passages are imagined that are not at all like the message: a few real ones do not tell what is usual."""


class Need(msgspec.Struct, frozen=True):
    """See the module's docstring. ``closeness`` None: not known."""

    share: float
    lately: float
    closeness: float | None
    room: int = ROOM
    """Tokens for what is recalled."""

    @property
    def met(self) -> bool:
        """Whether anything old is worth its tokens."""
        return self._beyond >= 0

    @property
    def is_open(self) -> bool:
        """Whether it is met, or would be if a passage were as close in meaning as can be."""
        return self.met or msgspec.structs.replace(self, closeness=CLOSEST).met

    @property
    def enough(self) -> float:
        """The share of the best score that a passage has to have to be worth its tokens."""
        least = ENOUGH_BY_WORDS if self.closeness is None else ENOUGH
        return ENOUGH_AT_LEAST - (ENOUGH_AT_LEAST - least) * min(1.0, max(0.0, self._beyond / PLAINLY))

    @property
    def _beyond(self) -> float:
        words = self.share - LATELY * self.lately
        lacking = 1 - min(1.0, self.room / ROOM)
        if self.closeness is None:
            return words - NEEDED_BY_WORDS - SCARCE_BY_WORDS * lacking
        return words + min(self.closeness, CLOSEST) - NEEDED - SCARCE * lacking


def need(
    lengths: Floats,
    found: Mapping[int, Postings],
    lately: npt.NDArray[np.bool_],
    cosines: Floats | None,
    *,
    unrelated: float | None,
) -> Need:
    """What a message needs of old passages.

    ``lengths``: terms of each passage, with those of its day; ``found``: where those of the message's terms occur that
    do, by their number; ``lately``: for each of its terms, whether it was said lately; ``cosines``: of every passage,
    NaN where it has no vector; ``unrelated``: texts with a smaller one have nothing to do with each other, None where
    that is not known.
    """
    passages = len(lengths)
    weights = np.array([weight(passages, len(found[n].positions) if n in found else 0) for n in range(len(lately))])
    whole = max(float(weights.sum()), LEAST_WORDS * weight(passages, 1))
    shares, more = np.zeros(passages), lengths - DAY_TERMS
    for number, postings in found.items():
        shares[postings.positions] += weights[number]
        more[postings.positions] -= postings.counts
    telling = more > 0
    tells = 0.5 + 0.5 * np.clip(more / min(TELLING * max(1, len(lately)), TELLING_TERMS), 0, 1)
    return Need(
        float((shares * tells)[telling].max(initial=0)) / whole,
        float(weights[lately].sum()) / whole,
        None if cosines is None else closeness(cosines, telling, unrelated=unrelated),
    )


def closeness(cosines: Floats, telling: npt.NDArray[np.bool_], *, unrelated: float | None) -> float | None:
    """Of the passages that have something to tell, 0 … 1; None where one has no vector: it may be the one.

    Measured from what is usual in this conversation and for this message, so that it means the same with any model, in
    any language and on any subject.
    """
    if not len(cosines) or not np.isfinite(cosines).all():
        return None
    nearest = min(1.0, float(cosines[telling].max(initial=-1)))
    if unrelated is not None and nearest < unrelated:
        return 0.0
    usual = max(0.0, float(cosines.sum()) / (len(cosines) + UNLIKE))
    return max(0.0, nearest - usual) / (1 - usual)


def lately(turns: Iterable[Sequence[Message]], question: str) -> str:
    """What was said last, at most ``LATELY_CHARS`` by either side, but for the turns in which the same was asked.

    ``turns``: those that stand verbatim in front of the question, the newest first.
    """
    asked = _end_terms(question)
    said: list[str] = []
    room = {True: LATELY_CHARS, False: LATELY_CHARS}
    for turn in turns:
        if max(room.values()) <= 0:
            break
        if asked and any(message.role is Role.USER and _asks(message.content, asked) for message in turn):
            continue
        for message in reversed(turn):
            side = message.role is Role.USER
            if room[side] > 0:
                said.append(message.content[-room[side] :])
                room[side] -= len(message.content)
    return "\n".join(reversed(said))


def _asks(content: str, asked: set[str]) -> bool:
    """Whether a message asks the same."""
    there = _end_terms(content)
    return len(asked & there) >= AGAIN * max(len(asked), len(there))


def _end_terms(message: str) -> set[str]:
    """Nobody asks at the beginning of a long message."""
    return set(terms(message[-LATELY_CHARS:]))
