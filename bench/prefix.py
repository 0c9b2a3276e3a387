"""How much of its prompts does a long conversation have computed anew, turn after turn?

    python bench/prefix.py [--window 8192 32768 131072] [--turns 300] [--json]

One conversation of 300 turns (150 tokens asked, 450 answered), through the service's own assembling and fold planning,
on the scripted engine's tokenizer and its model of a prefix cache, large enough to keep all. Beside ours, with the same
sizes:

    full        no summary and no recall: as many of the newest turns as fit, the oldest dropped one by one
    each_turn   as ours, with a new summary after every turn
    front       as ours, with the recalled turns in front of the history instead of behind it

A share is of all prompt tokens since the first fold was due, so that windows can be compared; computing the new prefix
after a fold counts. ``--json`` prints the shares of one window. ``formula`` is what ours comes to on paper:

    p = (2u + a + r) + g·(M + T - g)/F + B/2,   L = S + M + T + (F - g)/2 + r + u,   share = p/L

with question u, answer a, recalled r, turn g = u + a, summary M, system S, verbatim behind a fold T, fold F, block B.
A turn computes the last question and answer again, since what was recalled stood in front of the question, and its own;
every F/g turns the summary and the history behind it are computed, of which the last turn would have been anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from statistics import mean
from typing import Final

from prefix_talk import ANSWERED, ASKED, SYSTEM, Talk

from chatsvc.inference.scripted_cache import BLOCK_TOKENS

WINDOWS: Final = (8192, 32_768, 131_072)
POLICIES: Final = ("ours", "full", "each_turn", "front")


async def held(window: int, policy: str, turns: int) -> Talk:
    """The whole conversation."""
    talk = Talk(window, policy)
    for number in range(turns):
        await talk.turn(number)
    return talk


def on_paper(talk: Talk) -> float:
    """The share of ours by the formula of the module's docstring, in percent."""
    if not talk.folded or talk.view.summary is None:
        return float("nan")
    summary, recalled = talk.view.summary.tokens, talk.reminding.tokens
    folded, kept = mean(talk.folded), mean(talk.kept)
    turn = ASKED + ANSWERED
    computed = turn + ASKED + recalled + turn * (summary + kept - turn) / folded + BLOCK_TOKENS / 2
    return 100 * computed / (SYSTEM + summary + kept + (folded - turn) / 2 + recalled + ASKED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, nargs="+", default=WINDOWS, metavar="TOKENS")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.json:
        if len(arguments.window) != 1:
            parser.error("--json takes one --window")
        [window] = arguments.window
        shares = {policy: asyncio.run(held(window, policy, arguments.turns)).share for policy in POLICIES}
        print(json.dumps({policy: round(share, 2) for policy, share in shares.items()}))
        return
    print("| window | ours | formula | folds | full | each turn | in front |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for window in arguments.window:
        talks = {policy: asyncio.run(held(window, policy, arguments.turns)) for policy in POLICIES}
        ours = talks["ours"]
        rest = " | ".join(f"{talks[policy].share:.1f} %" for policy in POLICIES[1:])
        print(f"| {window:,} | {ours.share:.1f} % | {on_paper(ours):.1f} % | {len(ours.folded)} | {rest} |", flush=True)


if __name__ == "__main__":
    main()
