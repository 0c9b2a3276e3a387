"""How many of the passages that answer a question does recall find, and how long does it take?

    python bench/recall.py [--data FILE] [--conversations N] [--turns 10000] [--json]

FILE has the schema of LoCoMo (snap-research/locomo): long conversations of two people, questions about them, and the
ids of the turns that hold the evidence. Every conversation is written into a Postgres of the benchmark's own, indexed
by the service's own loop, and asked through the service's own code:

    ours        words and meaning, as the service ranks with its default embedder
    bm25        words alone, as it ranks with none
    embedding   meaning alone

R@5, R@10: share of a question's evidence among the best 5 and 10 passages, mean over the questions. R in 1k, 4k: among
as many of the best as fit so many tokens (characters / 4). p50: milliseconds from the question to the texts to be
quoted, with what the embedder and Postgres take; least: the same at its best, which is what it takes where nobody else
uses the machine. ``--turns N`` measures that also in a conversation of N turns, put together from all of them.
``--choices`` shows what each choice in the ranking brings, over all conversations and over either half of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import msgspec
import numpy as np
import psycopg
import structlog

from chatsvc.clock import SystemClock
from chatsvc.config import ContextConfig
from chatsvc.context import passages, retrieve
from chatsvc.context.passages import Passage, Spoken, pack, passages_of
from chatsvc.context.retrieve import best
from chatsvc.context.words import VERSION
from chatsvc.embedded import embedded_postgres
from chatsvc.inference.embedder import Embedder, create_embedder
from chatsvc.limits import Principal, TierName
from chatsvc.scheduler.indexing import Indexer
from chatsvc.scheduler.recall import Recall, compared, scores_of
from chatsvc.store import NewConversation, RecallBranch, Store, migrate, open_store

DATA: Final = Path(__file__).parent.parent.parent / "shared" / "data" / "locomo10.json"
USER: Final = Principal("bench", TierName.PRO)
METHODS: Final = ("ours", "bm25", "embedding")
CHARS_PER_TOKEN: Final = 4
TIMED: Final = 40
"""Questions of each conversation whose time is taken, spread over all; finding is measured on all."""
_INSERT: Final = """
    INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, created_at)
    VALUES (%s, %s, %s, %s, %s, %s, 'complete', %s)
