"""From text to the terms that recall compares: the same for what was said and for what is asked.

    normalise      compatibility forms, case (ς is σ), accents: ``CAFÉ`` in any encoding is ``cafe``
    split          words of letters, digits and marks; scripts without spaces give pairs of neighbours
    leave out      the English words that say nothing by themselves; other languages' are found by how often they come
    fold endings   English plurals, -ing, -ed, -ly, -e and -y, so that ``painted`` meets ``painting``
    find days      ``May 7``, ``7th of May`` are a day and its month, and no number

Pure, and without knowledge of who asks. A change here makes what is indexed and what is asked differ: raise
``VERSION`` with it.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from typing import Final

VERSION: Final = 2
"""Of the terms; an index that was made by another version is not compared with, and is made again."""
_ASCII_WORD: Final = re.compile(r"[a-z0-9]+")
_NO_SPACES: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"  # Kana, Han, Hangul
)
_HAN: Final = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# Vowel signs of Indian scripts and points of Arabic and Hebrew belong to their words, though they are no letters.
_MARKS: Final = "\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_WORD: Final = re.compile(f"[{_NO_SPACES}]+|[^\\W_{_NO_SPACES}](?:[^\\W_{_NO_SPACES}]|[{_MARKS}])*")
_PAIRED: Final = re.compile(f"[{_NO_SPACES}]")
_ACCENTS: Final = re.compile("[\u0300-\u036f]")
_LONGEST: Final = 64
"""Characters of a term; what is longer (keys, encoded data) is compared by its beginning."""
_STOP: Final = frozenset(
    """
    a about after again all also am an and any are as at be because been before being between both but by can
    could d did do does doing don down during each few for from further had has have having he her here hers
    herself him himself his how i if in into is it its itself just ll m me more most my myself no nor not now of
    off on once only or other our ours ourselves out over own re s same she should so some such t than that the
    their theirs them themselves then there these they this those through to too under until up ve very was we
    were what when where which while who whom why will with would you your yours yourself yourselves
    """.split()  # noqa: SIM905 - a list of words is read more easily
)
_NAMES: Final = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_DAY: Final = re.compile("0?([1-9]|[12][0-9]|3[01])(?:st|nd|rd|th)?")
"""Of a month, where one is named beside it."""
_SHORTEST_STEM: Final = 3
_VOWELS: Final = frozenset("aeiouy")


def terms(text: str) -> list[str]:
    """The terms of a text in their order, with repeats."""
    found = list(_terms(text))
    return found if _MONTHS.isdisjoint(found) else list(_with_days(found))


def terms_of_day(day: date) -> tuple[str, str, str]:
    """The terms by which a day is found: itself, its month, its year.

    Not its number alone: "question 1" is no question for what was said on the first of a month.
    """
    month = _STEMS[day.month - 1]
    return _day_term(month, str(day.day)), month, str(day.year)


def key(term: str) -> int:
    """A term as the index keeps it: 32 bits. Two of one conversation's words share one about never."""
    return zlib.crc32(term.encode())


def normal(text: str) -> str:
    """Text in the one form in which it is compared."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", unicodedata.normalize("NFKD", folded)))


def _terms(text: str) -> Iterator[str]:
    plain = normal(text)
    for word in (_ASCII_WORD if plain.isascii() else _WORD).findall(plain):
        if word.isascii():
            if word not in _STOP:
                yield _stem(word[:_LONGEST])
        elif _PAIRED.match(word):
            yield from _pairs(word)
        else:
            yield word[:_LONGEST]


def _with_days(found: list[str]) -> Iterator[str]:
    """A number beside a month is a day of it, and not a number; between two months it may be either's."""
    for place, word in enumerate(found):
        day = _DAY.fullmatch(word)
        months = _MONTHS.intersection(found[max(0, place - 1) : place + 2]) if day else frozenset()
        yield from (_day_term(month, day[1]) for month in sorted(months)) if day and months else (word,)


def _day_term(month: str, number: str) -> str:
    """With a mark that no word has."""
    return f"{month}/{number}"


def _pairs(run: str) -> Iterator[str]:
    """Neighbours by twos; a Chinese character alone is a word too."""
    if len(run) == 1:
        yield run
        return
    for first, second in pairwise(run):
        yield first + second
    yield from _HAN.findall(run)


def _stem(word: str) -> str:
    """A word without its English ending. Coarse on purpose: it has to agree with itself, not with a dictionary."""
    if len(word) <= _SHORTEST_STEM or word.isdigit():
        return word
    word = _without_plural(word)
    word = _without_participle(word)
    if word.endswith("ly") and len(word) - 2 > _SHORTEST_STEM:
        word = word[:-2]
    if word.endswith("e") and len(word) > _SHORTEST_STEM:
        word = word[:-1]
    if word.endswith("y") and len(word) > _SHORTEST_STEM:
        word = word[:-1] + "i"
    return word


def _without_plural(word: str) -> str:
    if word.endswith("ies") and len(word) > _SHORTEST_STEM + 1:
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "zes", "shes", "ches")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def _without_participle(word: str) -> str:
    if word.endswith("ied") and len(word) > _SHORTEST_STEM + 1:
        return word[:-3] + "y"
    for ending in ("ing", "ed"):
        stem = word.removesuffix(ending)
        if stem != word and len(stem) >= _SHORTEST_STEM and _VOWELS.intersection(stem):
            doubled = len(stem) > _SHORTEST_STEM and stem[-1] == stem[-2] and stem[-1] not in "lsz"
            return stem[:-1] if doubled else stem
    return word


# Down here, where endings can be folded.
_STEMS: Final = tuple(_stem(month) for month in _NAMES)
_MONTHS: Final = frozenset(_STEMS)
