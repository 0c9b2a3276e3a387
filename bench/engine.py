"""Does the service slow the engine down? chatsvc with ``vllm:`` beside vLLM's own server, same model, same machine.

    python bench/engine.py [--streams 1,8,32] [--rounds 12] [--tokens 64] [--json]

Both are asked over HTTP, in turn, with the same prompts, greedy, the same number of tokens: vLLM by one streaming POST
of chat completions; chatsvc, embedded Postgres and Valkey included, by POST of the message and GET of its stream, each
stream another user's. The
time to the first token runs from the POST in both cases. Both servers run all the time; the one not asked is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

from engine_ask import Ask, Conversation, ask_chatsvc, ask_vllm, new_conversations
from measure import free_port

from chatsvc.inference.embedded_model import EMBEDDED_MODEL, unpack_embedded_model

START_TIMEOUT_S = 240.0
WAKING_TOKENS = 48
# What chatsvc asks of vLLM on a CPU by default, said in the words of vLLM's server.
SAME_ENGINE = (
    "--dtype bfloat16 --enforce-eager --block-size 32 --max-num-seqs 32 --max-num-batched-tokens 256 "
    f"--kv-cache-memory-bytes {1 << 30}"
)
TOPICS = ("a lighthouse", "two rivers", "a lost map", "the first snow", "an old clock", "a night train", "bees", "salt")


class Round(NamedTuple):
    """What one side did with one set of prompts."""

    tokens_per_s: float
    firsts_s: list[float]
    tokens: int


@contextlib.asynccontextmanager
async def process(*arguments: str, env: dict[str, str], ready: str, log: Path) -> AsyncIterator[None]:
    """A server in a process group of its own, until it is no longer needed. Returns once ``ready`` answers 200."""
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await asyncio.to_thread(answers, ready):
            if child.returncode is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(arguments[:2])} did not start:\n{end_of(log)}")
            await asyncio.sleep(0.5)
        yield
    except BaseException:
        print(f"{' '.join(arguments[:2])} said last:\n{end_of(log)}", file=sys.stderr)
        raise
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.wait(), 30)
            except TimeoutError:
                os.killpg(child.pid, signal.SIGKILL)


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def run_round(ask: Ask, port: int, prompts: list[str], tokens: int, conversations: list[Conversation]) -> Round:
    """All prompts at once; connections are made before the clock starts."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in prompts]
    began = time.perf_counter()
    replies = await asyncio.gather(
        *(ask(*each, tokens) for each in zip(connections, conversations, prompts, strict=True))
    )
    took = time.perf_counter() - began
    for _, writer in connections:
        writer.close()
    total = sum(reply.tokens for reply in replies)
    return Round(total / took, [reply.first_s for reply in replies], total)


async def compare(ports: dict[str, int], streams: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Rounds in turn, the first place changing hands; each side sees each prompt once."""
    results: dict[str, list[Round]] = {"vllm": [], "chatsvc": []}
    for number in range(rounds):
        prompts = [
            f"{uuid.uuid4().hex[:6]}. Tell me a very long and detailed story about {TOPICS[i % len(TOPICS)]}."
            for i in range(streams)
        ]
        conversations = await new_conversations(ports["chatsvc"], streams)
        for side in ("vllm", "chatsvc") if number % 2 else ("chatsvc", "vllm"):
            ask = ask_vllm if side == "vllm" else ask_chatsvc
            # Whoever comes first after a pause is slowed down by the machine, not by itself.
            waking = await new_conversations(ports["chatsvc"], 2)
            await run_round(ask, ports[side], ["Wake up.", "Say a few words."], WAKING_TOKENS, waking)
            results[side].append(await run_round(ask, ports[side], prompts, tokens, conversations))
    ratios = [
        ours.tokens_per_s / theirs.tokens_per_s
        for ours, theirs in zip(results["chatsvc"], results["vllm"], strict=True)
    ]
    firsts = {side: [first for done in of_side for first in done.firsts_s] for side, of_side in results.items()}
    # The rounds of a pair share their minute of the machine; a burst that the engine happens to take up in two
    # steps instead of one moves a round by half a second, for either side.
    later = [
        1000 * (statistics.median(ours.firsts_s) - statistics.median(theirs.firsts_s))
        for ours, theirs in zip(results["chatsvc"], results["vllm"], strict=True)
    ]
    return {
        "streams": streams,
        "vllm_tokens_per_s": statistics.median(done.tokens_per_s for done in results["vllm"]),
        "chatsvc_tokens_per_s": statistics.median(done.tokens_per_s for done in results["chatsvc"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "vllm_first_p50_ms": statistics.median(firsts["vllm"]) * 1000,
        "chatsvc_first_p50_ms": statistics.median(firsts["chatsvc"]) * 1000,
        "later_ms": statistics.median(later),
        "later_pooled_ms": 1000 * (statistics.median(firsts["chatsvc"]) - statistics.median(firsts["vllm"])),
        "later_ms_by_round": sorted(later),
        "tokens": {side: sum(done.tokens for done in of_side) for side, of_side in results.items()},
    }


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        data_dir = Path(directory) / "data"
        model = await unpack_embedded_model(data_dir, lambda line: print(line, file=sys.stderr))
        ports = {"vllm": free_port(), "chatsvc": free_port()}
        quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        ours = {
            "CHATSVC_ENGINE": "vllm:",
            "CHATSVC_DATA_DIR": str(data_dir),
            "CHATSVC_PORT": str(ports["chatsvc"]),
            "CHATSVC_LOG_LEVEL": "warning",
            "CHATSVC_AUTH": "proxy",
        }
        theirs = (
            f"--model {model} --served-model-name m --host 127.0.0.1 --port {ports['vllm']} --uvicorn-log-level warning"
        )
        async with (
            process(
                *("-m", "vllm.entrypoints.openai.api_server", *theirs.split(), *SAME_ENGINE.split()),
                env=quiet,
                ready=f"http://127.0.0.1:{ports['vllm']}/health",
                log=Path(directory) / "vllm.log",
            ),
            process(
                *("-m", "chatsvc"),
                env={**quiet, **ours},
                ready=f"http://127.0.0.1:{ports['chatsvc']}/readyz",
                log=Path(directory) / "chatsvc.log",
            ),
        ):
            print("both servers are up, warming up", file=sys.stderr)
            await compare(ports, streams=4, rounds=2, tokens=16)
            return [await compare(ports, streams, arguments.rounds, arguments.tokens) for streams in arguments.streams]


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| streams | tokens/s: vLLM's server | chatsvc | ratio (range) "
            "| first token, p50: vLLM's | chatsvc | later, by rounds: p50 (quartiles) |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['streams']} | {row['vllm_tokens_per_s']:.1f} | {row['chatsvc_tokens_per_s']:.1f}"
        f" | {row['ratio']:.3f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        f" | {row['vllm_first_p50_ms']:.0f} ms | {row['chatsvc_first_p50_ms']:.0f} ms"
        f" | {row['later_ms']:+.0f} ms ({quartiles(row['later_ms_by_round'])}) |"
        for row in results
    ]
    return "\n".join(lines)


def quartiles(values: list[float]) -> str:
    first, _, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{first:+.0f} to {third:+.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=12, help="even, so that each side comes first as often")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{EMBEDDED_MODEL}, bfloat16, {arguments.tokens} tokens a reply, {arguments.rounds} rounds each, in turn;")
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}. Tokens said: "
        + ", ".join(f"{row['streams']} streams {row['tokens']}" for row in results)
    )
    print()
    print(table(results))


if __name__ == "__main__":
    main()
