"""Messages cut into passages, and passages packed into chunks: what the index for recall holds. Pure.

A passage is a message, or a piece of a long one that ends where a paragraph, a sentence or at least a word does: it is
found by what it says, and quoted as it is. Together the passages of a message are its text.

A chunk holds the passages of some successive messages of a branch, packed so that a question reads little:

    words     lengths   terms of each passage                        u4 × passages
              keys      32-bit keys of the terms in it, ascending    u4 × terms
              offsets   where the postings of each begin             u4 × (terms + 1)
              postings  passage, count; by term, then passage        u2, u2 × postings
    vectors   scales    of each passage's vector                     f4 × passages
              values    in units of its scale                        i1 × passages × dimensions

All little-endian; ``words`` begins with the numbers of passages, terms and postings (u4 × 3).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from chatsvc.context.retrieve import Floats, Postings
from chatsvc.context.words import key, terms, terms_of_day

LONGEST: Final = 800
"""Characters of a passage: some 200 tokens of English, what embedding models read well and a prompt can quote."""
SHORTEST: Final = 200
"""A passage is not cut shorter than this for the sake of a better place."""
PASSAGES_IN_CHUNK: Final = 128
"""A chunk is closed when it has so many; the last message may bring more."""
DAY_TERMS: Final = 3
"""Of each passage's terms: the day on which it was said."""
_MOST: Final = 60_000
"""Passages of one message: positions in a chunk have 16 bits. A longer message gets longer passages."""
_CUTS: Final = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"[.!?…]\s|[。！？]"), re.compile(r"\s"))
"""Where to cut, best first: after a paragraph, a line, a sentence, a word."""


class Passage(msgspec.Struct, frozen=True):
    """Characters ``start`` to ``end`` of a message."""

    message_id: str
    start: int
    end: int
    text: str
    said_at: datetime


class Spoken(msgspec.Struct, frozen=True):
    """What the index needs of a message."""

    id: str
    content: str
    said_at: datetime


class Packed(msgspec.Struct, frozen=True):
    """A chunk as it is stored: positions in a message for each passage, and the words of all."""

    message_ids: list[str]
    starts: list[int]
    ends: list[int]
    words: bytes


def passages_of(message: Spoken) -> Iterator[Passage]:
    """A message cut into passages; none of a message without text."""
    content = message.content
    shortest = max(SHORTEST, -(-len(content) // _MOST))
    longest = max(LONGEST, 2 * shortest)
    start = 0
    while start < len(content):
        end = _cut(content, start, shortest, longest)
        if content[start:end].strip():
            yield Passage(message.id, start, end, content[start:end], message.said_at)
        start = end


def pack(passages: Sequence[Passage]) -> Packed:
    """The passages of one chunk, in their order."""
    counts = [Counter(map(key, [*terms(passage.text), *terms_of_day(passage.said_at)])) for passage in passages]
    return Packed(
        [passage.message_id for passage in passages],
        [passage.start for passage in passages],
        [passage.end for passage in passages],
        _packed_words(counts),
    )


class Words:
    """The words of one chunk, read without unpacking what no question asks for."""

    def __init__(self, packed: bytes) -> None:
        passages, keys, postings = (int(number) for number in np.frombuffer(packed, "<u4", 3))
        numbers = np.frombuffer(packed, "<u4", passages + keys + keys + 1, 12)
        self.lengths: Floats = numbers[:passages].astype(np.float32)
        self._keys = numbers[passages : passages + keys]
        self._offsets = numbers[passages + keys :]
        self._postings = np.frombuffer(packed, "<u2", 2 * postings, 12 + numbers.nbytes).reshape(2, postings)

    def find(self, wanted: npt.NDArray[np.uint32]) -> Iterator[tuple[int, Postings]]:
        """For each of the wanted keys that occurs: its place in ``wanted``, and where it occurs."""
        if not len(self._keys):
            return
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        for number in np.flatnonzero(self._keys[places] == wanted):
            begin, end = self._offsets[places[number]], self._offsets[places[number] + 1]
            positions, counts = self._postings[:, begin:end]
            yield int(number), Postings(positions.astype(np.int64), counts.astype(np.float32))


def pack_vectors(vectors: Floats) -> bytes:
    """Vectors of length 1 in 8 bits a dimension: a cosine is off by a hundredth at most, for a quarter of the room."""
    scales = np.abs(vectors).max(axis=1, initial=0) / np.float32(127)
    values = np.rint(vectors / np.where(scales > 0, scales, 1)[:, None]).astype("<i1")
    return bytes(scales.astype("<f4").tobytes() + values.tobytes())


def cosines(packed: bytes | None, passages: int, question: Floats) -> Floats:
    """The cosines of a chunk's passages with a question of length 1; NaN where it has no vectors of that kind."""
    if packed is None or len(packed) != passages * (4 + len(question)):
        return np.full(passages, np.nan, np.float32)
    scales = np.frombuffer(packed, "<f4", passages)
    values = np.frombuffer(packed, "<i1", offset=scales.nbytes).reshape(passages, len(question))
    return np.asarray(scales * (values.astype(np.float32) @ question), np.float32)


def question_keys(question: str) -> npt.NDArray[np.uint32]:
    """The keys of a question's terms, each once, ascending."""
    return np.unique(np.fromiter(map(key, terms(question)), np.uint32))


def _cut(content: str, start: int, shortest: int, longest: int) -> int:
    end = start + longest
    if end >= len(content):
        return len(content)
    for place in _CUTS:
        ends = [match.end() for match in place.finditer(content, start + shortest, end)]
        if ends:
            return ends[-1]
    return end


def _packed_words(counts: Sequence[Mapping[int, int]]) -> bytes:
    by_key: dict[int, list[tuple[int, int]]] = {}
    for position, passage in enumerate(counts):
        for term, count in passage.items():
            by_key.setdefault(term, []).append((position, min(count, 65_535)))
    keys = sorted(by_key)
    postings = [posting for term in keys for posting in by_key[term]]
    offsets = np.concatenate([[0], np.cumsum([len(by_key[term]) for term in keys], dtype=np.int64)])
    parts: Iterable[npt.NDArray[np.generic]] = (
        np.array([len(counts), len(keys), len(postings)], "<u4"),
        np.array([sum(passage.values()) for passage in counts], "<u4"),
        np.array(keys, "<u4"),
        offsets.astype("<u4"),
        np.array(postings, "<u2").reshape(-1, 2).T,
    )
    return b"".join(part.tobytes() for part in parts)


def chunked(messages: Iterable[Spoken]) -> Iterator[tuple[str, list[Passage]]]:
    """Messages in their order, cut into chunks: the id of the last message of each, and its passages."""
    gathered: list[Passage] = []
    last: str | None = None
    for message in messages:
        gathered += passages_of(message)
        last = message.id
        if len(gathered) >= PASSAGES_IN_CHUNK:
            yield last, gathered
            gathered, last = [], None
    if last is not None:
        yield last, gathered
