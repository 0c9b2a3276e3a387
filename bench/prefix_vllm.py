"""A long conversation on a real engine: does its prefix cache serve what the model of one says, and how soon?

    python bench/prefix_vllm.py [--turns 40] [--asked 60] [--answered 40] [--engine URL] [--data-dir DIRECTORY]

The conversation of bench/prefix.py with shorter turns, held with a real model: its own tokenizer, template and replies.
``model`` is what a prefix cache with the engine's blocks would serve, ``engine`` what it says that it did. The reply's
own tokens are not known here, only its text, so the two may differ by the blocks that a reply fills. The last line has
the first tokens of turns around the 10th and of the last ones; a wait of the machine's is not told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import msgspec
from measure import percentile
from prefix_talk import MODEL, Talk, message, words

from chatsvc.conversation import Role
from chatsvc.inference.base import Engine
from chatsvc.inference.factory import create_engine
from chatsvc.inference.scripted_cache import PrefixCache
from chatsvc.prompt import Prompt, Sampling

BLOCK_TOKENS = 32
"""Of the engine on a CPU; 16 on a GPU."""


class RealTalk(Talk):
    """A talk whose prompts are answered."""

    def __init__(self, engine: Engine, block_tokens: int, asked: int, answered: int) -> None:
        super().__init__(engine.limits.most, "ours", engine=engine, system_tokens=60)
        self.cache = PrefixCache(10_000_000, block_tokens)
        self.rows: list[tuple[int, int, int, int, float]] = []
        self.sizes = asked, answered
        self.asked = 0

    async def turn(self, number: int) -> None:
        """One question and the model's own answer; then the fold that is due, warmed on the engine too."""
        asked = words(f"q{number}", self.sizes[0])
        prompt = await self._prompt(asked)
        predicted = self.cache.served(prompt.token_ids)
        text, cached, first_s = await self.generated(prompt, self.sizes[1])
        answer = await self.engine.encode(text)
        self.cache.store((*prompt.token_ids, *answer))
        self.rows.append((number, prompt.tokens, predicted, cached, first_s))
        question = await self.engine.encode(asked)
        turn = (
            msgspec.structs.replace(message(2 * number, Role.USER, asked), tokens=len(question)),
            msgspec.structs.replace(message(2 * number + 1, Role.ASSISTANT, text), tokens=len(answer)),
        )
        self.view = msgspec.structs.replace(self.view, verbatim=(*self.view.verbatim, *turn))
        await self._fold()

    async def _warmed(self, prompt: Prompt) -> None:
        await self.generated(prompt, 1)
        self.cache.store(prompt.token_ids)

    async def generated(self, prompt: Prompt, max_tokens: int) -> tuple[str, int, float]:
        """The text, the tokens that came from the cache, and the seconds to the first one."""
        self.asked += 1
        began, first_s, cached, text = time.perf_counter(), 0.0, 0, ""
        sampling = Sampling(max_tokens=max_tokens, temperature=0)
        async with aclosing(self.engine.generate(prompt, sampling, f"talk-{self.asked}")) as chunks:
            async for chunk in chunks:
                first_s = first_s or time.perf_counter() - began
                cached = chunk.cached_tokens or 0
                text += chunk.text
        return text, cached, first_s


async def run(arguments: argparse.Namespace) -> None:
    """Start, talk, print."""
    engine = create_engine(arguments.engine, name=MODEL, data_dir=arguments.data_dir)
    await engine.start(print)
    try:
        talk = RealTalk(engine, arguments.block, arguments.asked, arguments.answered)
        print("| turn | prompt tokens | model | engine | first token |\n|---:|---:|---:|---:|---:|")
        for number in range(arguments.turns):
            await talk.turn(number)
            _, tokens, predicted, cached, first_s = talk.rows[-1]
            print(f"| {number} | {tokens} | {predicted} | {cached} | {1000 * first_s:.0f} ms |", flush=True)
    finally:
        await engine.aclose()
    apart = [abs(cached - predicted) // arguments.block for _, _, predicted, cached, _ in talk.rows]
    share = sum(row[3] for row in talk.rows) / sum(row[1] for row in talk.rows)
    early, late = ([row[4] for row in rows] for rows in (talk.rows[6:15], talk.rows[-9:]))
    print(
        f"\n{len(talk.folded)} folds; cached {100 * share:.1f} % of the prompts; blocks apart at most {max(apart)}, on"
        f" average {sum(apart) / len(apart):.2f}; first token p50 {1000 * percentile(early, 0.5):.0f} ms around turn"
        f" 10, {1000 * percentile(late, 0.5):.0f} ms around turn {arguments.turns}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm:?max_model_len=4096&max_num_seqs=4&hang_s=600&busy_s=600")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--asked", type=int, default=60, help="tokens of a question")
    parser.add_argument("--answered", type=int, default=40, help="most tokens of an answer")
    parser.add_argument("--block", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--data-dir", type=Path, default=Path("bench-data"), help="where the model is unpacked")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
