"""Which old passages answer a new question: the ranking. Pure; where the numbers come from is the store's business.

A *passage* is a message, or a piece of a long one. It is scored by its words (BM25) and by its meaning (cosine of
vectors); alone, and in its *window* of two passages to either side, since what an answer is about often stands in its
question, and a topic seldom ends with one message.

    words     BM25 of the passage, BM25 of the window as if it were one text
    meaning   cosine of the passage, mean of the cosines in the window
    score     each of the four stretched to 0 … 1 over all passages (min-max); windows count twice, words as much as
              meaning

Whether anything is quoted at all, and how far from the best it may be, is decided by ``need``.

Laws (tests/unit/test_context_retrieve.py): scores lie in 0 … 1; a passage without a vector is ranked as if its meaning
were that of the least fitting one, and without any vectors words alone decide; how passages were packed into chunks
changes nothing; what is chosen never exceeds the budget; where a greater share of the best score is asked for, it is
never more.

BM25 as in Robertson and Zaragoza, "The Probabilistic Relevance Framework" (2009), with the never-negative weights
ln(1 + (N - n + ½)/(n + ½)), and the ``K1`` and ``B`` that are customary for passages. What each of these choices brings
is measured in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

K1: Final = 0.9
B: Final = 0.4
AROUND: Final = 2
"""Passages to either side that make a window."""
WINDOW_WEIGHT: Final = 2
"""Of a passage's window, where the passage itself has 1."""


class Postings(msgspec.Struct, frozen=True):
    """Where a term occurs: positions of passages, and how often in each."""

    positions: Ints
    counts: Floats


class Words(msgspec.Struct, frozen=True):
    """BM25 of every passage and of its window."""

    alone: Floats
    window: Floats


def words_scores(lengths: Floats, found: Iterable[Postings]) -> Words:
    """BM25. ``lengths``: terms of each passage; ``found``: the postings of each of the question's terms, once."""
    windows = _around(lengths)
    alone, window = _norms(lengths), _norms(windows)
    scores = Words(np.zeros(len(lengths), np.float32), np.zeros(len(lengths), np.float32))
    for postings in found:
        counts = np.zeros(len(lengths), np.float32)
        counts[postings.positions] = postings.counts
        scores.alone[:] += _weighted(counts, alone)
        scores.window[:] += _weighted(_around(counts), window)
    return scores


def fused(words: Words | None, cosines: Floats | None) -> Floats:
    """One score of 0 … 1 for every passage. ``cosines``: NaN where a passage has no vector (yet)."""
    parts: list[Floats] = []
    if words is not None:
        parts.append(_together(words.alone, words.window))
    if cosines is not None and (known := np.isfinite(cosines)).any():
        filled = np.where(known, cosines, cosines[known].min()).astype(np.float32)
        inside = _around(np.ones(len(filled), np.float32))
        parts.append(_together(filled, _around(filled) / inside))
    return np.asarray(sum(parts) / len(parts), np.float32)


def best(scores: Floats, count: int, *, enough: float = 0.0) -> list[int]:
    """The positions of the best ``count`` that score at all, best first; of equals the newest.

    ``enough``: only what scores at least this share of what the best one does.
    """
    newest_first = np.arange(len(scores))[::-1]
    order = newest_first[np.argsort(-scores[newest_first], kind="stable")][:count]
    least = enough * float(scores.max(initial=0))
    return [int(position) for position in order if scores[position] > 0 and scores[position] >= least]


def within(ranked: Iterable[int], tokens: Mapping[int, int], *, budget: int, most: int) -> list[int]:
    """Of passages in the order of their rank: as many as fit ``budget`` tokens, at most ``most``.

    One that is too long for what is left is passed over for the next that fits.
    """
    chosen: list[int] = []
    left = budget
    for position in ranked:
        if len(chosen) == most:
            break
        if tokens[position] <= left:
            chosen.append(position)
            left -= tokens[position]
    return chosen


def weight(passages: int, having: int) -> float:
    """Of a word that so many of the passages have: the rarer, the more."""
    return float(np.log1p((passages - having + 0.5) / (having + 0.5)))


def stretched(scores: Floats) -> Floats:
    """Scores moved and scaled to 0 … 1; all 0 where they do not differ."""
    if not len(scores):
        return scores
    low, high = scores.min(), scores.max()
    if high <= low:
        return np.zeros_like(scores)
    return np.asarray((scores - low) / (high - low), np.float32)


def joined(parts: Sequence[tuple[int, Postings]]) -> Postings:
    """The postings of one term from chunks that begin at the given positions."""
    return Postings(
        np.concatenate([postings.positions + start for start, postings in parts]),
        np.concatenate([postings.counts for _, postings in parts]),
    )


def _together(alone: Floats, window: Floats) -> Floats:
    both = stretched(alone) + WINDOW_WEIGHT * stretched(window)
    return np.asarray(both / (1 + WINDOW_WEIGHT), np.float32)


def _around(values: Floats) -> Floats:
    """The sum over each one's window, which is shorter at both ends."""
    sums = values.copy()
    for distance in range(1, min(AROUND, len(values) - 1) + 1):
        sums[distance:] += values[:-distance]
        sums[:-distance] += values[distance:]
    return sums


def _norms(lengths: Floats) -> Floats:
    mean = lengths.mean() if len(lengths) else 0
    return np.asarray(K1 * (1 - B + B * lengths / mean) if mean > 0 else np.full_like(lengths, K1), np.float32)


def _weighted(counts: Floats, norms: Floats) -> Floats:
    passages, having = len(counts), int(np.count_nonzero(counts))
    return np.asarray(weight(passages, having) * counts * (K1 + 1) / (counts + norms), np.float32)
