"""What recall quotes for messages that need nothing old, and for questions that do.

    python bench/recall_floor.py [--data FILE] [--conversations 3] [--embedder minilm]

The conversations of bench/recall.py, through the same code and Postgres, once with the embedder's floor (``unrelated``)
and once without. Of 1,000 tokens that may be quoted: how many are, for everyday messages, for questions about other
conversations, and for a conversation's own questions, with the share of their evidence that is in them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Final

import structlog
from recall import DATA, Asked, Question, Remembering, Talk, read

from chatsvc.embedded import embedded_postgres
from chatsvc.inference.embedder import create_embedder
from chatsvc.store import migrate, open_store

OWN: Final = 40
"""Questions of each conversation."""
OTHERS: Final = 4
"""Questions of each of the other ones."""
EVERYDAY: Final = (
    *("Thanks!", "What do you think?", "Can you make that shorter?", "Continue.", "ok great", "And now?", "Hello"),
    *("Write a haiku about rain.", "Explain how TCP congestion control works.", "Tell me a joke", "yes please"),
    *("Translate 'good morning' into French.", "Write a Python function that reverses a linked list."),
    *("What is the capital of Mongolia?", "Fix the bug in this regex: ^[a-z]+$", "Why is the sky blue?"),
    *("Please summarise this paragraph in one sentence.", "How do I center a div in CSS?"),
    "Could you explain the second point in more detail?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="file of LoCoMo's schema")
    parser.add_argument("--conversations", type=int, default=3, help="only so many of them")
    parser.add_argument("--embedder", default="minilm", help="as in [context] embedder")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        sys.exit(f"There is no {arguments.data}. Give a file of LoCoMo's schema with --data.")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(run(read(arguments.data), arguments))


async def run(talks: list[Talk], arguments: argparse.Namespace) -> None:
    made = create_embedder(arguments.embedder)
    if made is None:
        sys.exit("The comparison needs an embedder.")
    embedder = Remembering(made)
    floors = (None, made.unrelated)
    found: dict[tuple[str, float | None], list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="chatsvc-bench-", dir="/tmp") as directory:
        async with embedded_postgres(Path(directory), lambda _: None) as url:
            await migrate(url)
            async with open_store(url, pool_size=4, timeout_s=30) as store:
                for talk in talks[: arguments.conversations]:
                    asked = await Asked.of(store, url, embedder, talk)
                    for what, questions in sets(talk, talks).items():
                        for floor in floors:
                            embedder.unrelated = floor
                            # What was just asked is remembered; another blank makes it another question.
                            blank = " " * floors.index(floor)
                            found.setdefault((what, floor), []).extend(
                                [await asked.quotation(Question(q.text + blank, q.evidence)) for q in questions]
                            )
    await embedder.aclose()
    print("| asked | floor | tokens quoted of 1,000 | nothing quoted | evidence in it |\n|---|---|---|---|---|")
    for (what, floor), quotations in found.items():
        if not quotations:
            continue  # there was one conversation only
        tokens, shares = zip(*quotations, strict=True)
        nothing = 100 * mean(count == 0 for count in tokens)
        evidence = f"{100 * mean(shares):.1f} %" if what == "its own questions" else ""
        print(f"| {what} ({len(tokens)}) | {floor or 'none'} | {mean(tokens):.0f} | {nothing:.0f} % | {evidence} |")


def sets(talk: Talk, talks: list[Talk]) -> dict[str, list[Question]]:
    """What a conversation is asked."""
    others = [each for each in talks if each is not talk]
    return {
        "everyday messages": [Question(text, frozenset({"nothing"})) for text in EVERYDAY],
        "questions about other conversations": [q for each in others for q in spread(each, OTHERS)],
        "its own questions": spread(talk, OWN),
    }


def spread(talk: Talk, count: int) -> list[Question]:
    """So many questions of a conversation, from its beginning to its end."""
    return list(talk.questions[:: -(-len(talk.questions) // count)])


if __name__ == "__main__":
    main()
