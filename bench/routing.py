"""Do turns find the replica that has their conversation's prefix, evenly spread, and how fast?

    python bench/routing.py [--conversations 200] [--turns 10] [--pause 6] [--dispatches 1200] [--json]

Conversations whose readers pause, posted to whichever replica the balancer happens to choose: first to one, then
to three on one Postgres and one Valkey, each with a third of its cache and of its places (scripted engines with a model
of a prefix cache). Without conversations this part is left out.

Then single short turns, one at a time, posted to one replica and at home on another: from the moment their rows are
made until the home has claimed them, by Postgres' clock; the way through Redis is in it. And all that a reader sees of
it: from the POST until the first event of the reply, beside turns that were posted to their home.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
from measure import percentile
from storm import Replica
from stream_service import ready

from chatsvc.embedded import embedded_postgres, embedded_redis

REPLICAS = 3
CACHE_TOKENS = 131_072
SLOTS = 24
WORDS = 100
SETTLE_S = 3.0
USERS = 20
TALKERS = 50
"""Conversations whose turns are posted here and there: so many that none grows long."""
QUICK = "tokens_per_s=400&tokens=16"
USUAL = "tokens_per_s=100&tokens=64"
RUNS = """
    SELECT owner, prompt_tokens, cached_tokens, extract(epoch FROM started_at - created_at)::float8,
        extract(epoch FROM ended_at - started_at)::float8, id
    FROM runs WHERE status = 'complete' ORDER BY created_at
