"""How long does it take to make the prompt of the next turn in a conversation of a thousand turns?

    python bench/assemble.py [--turns 1000] [--rounds 50] [--model DIRECTORY] [--json]

The conversation (150 tokens asked, 450 answered) lies in an embedded Postgres, folded as far as the service would have
folded it. ``read`` is the branch from there, ``prepare`` everything else: budget, cut, assembling, the chat template,
counting. Nothing is recalled here; ``bench/recall.py`` measures that. With ``--model``, a directory with a tokenizer
and a chat template that transformers can read, that one is used instead of the scripted one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
from measure import percentile
from prefix_talk import ANSWERED, ASKED, MODEL, words

from chatsvc.config import ContextConfig
from chatsvc.context.budget import split
from chatsvc.context.fold import Counted, plans, summary_cap
from chatsvc.conversation import Role
from chatsvc.embedded import embedded_postgres
from chatsvc.inference.chat_tokenizer import ChatTokenizer
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.prompt import ChatMessage, Prompt
from chatsvc.scheduler.prompts import Prompts
from chatsvc.scheduler.wanted import Wanted
from chatsvc.store import Store, migrate, open_store

WINDOWS: Final = (8192, 32_768, 131_072)
USER: Final = "ada"
BEGAN: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Tokenizing(ScriptedEngine):
    """The scripted engine with the tokenizer and chat template of a real model."""

    def __init__(self, window: int, tokenizer: Any) -> None:
        super().__init__(ScriptedOptions(window=window), model=MODEL)
        self.tokenizer = ChatTokenizer(tokenizer)

    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        """By the model's own template."""
        return await self.tokenizer.render(messages)

    async def encode(self, text: str) -> Sequence[int]:
        """By the model's own tokenizer."""
        return await self.tokenizer.encode(text)


async def fill(url: str, name: str, window: int, turns: int, engine: ScriptedEngine) -> None:
    """A conversation of so many turns, with the summaries that folding would have left."""
    config = ContextConfig()
    rows, open_turns, folds = [], [], []
    room = split(
        window=window,
        system_tokens=3,
        requested=None,
        recall_tokens=config.recall_tokens,
        step_tokens=config.fold_step_tokens,
    ).verbatim(summary=summary_cap(window, config.summary_tokens))
    for number in range(2 * turns):
        asked = number % 2 == 0
        text = words(f"{'q' if asked else 'a'}{number}", ASKED if asked else ANSWERED)
        tokens = len(await engine.encode(text))
        message_id = f"{name}_{number}"
        rows.append(
            (message_id, USER, name, f"{name}_{number - 1}" if number else None, "user" if asked else "assistant", text,
             "complete", tokens, BEGAN + timedelta(minutes=number))
        )  # fmt: skip
        open_turns.append(Counted(message_id, Role.USER if asked else Role.ASSISTANT, tokens))
        found = () if asked else plans(
            open_turns, window=window, room=room, fold_at=config.fold_at, step_tokens=config.fold_step_tokens
        )  # fmt: skip
        if found:
            fold = found[0]
            del open_turns[: fold.messages]
            previous, text = folds[-1][0] if folds else None, words("z", summary_cap(window, config.summary_tokens))
            folds.append((f"sum_{name}_{len(folds)}", USER, name, fold.through_message_id, 1, previous, text, 1))
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("INSERT INTO users (id, tier) VALUES (%s, 'pro') ON CONFLICT DO NOTHING", [USER])
        await connection.execute(
            "INSERT INTO conversations (id, user_id, system_prompt) VALUES (%s, %s, 'Be brief.')", [name, USER]
        )
        async with connection.cursor() as cursor:
            await cursor.executemany(
                "INSERT INTO messages (id, user_id, conversation_id, parent_id, role, content, status, tokens,"
                " created_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
                rows,
            )
            await cursor.executemany(
                "INSERT INTO summaries (id, user_id, conversation_id, through_message_id, version, previous_id, text,"
                " tokens) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
                folds,
            )
        await connection.execute("ANALYZE")


async def measured(store: Store, engine: ScriptedEngine, name: str, turns: int, rounds: int) -> dict[str, float]:
    """Milliseconds, and what the prompt was made of."""
    prompts = Prompts({MODEL: engine})
    leaf = f"{name}_{2 * turns - 1}"
    read_s, prepare_s, cpu_s = [], [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        conversation, view = await store.conversations.view(USER, name, leaf, leaf_may_be_folded=True)
        read, cpu = time.perf_counter(), time.process_time()
        prepared = await prompts.prepare(
            Wanted(
                model=MODEL,
                conversation=conversation,
                view=view,
                leaf_id=leaf,
                question=words(f"n{number}", ASKED),
            )
        )
        if number:  # the first one tokenizes
            read_s.append(read - began)
            prepare_s.append(time.perf_counter() - read)
            cpu_s.append(time.process_time() - cpu)
    return {
        "turns": turns,
        "verbatim": len(view.verbatim) // 2,
        "prompt_tokens": prepared.prompt.tokens,
        "left_out": prepared.report.left_out,
        "read_p50_ms": 1000 * percentile(read_s, 0.5),
        "prepare_p50_ms": 1000 * percentile(prepare_s, 0.5),
        "prepare_cpu_ms": 1000 * percentile(cpu_s, 0.5),
        "prepare_p95_ms": 1000 * percentile(prepare_s, 0.95),
    }


async def run(arguments: argparse.Namespace) -> None:
    """Fill, measure, print."""
    tokenizer = None
    if arguments.model:
        from transformers import AutoTokenizer  # only where it is asked for

        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="chatsvc-bench-", dir="/tmp") as directory:
        async with embedded_postgres(Path(directory), lambda _line: None) as url:
            await migrate(url)
            async with open_store(url, pool_size=2, timeout_s=30) as store:
                for window in arguments.window:
                    engine = (
                        ScriptedEngine(ScriptedOptions(window=window), model=MODEL)
                        if tokenizer is None
                        else Tokenizing(window, tokenizer)
                    )
                    name = f"conv_{window}"
                    await fill(url, name, window, arguments.turns, engine)
                    found[window] = await measured(store, engine, name, arguments.turns, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    print("| window | turns | verbatim | prompt tokens | read p50 | prepare p50 | p95 | of it CPU, p50 |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for window, row in found.items():
        print(
            f"| {window:,} | {row['turns']:,} | {row['verbatim']} | {row['prompt_tokens']:,} | {row['read_p50_ms']:.1f}"
            f" ms | {row['prepare_p50_ms']:.1f} ms | {row['prepare_p95_ms']:.1f} ms"
            f" | {row['prepare_cpu_ms']:.1f} ms |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, nargs="+", default=WINDOWS, metavar="TOKENS")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--model", help="directory of a tokenizer")
    parser.add_argument("--json", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
