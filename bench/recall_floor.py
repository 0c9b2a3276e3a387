"""What recall quotes for messages that need nothing old, and for questions that do.

    python bench/recall_floor.py [--data FILE] [--conversations 6-10] [--embedder minilm] [--room 1000]
        [--bars 0.5,0.55,0.6]

The conversations of bench/recall.py, through the same code and Postgres, folded as in a small window: the last 20 to 39
utterances stand verbatim in the prompt, what is older is recalled from. Three sets of messages:

    everyday messages   "Thanks!", "Write a haiku about rain.": when the conversation has ended
    its own next ones   up to 100 utterances of its last third, each where it was said, by whoever said it
    its own questions   those whose evidence is old, when the conversation has ended

Of the ``--room`` tokens that may be quoted, those that are: where as many are quoted as fit, and where they are quoted
only for messages that need something old (``context.need``), with an embedder and without; and the share of the
questions' evidence that is in what is quoted. ``--bars``: also with other values of what a message has to need.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import msgspec
import structlog
from prefix_talk import message
from recall import DATA, Asked, Remembering, Talk, changed, read

from chatsvc.clock import SystemClock
from chatsvc.config import ContextConfig
from chatsvc.context import need
from chatsvc.context.turns import turns
from chatsvc.conversation import Role
from chatsvc.embedded import embedded_postgres
from chatsvc.inference.embedder import Embedder, create_embedder
from chatsvc.scheduler import recall
from chatsvc.store import Store, migrate, open_store

STEP: Final = 20
"""Utterances that a fold takes, and that it leaves verbatim at least."""
NEXT: Final = 100
"""Utterances that are taken as a user's next message, of each conversation."""
NEVER: Final = -9.0
"""What every message needs."""
EVERYDAY: Final = (
    *("Thanks!", "What do you think?", "Can you make that shorter?", "Continue.", "ok great", "And now?", "Hello"),
    *("Write a haiku about rain.", "Explain how TCP congestion control works.", "Tell me a joke", "yes please"),
    *("Translate 'good morning' into French.", "Write a Python function that reverses a linked list."),
    *("What is the capital of Mongolia?", "Fix the bug in this regex: ^[a-z]+$", "Why is the sky blue?"),
    *("Please summarise this paragraph in one sentence.", "How do I center a div in CSS?"),
    "Could you explain the second point in more detail?",
)


class Message(msgspec.Struct, frozen=True):
    """What a user writes where so many utterances were said; the names of those that hold the answer."""

    text: str
    at: int
    evidence: frozenset[str] = frozenset()


class Way(msgspec.Struct, frozen=True):
    """How it is decided: the names of constants, and their values here."""

    name: str
    embedder: Embedder | None
    room: int
    """Tokens that may be quoted."""
    need: Mapping[str, float] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="file of LoCoMo's schema")
    parser.add_argument("--conversations", default="1-10", help="the first and the last of them")
    parser.add_argument("--embedder", default="minilm", help="as in [context] embedder")
    parser.add_argument("--room", type=int, default=need.ROOM, help="tokens that may be quoted")
    parser.add_argument("--bars", default="", help="other values of NEEDED, with commas")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        sys.exit(f"There is no {arguments.data}. Give a file of LoCoMo's schema with --data.")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    first, _, last = arguments.conversations.partition("-")
    asyncio.run(run(read(arguments.data)[int(first) - 1 : int(last or first)], arguments))


