"""What does a token cost on this engine?

    python bench/calibrate.py [--engine vllm:] [--sequences 1,4,8,16] [--tokens 64,1024] [--reply 256] [--repeats 3]
                              [--json]

Measures how long steps take, through the same contract as the service uses, and fits

    seconds of a step = a + b x prompt tokens read + c x sequences + d x KV tokens read

without negative parts, by least squares of relative errors. From these follow the weights of ``[service]``: a token of
a prompt costs its reading (b), and is read again with each token of the reply (d); an output token costs its share of
the step (a, divided by the sequences of a usual batch), its sampling (c), and the reply's own part of the KV cache (d).
What a step costs while a long prompt is read in several of them counts with b. Run it on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from chatsvc.conversation import Role
from chatsvc.inference.base import Engine
from chatsvc.inference.factory import create_engine, default_model_name
from chatsvc.limits import ServiceCost
from chatsvc.prompt import ChatMessage, Prompt, Sampling

DECODED: Final = 24
"""Tokens of each reply while steps are timed. The first few are left out: prompts of others are still being read."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """So many steps together, what they did, and how long they took."""

    steps: float
    prompt_tokens: float
    sequences: float
    kv_tokens: float
    seconds: float

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """What a, b, c and d are multiplied by."""
        return self.steps, self.prompt_tokens, self.sequences, self.kv_tokens


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    a: float
    b: float
    c: float
    d: float
    error: float
    """Mean relative error over the samples."""

    def cost(self, *, batch: int, reply_tokens: int, cached_s: float) -> ServiceCost:
        """Weights for a batch of so many sequences with replies of so many tokens.

        ``cached_s``: seconds that a cached token of a prompt takes until the first token of the reply.
        """
        held = self.d * reply_tokens
        prompt = self.b + held
        output = self.a / batch + self.c + self.d * reply_tokens / 2
        return ServiceCost(
            prompt=1.0,
            cached=round(min(1.0, (cached_s + held) / prompt), 3),
            output=round(output / prompt, 2),
        )


def fit(samples: Sequence[Sample]) -> Fit:
    """Least squares of relative errors; a part that would be negative is left out, and the others fitted again."""
    parts = list(range(4))
    found = [0.0] * 4
    while parts:
        solved = _solve([[sample.terms[part] / sample.seconds for part in parts] for sample in samples])
        worst = min(range(len(parts)), key=lambda index: solved[index])
        if solved[worst] >= 0:
            found = [0.0] * 4
            for part, value in zip(parts, solved, strict=True):
                found[part] = value
            break
        del parts[worst]
    errors = [
        abs(sum(value * term for value, term in zip(found, sample.terms, strict=True)) / sample.seconds - 1)
        for sample in samples
    ]
    a, b, c, d = found
    return Fit(a=a, b=b, c=c, d=d, error=sum(errors) / len(errors))


def _solve(rows: list[list[float]]) -> list[float]:
    """The x for which every row times x is nearest to 1. A column that says nothing gets 0."""
    size = len(rows[0])
    scale = [max((abs(row[column]) for row in rows), default=0.0) or 1.0 for column in range(size)]
    scaled = [[value / scale[column] for column, value in enumerate(row)] for row in rows]
    matrix = [
        [*(sum(row[i] * row[j] for row in scaled) for j in range(size)), sum(row[i] for row in scaled)]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(matrix[index][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        if abs(matrix[column][column]) < 1e-12:
            matrix[column][column] = 1.0
            matrix[column][size] = 0.0
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [one - factor * other for one, other in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[index][size] / matrix[index][index] / scale[index] for index in range(size)]


async def prompt_of(engine: Engine, tokens: int, mark: str) -> Prompt:
    """A prompt of about so many tokens that no other begins like. ``mark`` again: the same prompt again."""
    words = random.Random(mark)
    text = f"{mark} "
    count = max(1, tokens - 40)
    text += " ".join(words.choice(("river", "lamp", "stone", "cloud", "green", "seven", "paper")) for _ in range(count))
    return await engine.render([ChatMessage(role=Role.USER, content=text)])


async def reply(engine: Engine, prompt: Prompt, tokens: int, begun: Callable[[], None] | None = None) -> list[float]:
    """The moment of every token of a reply; of several in one chunk, the chunk's."""
    moments: list[float] = []
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    async with contextlib.aclosing(engine.generate(prompt, sampling, uuid.uuid4().hex)) as chunks:
        async for chunk in chunks:
            if not moments and begun is not None:
                begun()
            moments += [time.perf_counter()] * chunk.output_tokens
    return moments