"""


class Turn(msgspec.Struct, frozen=True):
    """An utterance, and its id in the data."""

    name: str
    text: str
    said_at: datetime


class Question(msgspec.Struct, frozen=True):
    """A question and the names of the turns with its evidence."""

    text: str
    evidence: frozenset[str]


class Talk(msgspec.Struct, frozen=True):
    """A conversation and what is asked about it."""

    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]


class Remembering(Embedder):
    """An embedder that gives the same text the same vector without making it again: talks share turns here.

    Questions are embedded every time.
    """

    def __init__(self, inner: Embedder) -> None:
        self.name = inner.name
        self.unrelated = inner.unrelated
        self._inner = inner
        self._known: dict[str, Any] = {}
        self.remembers = True

    async def embed(self, texts: Sequence[str]) -> Any:
        new = [text for text in texts if text not in self._known] if self.remembers else list(texts)
        made = dict(zip(new, await self._inner.embed(new), strict=True)) if new else {}
        if self.remembers:
            self._known |= made
        return np.stack([made[text] if text in made else self._known[text] for text in texts])

    async def aclose(self) -> None:
        await self._inner.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"file of LoCoMo's schema; default: {DATA}")
    parser.add_argument("--conversations", type=int, help="only so many of them")
    parser.add_argument("--turns", type=int, default=0, help="time questions in a conversation of so many turns too")
    parser.add_argument("--embedder", default="minilm", help="as in [context] embedder")
    parser.add_argument("--choices", action="store_true", help="what each choice in the ranking brings")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    data = arguments.data or DATA
    if not data.is_file():
        sys.exit(
            f"There is no {data}. Give a file of LoCoMo's schema with --data, such as locomo10.json of"
            " github.com/snap-research/locomo."
        )
    talks = read(data)[: arguments.conversations]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(run(talks, arguments))


def read(path: Path) -> list[Talk]:
    talks = []
    for item in json.loads(path.read_text(encoding="utf-8")):
        said = item["conversation"]
        sessions = sorted(int(match[1]) for key in said if (match := re.fullmatch(r"session_(\d+)", key)))
        turns = [
            Turn(turn["dia_id"], text_of(turn), at + timedelta(seconds=number))
            for session in sessions
            for at in [datetime.strptime(said[f"session_{session}_date_time"] + " +0000", "%I:%M %p on %d %B, %Y %z")]
            for number, turn in enumerate(said[f"session_{session}"])
        ]
        questions = tuple(
            Question(asked["question"], frozenset(evidence))
            for asked in item["qa"]
            if (evidence := re.findall(r"D\d+:\d+", " ".join(asked["evidence"])))
        )
        talks.append(Talk(tuple(turns), questions))
    return talks


def text_of(turn: dict[str, Any]) -> str:
    caption = f" [image: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
    return f"{turn['speaker']}: {turn['text']}{caption}"


async def run(talks: list[Talk], arguments: argparse.Namespace) -> None:
    made = create_embedder(arguments.embedder)
    if made is None:
        sys.exit("The comparison needs an embedder.")
    embedder = Remembering(made)
    found: dict[str, list[tuple[float, float, float, float]]] = {method: [] for method in METHODS}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    quoted: list[float] = []
    choices: dict[str, list[tuple[int, float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="chatsvc-bench-", dir="/tmp") as directory:
        async with embedded_postgres(Path(directory), lambda _: None) as url:
            await migrate(url)
            async with open_store(url, pool_size=4, timeout_s=30) as store:
                for number, talk in enumerate(talks):
                    asked = await Asked.of(store, url, embedder, talk)
                    say(f"conversation {number + 1} of {len(talks)}: {len(talk.turns)} turns", arguments.json)
                    for question in talk.questions:
                        for method in METHODS:
                            found[method].append(await asked.shares(question, method))
                    for question in talk.questions[:: -(-len(talk.questions) // TIMED)]:
                        quoted.append((await asked.quotation(question))[1])
                        for method in METHODS:
                            times[method].append(await asked.seconds(question, method))
                    if arguments.choices and not arguments.json:
                        for name, shares in await asked.choices():
                            choices.setdefault(name, []).extend((number % 2, *share) for share in shares)
                report(found, times, quoted, as_json=arguments.json)
                report_choices(choices)
                if arguments.turns:
                    await long_one(store, url, embedder, talks, arguments)
        await embedder.aclose()


class Asked:
    """A conversation in the store, indexed."""

    def __init__(self, store: Store, embedder: Remembering, branch: RecallBranch, talk: Talk, ids: list[str]) -> None:
        self._store = store
        self._embedder = embedder
        self.branch = branch
        self._passages = [
            msgspec.structs.replace(turn, text=passage.text)
            for turn in talk.turns
            for passage in passages_of(Spoken(turn.name, turn.text, turn.said_at))
        ]
        """As they lie in the index: a long utterance is several, an empty one none."""
        self._questions = talk.questions
        self._vectors: dict[str, Any] = {}
        self.names = {id_: turn.name for id_, turn in zip(ids, talk.turns, strict=True)}
        self._recalls = {
            method: Recall(
                index=store.recall, engines={}, embedder=with_, clock=SystemClock(), most=ContextConfig().recall_turns
            )
            for method, with_ in (("ours", embedder), ("bm25", None))
        }

    @classmethod
    async def of(cls, store: Store, url: str, embedder: Remembering, talk: Talk, *, folds: Sequence[int] = ()) -> Asked:
        """``folds``: indexed up to each of these turns first, as folds have it done."""
        conversation = await store.conversations.create(USER, NewConversation(id=f"conv_{time.time_ns()}"))
        ids = [f"{conversation.id}_{number:06d}" for number in range(len(talk.turns))]
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            async with connection.cursor() as cursor:
                await cursor.executemany(
                    _INSERT,
                    [
                        (
                            *(ids[number], USER.user_id, conversation.id, ids[number - 1] if number else None),
                            *("assistant" if number % 2 else "user", turn.text, turn.said_at),
                        )
                        for number, turn in enumerate(talk.turns)
                    ],
                )
            await connection.execute("ANALYZE messages")
        indexer = Indexer(index=store.recall, embedder=embedder, clock=SystemClock())
        embedder.remembers = True
        for number in (*folds, len(ids) - 1):
            branch = RecallBranch(user_id=USER.user_id, conversation_id=conversation.id, through=ids[number])
            indexer.soon(branch)
            while await indexer.step():
                pass
        embedder.remembers = False
        return cls(store, embedder, branch, talk, ids)

    async def ranked(self, question: str, method: str) -> list[int]:
        """The positions of all passages that score, best first."""
        name = None if method == "bm25" else self._embedder.name
        vector = None if method == "bm25" else (await self._embedder.embed([question]))[0]
        chunks = await self._store.recall.chunks(self.branch, version=VERSION, embedder=name)
        ranked = scores_of(chunks, compared(chunks, question), vector, words=method != "embedding")
        return best(ranked.scores, len(self._passages))

    async def shares(self, question: Question, method: str) -> tuple[float, float, float, float]:
        """R@5, R@10, R within 1,000 and within 4,000 tokens."""
        passages = [self._passages[position] for position in await self.ranked(question.text, method)]
        sums = np.cumsum([len(passage.text) / CHARS_PER_TOKEN for passage in passages])
        fitting = (passages[: int(np.searchsorted(sums, budget, side="right"))] for budget in (1000, 4000))
        one, two = (self._share(question, names_of(part)) for part in fitting)
        names = names_of(passages)
        return self._share(question, names[:5]), self._share(question, names[:10]), one, two

    async def choices(self) -> list[tuple[str, list[tuple[float, float]]]]:
        """R@5 and R@10 of every question, one choice after the other added."""
        chunks = await self._store.recall.chunks(self.branch, version=VERSION, embedder=self._embedder.name)
        undated = []
        with changed(passages, terms_of_day=lambda _: []):
            first = 0
            for chunk in chunks:
                part = self._passages[first : first + chunk.passages]
                packed = pack([Passage(turn.name, 0, len(turn.text), turn.text, turn.said_at) for turn in part])
                undated.append(msgspec.structs.replace(chunk, words=packed.words))
                first += chunk.passages
        results = []
        for name, settings, with_ in (
            ("the nearest vectors of single turns", {"WINDOW_WEIGHT": 0}, chunks),
            ("words and meaning of each passage alone", {"WINDOW_WEIGHT": 0, "K1": 1.2, "B": 0.75}, undated),
            ("and of the window of two to either side", {"WINDOW_WEIGHT": 1, "K1": 1.2, "B": 0.75}, undated),
            ("windows count twice", {"K1": 1.2, "B": 0.75}, undated),
            ("K1 = 0.9, B = 0.4", {}, undated),
            ("the day is among the words", {}, chunks),
        ):
            shares = []
            for question in self._questions:
                if question.text not in self._vectors:
                    self._vectors[question.text] = (await self._embedder.embed([question.text]))[0]
                with changed(retrieve, **settings):
                    vector = self._vectors[question.text]
                    told = compared(with_, question.text)
                    scores = scores_of(with_, told, vector, words=bool(results)).scores
                names = names_of(self._passages[position] for position in best(scores, len(self._passages)))
                shares.append((self._share(question, names[:5]), self._share(question, names[:10])))
            results.append((name, shares))
        return results

    @staticmethod
    def _share(question: Question, names: Sequence[str]) -> float:
        return len(question.evidence.intersection(names)) / len(question.evidence)

    async def quotation(self, question: Question) -> tuple[int, float]:
        """Of 1,000 tokens those of what the service would quote, and the share of the evidence that is in it."""
        found = await self._recall(question, "ours")
        names = {self.names[id_] for turn in found for id_ in turn.message_ids}
        return sum(turn.tokens for turn in found), len(question.evidence & names) / len(question.evidence)

    async def seconds(self, question: Question, method: str) -> float:
        began = time.perf_counter()
        if method == "embedding":
            places = await self.ranked(question.text, method)
            assert places
        else:
            # What was just asked is remembered by the service; another blank makes it another question.
            await self._recall(msgspec.structs.replace(question, text=question.text + " "), method)
        return time.perf_counter() - began

    async def _recall(self, question: Question, method: str) -> Sequence[Any]:
        return await self._recalls[method].recall(
            self.branch.user_id,
            self.branch.conversation_id,
            self.branch.through,
            self.branch.through,
            question.text,
            lately="",
            budget_tokens=1000,
            model="none",
        )


async def long_one(
    store: Store, url: str, embedder: Remembering, talks: list[Talk], arguments: argparse.Namespace
) -> None:
    every = [turn for talk in talks for turn in talk.turns]
    turns = tuple((every * (arguments.turns // len(every) + 1))[: arguments.turns])
    talk = Talk(turns, tuple(question for talk in talks for question in talk.questions[:4]))
    asked = await Asked.of(store, url, embedder, talk)
    times = {method: [await asked.seconds(question, method) for question in talk.questions] for method in METHODS}
    line = ", ".join(
        f"{method} {median(seconds) * 1000:.1f} (least {min(seconds) * 1000:.1f})" for method, seconds in times.items()
    )
    say(f"\np50 in ms in one conversation of {len(turns)} turns: {line}", arguments.json)


def report(
    found: dict[str, list[tuple[float, float, float, float]]],
    times: dict[str, list[float]],
    quoted: list[float],
    *,
    as_json: bool,
) -> None:
    figures = {}
    for method in METHODS:
        shares = [round(100 * mean(column), 1) for column in zip(*found[method], strict=True)]
        figures[method] = dict(zip(("r5", "r10", "r1k", "r4k"), shares, strict=True)) | {
            "p50_ms": round(median(times[method]) * 1000, 1)
        }
    if as_json:
        print(json.dumps(figures))
        return
    print(f"\n{len(found['ours'])} questions\n\n| method | R@5 | R@10 | R in 1k | R in 4k | p50 ms | least ms |")
    print("|---|---|---|---|---|---|---|")
    least = {method: round(min(seconds) * 1000, 1) for method, seconds in times.items()}
    for method, row in figures.items():
        print(
            f"| {method} | {row['r5']} | {row['r10']} | {row['r1k']} | {row['r4k']} | {row['p50_ms']} |"
            f" {least[method]} |"
        )
    print(
        f"\nIn what the service quotes in 1,000 tokens, with dates and marks: {100 * mean(quoted):.1f} of {len(quoted)}"
    )


def report_choices(choices: dict[str, list[tuple[int, float, float]]]) -> None:
    if not choices:
        return
    print("\n| one choice after the other | R@5 | R@10 | R@5, even conversations | odd |\n|---|---|---|---|---|")
    for name, shares in choices.items():
        halves = [100 * mean([r5 for half, r5, _ in shares if half == which] or [0]) for which in (0, 1)]
        r5, r10 = (100 * mean(share[column] for share in shares) for column in (1, 2))
        print(f"| {name} | {r5:.1f} | {r10:.1f} | {halves[0]:.1f} | {halves[1]:.1f} |")


@contextmanager
def changed(module: Any, **settings: Any) -> Iterator[None]:
    """A module with other values for the length of a block."""
    before = {name: getattr(module, name) for name in settings}
    for name, value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def names_of(passages: Iterable[Turn]) -> list[str]:
    """The utterances that passages are of, each once."""
    return list(dict.fromkeys(passage.name for passage in passages))


def say(line: str, as_json: bool) -> None:
    print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


if __name__ == "__main__":
    main()