async def run(talks: Sequence[Talk], arguments: argparse.Namespace) -> None:
    made = create_embedder(arguments.embedder)
    if made is None:
        sys.exit("The comparison needs an embedder.")
    embedder = Remembering(made)
    always = {"NEEDED": NEVER, "NEEDED_BY_WORDS": NEVER, "ENOUGH": 0.0, "ENOUGH_BY_WORDS": 0.0}
    room = arguments.room
    ways = [
        Way("as many as fit", embedder, room, always),
        Way("where needed", embedder, room),
        Way("as many as fit, words alone", None, room, always),
        Way("where needed, words alone", None, room),
        *(Way(f"needed {bar}", embedder, room, {"NEEDED": float(bar)}) for bar in arguments.bars.split(",") if bar),
    ]
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="chatsvc-bench-", dir="/tmp") as directory:
        async with embedded_postgres(Path(directory), lambda _: None) as url:
            await migrate(url)
            async with open_store(url, pool_size=4, timeout_s=30) as store:
                for talk in talks:
                    folds = range(STEP - 1, len(talk.turns) - STEP, STEP)
                    asked = await Asked.of(store, url, embedder, talk, folds=folds)
                    embedder.remembers = True  # nothing is timed here
                    for what, messages in sets(talk).items():
                        for way in ways:
                            found.setdefault((what, way.name), []).extend(
                                await quotations(store, asked, talk, messages, way)
                            )
                    print(f"{len(talk.turns)} turns", file=sys.stderr)
    await embedder.aclose()
    print(f"| asked | quoted | tokens of {room:,}, mean | p50 | nothing quoted | evidence in it |")
    print("|---|---|---:|---:|---:|---:|")
    for (what, way_name), quoted in found.items():
        tokens, shares = zip(*quoted, strict=True)
        nothing = 100 * mean(count == 0 for count in tokens)
        evidence = f"{100 * mean(shares):.1f} %" if what == "its own questions" else ""
        print(
            f"| {what} ({len(tokens)}) | {way_name} | {mean(tokens):.0f} | {median(tokens):.0f} | {nothing:.0f} % |"
            f" {evidence} |"
        )


def sets(talk: Talk) -> dict[str, list[Message]]:
    """What a conversation is asked."""
    count = len(talk.turns)
    old = {turn.name for turn in talk.turns[: folded(count)]}
    later = range(2 * count // 3, count)
    return {
        "everyday messages": [Message(text, count) for text in EVERYDAY],
        "its own next ones": [
            Message(unnamed(talk.turns[number].text), number) for number in later[:: -(-len(later) // NEXT)]
        ],
        "its own questions": [
            Message(asked.text, count, asked.evidence & old) for asked in talk.questions if asked.evidence & old
        ],
    }


def unnamed(text: str) -> str:
    """As the user writes it, without who says it."""
    return text.partition(": ")[2]


def folded(at: int) -> int:
    """How many of so many utterances are folded."""
    return max(0, (at - STEP) // STEP * STEP)


async def quotations(
    store: Store, asked: Asked, talk: Talk, messages: Sequence[Message], way: Way
) -> list[tuple[int, float]]:
    """For each message the tokens that are quoted, and the share of its evidence in them."""
    with changed(need, **way.need):
        one = recall.Recall(
            index=store.recall,
            engines={},
            embedder=way.embedder,
            clock=SystemClock(),
            most=ContextConfig().recall_turns,
        )
        found = [await quotation(one, asked, talk, message, way.room) for message in messages]
        await one.aclose()
    return found


async def quotation(one: recall.Recall, asked: Asked, talk: Talk, wanted: Message, room: int) -> tuple[int, float]:
    start, ids = folded(wanted.at), list(asked.names)
    shown = [
        message(number, Role.ASSISTANT if (wanted.at - number) % 2 else Role.USER, talk.turns[number].text)
        for number in range(start, wanted.at)
    ]
    branch = asked.branch
    found: Any = await one.recall(
        branch.user_id,
        branch.conversation_id,
        ids[wanted.at - 1],
        ids[start - 1],
        wanted.text,
        lately=need.lately(reversed(list(turns(shown))), wanted.text),
        budget_tokens=room,
        model="none",
    )
    names = {asked.names[id_] for turn in found for id_ in turn.message_ids}
    evidence = wanted.evidence
    return sum(turn.tokens for turn in found), len(evidence & names) / len(evidence) if evidence else 0.0


if __name__ == "__main__":
    main()
