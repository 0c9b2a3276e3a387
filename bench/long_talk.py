"""How long does the first token take in the 300th turn, beside the 10th?

    python bench/long_talk.py [--data FILE] [--turns 300] [--places 5] [--around 10] [--tokens 40] [--window 4096]
        [--json]

Through the whole service, with vLLM on this machine and the default settings: one conversation in which a person says
what somebody says in a conversation of LoCoMo's schema (see recall.py), one utterance a turn, and the model answers
with its own words. The next message is sent when nothing runs any more, as after a reader's pause: folds and what else
happens off the request path are done by then. Timed from sending the message to the first text at the client. A long
conversation is as quick or slow as its last fold is near or far, so ``--places`` places are looked at, the last one at
its end, the others ``STRIDE`` turns apart before it. Compared are the medians over ``--around`` turns up to each and

    around the 10th    of the same conversation: what is said there need not be as long
    the same           messages, said around the 10th turn of another conversation, one for each place

Then questions about what was said long ago.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import msgspec
from engine import process
from engine_ask import Conversation, ask_chatsvc, new_conversations
from measure import free_port
from recall import DATA, Talk, read
from recall_floor import unnamed

from chatsvc.inference.embedded_model import unpack_embedded_model

TENTH: Final = 10
STRIDE: Final = 50
ASKED: Final = 20
"""Questions at the end."""
IDLE_LOOKS: Final = 3
LOOK_S: Final = 0.15
IDLE_TIMEOUT_S: Final = 120.0
BUSY: Final = re.compile(r"^chatsvc_(?:runs_active|runs_waiting|engine_running|engine_waiting)\S* (\S+)$", re.MULTILINE)

FOLDS: Final = re.compile(r'^chatsvc_folds_ended_total\{.*status="(\w+)".*\} (\d+)', re.MULTILINE)


class Row(msgspec.Struct, frozen=True):
    """A turn: seconds to the first token, and what its prompt was made of."""

    number: int
    first_s: float
    prompt_tokens: int
    cached_tokens: int
    recalled_tokens: int
    folded: bool


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="file of LoCoMo's schema")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--places", type=int, default=5, help="so many stretches of the conversation are compared")
    parser.add_argument("--around", type=int, default=10, help="so many turns are taken together")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of a reply")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        sys.exit(f"There is no {arguments.data}. Give a file of LoCoMo's schema with --data.")
    if arguments.turns < (arguments.places - 1) * STRIDE + TENTH + arguments.around:
        sys.exit(f"{arguments.turns} turns are too few for {arguments.places} places, {STRIDE} turns apart.")
    talk = next((one for one in read(arguments.data) if len(one.turns) >= arguments.turns), None)
    if talk is None:
        sys.exit(f"No conversation in {arguments.data} has {arguments.turns} turns.")
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        report(await held(talk, Path(directory), arguments), arguments)


class Held(msgspec.Struct, frozen=True):
    """The turns of the conversation, and of those in which its places are said anew; questions; and how folds ended."""

    long: list[Row]
    late: list[list[Row]]
    """By place, the last one first."""
    young: list[list[Row]]
    """The same messages."""
    questions: list[Row]
    folds: dict[str, int]


async def held(talk: Talk, directory: Path, arguments: argparse.Namespace) -> Held:
    """Hold the conversation, ask about it, and say its places anew, each in a conversation of its own."""
    data_dir = directory / "data"
    await unpack_embedded_model(data_dir, lambda line: print(line, file=sys.stderr))
    port = free_port()
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "CHATSVC_ENGINE": f"vllm:?max_model_len={arguments.window}",
        "CHATSVC_DATA_DIR": str(data_dir),
        "CHATSVC_PORT": str(port),
        "CHATSVC_LOG_LEVEL": "warning",
    }
    base = f"http://127.0.0.1:{port}"
    async with process("-m", "chatsvc", env=env, ready=f"{base}/readyz", log=directory / "chatsvc.log"):
        long, *others = await new_conversations(port, 1 + arguments.places)
        said = [unnamed(turn.text) for turn in talk.turns[: arguments.turns]]
        known = {turn.name for turn in talk.turns[: arguments.turns // 2]}
        old = [question.text for question in talk.questions if question.evidence <= known]
        some = old[:: max(1, len(old) // ASKED)][:ASKED]
        rows = []
        for number, text in enumerate((*said, *some), start=1):
            rows.append(await turn(long, base, number, text, arguments.tokens))
            if number % 25 == 0 and not arguments.json:
                print(f"turn {number}: {1000 * rows[-1].first_s:.0f} ms", file=sys.stderr)
        half = arguments.around // 2
        late, young = [], []
        for number, other in enumerate(others):
            end = len(said) - number * STRIDE
            again = said[end - TENTH - half : end]
            made = [await turn(other, base, place, text, arguments.tokens) for place, text in enumerate(again, start=1)]
            late.append(rows[end - 2 * half - 1 : end])
            young.append(made[TENTH - half - 1 :])
        metrics = await asyncio.to_thread(fetched, f"{base}/metrics")
        return Held(
            long=rows[: len(said)],
            late=late,
            young=young,
            questions=rows[len(said) :],
            folds={how: int(count) for how, count in FOLDS.findall(metrics)},
        )


async def turn(conversation: Conversation, base: str, number: int, text: str, tokens: int) -> Row:
    """One message and its reply, when nothing else runs."""
    await idle(base)
    connection = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
    reply = await ask_chatsvc(connection, conversation, text, tokens)
    connection[1].close()
    made = json.loads(await asyncio.to_thread(fetched, f"{base}/v1/responses/{reply.response_id}/context"))
    return Row(
        number=number,
        first_s=reply.first_s,
        prompt_tokens=made["prompt_tokens"],
        cached_tokens=made["cached_tokens"] or 0,
        recalled_tokens=made["parts"]["recalled"],
        folded=bool(made["condensed"] or made["left_out"]),
    )


async def idle(base: str) -> None:
    """Until no run waits or is under way, several looks long."""
    looks = 0
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while looks < IDLE_LOOKS:
        busy = [float(count) for count in BUSY.findall(await asyncio.to_thread(fetched, f"{base}/metrics"))]
        looks = looks + 1 if not any(busy) else 0
        if time.monotonic() > deadline:
            sys.exit(f"The service does not come to rest: {busy}")
        await asyncio.sleep(LOOK_S)


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as found:
        return str(found.read().decode())


def summed(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "turns": f"{rows[0].number}-{rows[-1].number}",
        "first_p50_ms": round(1000 * median(row.first_s for row in rows)),
        "first_max_ms": round(1000 * max(row.first_s for row in rows)),
        "computed": round(mean(row.prompt_tokens - row.cached_tokens for row in rows)),
        "prompt": round(mean(row.prompt_tokens for row in rows)),
        "recalled": round(mean(row.recalled_tokens for row in rows)),
        "nothing_recalled": round(mean(row.recalled_tokens == 0 for row in rows), 2),
    }


def report(held: Held, arguments: argparse.Namespace) -> None:
    half = arguments.around // 2
    rows = held.long
    early = summed(rows[TENTH - 1 - half : TENTH + half])
    late, same = [[summed(some) for some in each] for each in (held.late, held.young)]
    all_late, all_same = [[row for some in each for row in some] for each in (held.late, held.young)]
    plain = [pair for pair in zip(all_late, all_same, strict=True) if not pair[0].recalled_tokens]
    found = {
        "early": early,
        "late": late,
        "same": same,
        "all_late": summed(sorted(all_late, key=lambda row: row.number)),
        "all_same": summed(all_same),
        "folded": summed([row for row in rows if row.folded] or rows[-1:]),
        "questions": summed(held.questions) if held.questions else None,
        "folds": held.folds,
        "ratio": ratio(all_late, all_same),
        "ratio_last": ratio(held.late[0], held.young[0]),
        "ratio_early": round(late[0]["first_p50_ms"] / early["first_p50_ms"], 2),
        "ratio_plain": round(median(each.first_s / other.first_s for each, other in plain), 2) if plain else None,
    }
    if arguments.json:
        print(json.dumps(found))
        return
    print("| turns | first token, p50 ms | longest | prompt tokens | of them computed | recalled | turns with none |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    lines = [(early, "")]
    for number, (each, other) in enumerate(zip(late, same, strict=True)):
        lines += [(each, ""), (other, f", the same messages in conversation {number + 2}")]
    lines += [
        (found["all_late"], ", all places together"),
        (found["all_same"], ", all conversations that say the same together"),
        (found["folded"], ", all behind a fold or a cut"),
    ]
    if held.questions:  # else none has all its evidence in the first half
        lines.append((found["questions"], ", questions about old turns"))
    for row, name in lines:
        print(
            f"| {row['turns']}{name} | {row['first_p50_ms']} | {row['first_max_ms']} | {row['prompt']} "
            f"| {row['computed']} | {row['recalled']} | {row['nothing_recalled']:.0%} |"
        )
    print(
        f"\nThe late turns beside the same messages around the 10th turn of another conversation:"
        f" {found['ratio_last']} x at the end (1.5 at most is wanted), {found['ratio']} x over all places; message by"
        f" message where nothing was recalled {found['ratio_plain']} x. The end beside the 10th turn of its own"
        f" conversation: {found['ratio_early']} x. Folds: {held.folds}."
    )


def ratio(late: Sequence[Row], same: Sequence[Row]) -> float:
    """Of the medians."""
    return round(median(row.first_s for row in late) / median(row.first_s for row in same), 2)


if __name__ == "__main__":
    asyncio.run(main())