"""


def engine(share: int, replies: str) -> str:
    """A third of everything, or all of it."""
    cache, slots = CACHE_TOKENS * share, SLOTS * share
    return f"scripted:?{replies}&slots={slots}&cache_tokens={cache}&window=100000"


@contextlib.asynccontextmanager
async def deployment(count: int, replies: str = USUAL) -> AsyncIterator[tuple[list[str], str]]:
    """Where the replicas answer, and their database."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="routing-", dir="/tmp")))
        database = await stack.enter_async_context(embedded_postgres(directory / "pg", lambda _: None))
        valkey = await stack.enter_async_context(embedded_redis(directory / "vk", lambda _: None))
        urls = []
        for number in range(count):
            replica = Replica(
                f"replica-{number}",
                directory,
                database,
                valkey,
                CHATSVC_ENGINE=engine(REPLICAS // count, replies),
                CHATSVC_DEGRADATION_ENABLED="false",
                CHATSVC_TIERS_FREE_MAX_OPEN_REPLIES="1000",
                CHATSVC_TIERS_FREE_BUDGET="0",
            )
            stack.callback(replica.kill)
            async with httpx.AsyncClient(base_url=replica.url) as client:
                await ready(client)
            urls.append(replica.url)
        await asyncio.sleep(SETTLE_S)
        yield urls, database


class Reader:
    """One conversation: asks, reads the reply to its end, pauses."""

    def __init__(self, client: httpx.AsyncClient, urls: list[str], chance: random.Random) -> None:
        self._client = client
        self._urls = urls
        self._chance = chance
        self._headers = {"x-forwarded-user": f"user-{chance.randrange(USERS)}"}
        self._id = ""
        self.first_event_s: dict[str, float] = {}
        """By reply, from its POST."""

    async def turn(self, url: str) -> None:
        """One message and its whole reply."""
        if not self._id:
            made = await self._client.post(f"{url}/v1/conversations", json={}, headers=self._headers)
            self._id = made.raise_for_status().json()["id"]
        body = {
            "content": " ".join(f"word{self._chance.randrange(1000)}" for _ in range(WORDS)),
            "client_msg_id": uuid.uuid4().hex,
        }
        path = f"{url}/v1/conversations/{self._id}/messages"
        began = time.perf_counter()
        posted = (await self._client.post(path, json=body, headers=self._headers)).raise_for_status().json()
        async with self._client.stream("GET", url + posted["stream_url"], headers=self._headers) as stream:
            async for part in stream.aiter_raw():
                if b"event: start" in part:
                    self.first_event_s[posted["response_id"]] = time.perf_counter() - began

    async def talk(self, turns: int, pause_s: float) -> None:
        """A whole conversation."""
        await asyncio.sleep(self._chance.random() * pause_s)
        for _ in range(turns):
            await self.turn(self._chance.choice(self._urls))
            await asyncio.sleep(self._chance.expovariate(1 / pause_s))


async def conversations(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: all conversations on so many replicas."""
    async with (
        deployment(count) as (urls, database),
        httpx.AsyncClient(timeout=120, limits=httpx.Limits(keepalive_expiry=2)) as client,
    ):
        readers = [Reader(client, urls, random.Random(number)) for number in range(options.conversations)]
        await asyncio.gather(*(reader.talk(options.turns, options.pause) for reader in readers))
        rows = await _rows(database)
        came = [await _counters(client, url) for url in urls]
    turns, seconds = Counter(row[0] for row in rows), Counter[str]()
    for row in rows:
        seconds[row[0]] += row[4]
    return {
        "replicas": count,
        "turns": len(rows),
        "cached_share": sum(row[2] for row in rows) / sum(row[1] for row in rows),
        "turns_max_over_mean": max(turns.values()) * count / len(rows),
        "load_max_over_mean": max(seconds.values()) * count / sum(seconds.values()),
        "begun_p50_ms": 1000 * percentile([row[3] for row in rows], 0.5),
        "begun_p99_ms": 1000 * percentile([row[3] for row in rows], 0.99),
        **{name: sum(one[name] for one in came) for name in ("home", "stolen", "left")},
    }


async def dispatches(count: int) -> dict[str, Any]:
    """Turns posted to any replica, one at a time; those that another one served."""
    async with (
        deployment(REPLICAS, QUICK) as (urls, database),
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(keepalive_expiry=2)) as client,
    ):
        readers = [Reader(client, urls, random.Random(number)) for number in range(TALKERS)]
        for number, reader in enumerate(readers):
            await reader.turn(urls[number % REPLICAS])
        before = len(await _rows(database))
        for number in range(count):
            await readers[number % TALKERS].turn(urls[(number // TALKERS) % REPLICAS])
        rows = (await _rows(database))[before:]
    first_event_s = {name: seconds for reader in readers for name, seconds in reader.first_event_s.items()}
    # Born claimed are those that were posted to their home: nothing was sent for them.
    sent, kept = [row for row in rows if row[3] > 0], [row for row in rows if row[3] == 0]
    found: dict[str, Any] = {"sent": len(sent), "kept": len(kept)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found[f"{name}_ms"] = 1000 * percentile([row[3] for row in sent], share)
        found[f"first_event_{name}_ms"] = 1000 * percentile([first_event_s[row[5]] for row in sent], share)
        found[f"first_event_at_home_{name}_ms"] = 1000 * percentile([first_event_s[row[5]] for row in kept], share)
    return found


async def _rows(database: str) -> list[Any]:
    async with await psycopg.AsyncConnection.connect(database) as connection:
        return await (await connection.execute(RUNS)).fetchall()


async def _counters(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    found = dict.fromkeys(("home", "stolen", "left"), 0.0)
    for line in (await client.get(f"{url}/metrics")).text.splitlines():
        if line.startswith("chatsvc_runs_came_total{"):
            label, value = line.rsplit(" ", 1)
            found[label.split('"')[1]] = float(value)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--pause", type=float, default=6.0, help="mean seconds between a reply's end and the next turn")
    parser.add_argument("--dispatches", type=int, default=1200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [await conversations(count, options) for count in (1, REPLICAS)] if options.conversations else []
    hop = await dispatches(options.dispatches)
    if options.json:
        print(json.dumps({"runs": rows, "dispatch": hop}, indent=2))
        return
    if rows:
        _print_conversations(rows)
    print(
        f"Posted here, claimed there: {hop['sent']} turns, p50 {hop['p50_ms']:.1f} ms, p90 {hop['p90_ms']:.1f} ms,"
        f" p99 {hop['p99_ms']:.1f} ms."
    )
    for name, which in (("posted elsewhere", "first_event"), ("posted to its home", "first_event_at_home")):
        shown = ", ".join(f"{share} {hop[f'{which}_{share}_ms']:.1f} ms" for share in ("p50", "p90", "p99"))
        print(f"From the POST to the first event, {name}: {shown}.")


def _print_conversations(rows: list[dict[str, Any]]) -> None:
    print(
        "| replicas | turns | cached share of prompts | turns, max/mean | load, max/mean | begun within, p50 | p99 |",
        end="",
    )
    print(" at home | stolen |\n|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['replicas']} | {row['turns']} | {row['cached_share']:.3f} | {row['turns_max_over_mean']:.2f} |"
            f" {row['load_max_over_mean']:.2f} | {row['begun_p50_ms']:.1f} ms | {row['begun_p99_ms']:.1f} ms |"
            f" {row['home']:.0f} | {row['stolen']:.0f} |"
        )
    share = rows[1]["cached_share"] / rows[0]["cached_share"]
    print(f"\nCached share of three beside one: {share:.3f} (must be 0.9 at least).\n")


if __name__ == "__main__":
    asyncio.run(main())
