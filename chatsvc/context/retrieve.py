"""Which old passages answer a new question: the ranking. Pure; where the numbers come from is the store's business.

A *passage* is a message, or a piece of a long one. It is scored by its words (BM25) and by its meaning (cosine of
vectors); alone, and in its *window* of two passages to either side, since what an answer is about often stands in its
question, and a topic seldom ends with one message.

    words     BM25 of the passage, BM25 of the window as if it were one text
    meaning   cosine of the passage, mean of the cosines in the window
    score     each of the four stretched to 0 … 1 over all passages (min-max); windows count twice, words as much as
              meaning

What is ranked first need not have to do with the question: the best of nothing is stretched to 1 too. So a passage is
quoted only if it, or one in its window, is close to the question in meaning or has half of the question's words by
their weight (``related``).

Laws (tests/unit/test_context_retrieve.py): scores lie in 0 … 1; a passage without a vector is ranked as if its meaning
were that of the least fitting one, and without any vectors words alone decide; how passages were packed into chunks
changes nothing; what is chosen never exceeds the budget.

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


SHARE: Final = 0.5
"""Of the question's words, by their weight: a passage that has so much of them is related whatever its meaning."""


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


def word_shares(passages: int, asked: int, found: Sequence[Postings]) -> Floats:
    """The share of the question's terms, by their weight, that each passage has: 0 … 1.

    ``asked``: how many terms the question has; ``found``: the postings of those that occur.
    """
    shares = np.zeros(passages, np.float32)
    whole = (asked - len(found)) * _weight(passages, 0)
    for postings in found:
        weight = _weight(passages, len(postings.positions))
        shares[postings.positions] += weight
        whole += weight
    return shares / np.float32(whole) if whole > 0 else shares


def related(cosines: Floats, shares: Floats, *, unrelated: float) -> npt.NDArray[np.bool_]:
    """Which passages may have to do with the question, by themselves or by one in their window.

    ``unrelated``: texts with a smaller cosine have nothing to do with each other. One without a vector may have.
    """
    near = ~(cosines < unrelated) | (shares >= SHARE)
    return np.asarray(_around(near.astype(np.float32)) > 0)


def best(scores: Floats, count: int) -> list[int]:
    """The positions of the best ``count`` that score at all, best first; of equals the newest."""
    newest_first = np.arange(len(scores))[::-1]
    order = newest_first[np.argsort(-scores[newest_first], kind="stable")][:count]
    return [int(position) for position in order if scores[position] > 0]


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


def _weight(passages: int, having: int) -> float:
    return float(np.log1p((passages - having + 0.5) / (having + 0.5)))


def _weighted(counts: Floats, norms: Floats) -> Floats:
    passages, having = len(counts), int(np.count_nonzero(counts))
    return np.asarray(_weight(passages, having) * counts * (K1 + 1) / (counts + norms), np.float32)