async def time_reading(engine: Engine, tokens: int, repeats: int) -> tuple[list[Sample], float, int]:
    """Prompts alone, read anew and then from the cache; also seconds of the latter, and tokens that it served."""
    samples, cached_s, length = [], [], 0
    for _ in range(repeats):
        prompt = await prompt_of(engine, tokens, uuid.uuid4().hex)
        length = prompt.tokens
        for again in (False, True):
            began = time.perf_counter()
            [moment, *_] = await reply(engine, prompt, 1)
            if again:
                cached_s.append(moment - began)
            else:
                one = Sample(steps=1, prompt_tokens=length, sequences=1, kv_tokens=length, seconds=moment - began)
                samples.append(one)
    samples.sort(key=lambda sample: sample.seconds)
    return [samples[len(samples) // 2]], statistics.median(cached_s), length


async def time_writing(engine: Engine, sequences: int, tokens: int, repeats: int) -> list[Sample]:
    """Steps of a batch in which all prompts are read."""
    seconds, length = [], 0
    for _ in range(repeats):
        prompts = [await prompt_of(engine, tokens, uuid.uuid4().hex) for _ in range(sequences)]
        length = prompts[0].tokens
        replies = await asyncio.gather(*(reply(engine, prompt, DECODED + sequences) for prompt in prompts))
        # From when the last began until the first ended, all of them are under way.
        begin, end = max(moments[0] for moments in replies), min(moments[-1] for moments in replies)
        steps = sum(begin < moment <= end for moment in max(replies, key=lambda moments: moments[0]))
        if steps > 2:
            seconds.append((end - begin) / steps)
    if not seconds:
        return []
    kv = sequences * (length + DECODED / 2)
    middle = statistics.median(seconds)
    return [Sample(steps=1, prompt_tokens=0, sequences=sequences, kv_tokens=kv, seconds=middle)]


async def measure(arguments: argparse.Namespace, data_dir: Path) -> tuple[list[Sample], float, int]:
    """All samples; seconds that a cached token takes; sequences that the engine runs at once."""
    engine = create_engine(arguments.engine, name=default_model_name(arguments.engine), data_dir=data_dir)
    await engine.start(lambda line: print(line, file=sys.stderr))
    try:
        limits = engine.limits
        most = limits.kv_tokens or limits.window * limits.slots
        samples: list[Sample] = []
        cached: list[tuple[float, int]] = []
        lengths = [tokens for tokens in arguments.tokens if tokens + DECODED + limits.slots < limits.window]
        for tokens in lengths:
            read, cached_s, length = await time_reading(engine, tokens, arguments.repeats)
            samples += read
            cached.append((cached_s, length))
            for sequences in arguments.sequences:
                if sequences <= limits.slots and sequences * (tokens + DECODED + sequences) < most:
                    print(f"{sequences} sequences of {tokens} tokens", file=sys.stderr)
                    samples += await time_writing(engine, sequences, tokens, arguments.repeats)
        (short_s, short), (long_s, long) = cached[0], cached[-1]
        per_token = max(0.0, (long_s - short_s) / (long - short)) if long > short else 0.0
        return samples, per_token, limits.slots
    finally:
        await engine.aclose()


def main() -> None:
    numbers = lambda text: sorted({int(part) for part in text.split(",")})  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm:", help="an engine URL, as in the configuration")
    parser.add_argument(
        "--data-dir", type=Path, help="where the embedded model is unpacked; not given: a temporary one"
    )
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=numbers, default=[64, 256, 1024])
    parser.add_argument("--batch", type=int, help="sequences of a usual batch; not given: half of the engine's places")
    parser.add_argument("--reply", type=int, default=256, help="tokens of a usual reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        samples, cached_s, slots = asyncio.run(measure(arguments, arguments.data_dir or Path(directory)))
    found = fit(samples)
    batch = arguments.batch or max(1, slots // 2)
    cost = found.cost(batch=batch, reply_tokens=arguments.reply, cached_s=cached_s)
    if arguments.json:
        values = {name: getattr(found, name) for name in ("a", "b", "c", "d", "error")}
        print(json.dumps({**values, "cached_s": cached_s, "batch": batch, **msgspec.structs.asdict(cost)}))
        return
    print(f"{arguments.engine}, {platform.processor() or platform.machine()}, Python {platform.python_version()}\n")
    print(f"{'sequences':>10}{'prompt read':>13}{'KV read':>9}{'ms':>9}")
    for sample in samples:
        read, kv = sample.prompt_tokens, sample.kv_tokens
        print(f"{sample.sequences:>10.0f}{read:>13.0f}{kv:>9.0f}{sample.seconds * 1000:>9.1f}")
    print(
        f"\na step: {found.a * 1e3:.2f} ms + {found.b * 1e6:.1f} us a prompt token + {found.c * 1e6:.1f} us a sequence"
    )
    print(f"        + {found.d * 1e9:.1f} ns a KV token read; mean error {found.error:.0%}")
    print(f"a cached prompt token: {cached_s * 1e6:.1f} us until the first token")
    print(f"\nwith {batch} sequences and replies of {arguments.reply} tokens:\n")
    print(f"[service]\nprompt = {cost.prompt:g}\ncached = {cost.cached:g}\noutput = {cost.output:g}")


if __name__ == "__main__":
    main()
