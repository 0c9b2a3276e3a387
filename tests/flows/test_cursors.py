"""Cursors of any content: an honest answer to each, and never silence or a hole (L3, L7)."""

import asyncio
import re
from urllib.parse import unquote_to_bytes

import pytest
from raw_reader import RawReader
from reader import read, read_to_the_end

PATIENCE_S = 30.0
FIXED = [
    *("", "0", "00", "1", "7", "007", "-1", "-0", "1.5", "1e3", "0x10", "1_000", "1%2C000", "NaN", "null", "undefined"),
    *("2147483648", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551616", "9" * 40, "9" * 41, "9" * 5000),
    *("%20", "%205", "5%20", "%0a5", "%205%20", "5%205", "+5", "%2B5", "1-5", "0-0", "(5", "%24", "*", "%3E"),
    *("%00", "5%00", "%005", "%0d%0aX-Evil:1", "%c2%a05", "%e2%80%a85"),
    *("%d9%a3", "%ef%bc%95", "%e0%a5%ab", "%c2%b2", "%e2%91%a4", "%f0%9d%9f%93"),  # digits, but not ASCII's
    *("%ff%fe", "%80", "%c3%28", "%ed%a0%80", "%", "%zz", "true", "latest", "%7B%7D", "%27%20OR%201=1--", "..%2F.."),
]


def drawn(random, highest):
    """A cursor that somebody may come up with, percent-encoded."""
    kind = random.randrange(4)
    if kind == 0:
        return str(random.randint(0, highest + 3))
    if kind == 1:
        return str(random.randint(0, 10 ** random.randint(1, 45)))
    signs = b"0123456789 \t-+.\x00e" if kind == 2 else bytes(range(256))
    return "".join(f"%{random.choice(signs):02x}" for _ in range(random.randint(1, 6)))


def meaning_of(cursor, place):
    """The number it stands for; None for no number at all. Queries are UTF-8 in form encoding, headers are Latin-1."""
    if place == "query":
        text = unquote_to_bytes(cursor.replace("+", " ")).decode("utf-8", "replace")
    else:
        text = unquote_to_bytes(cursor).decode("latin-1").strip(" \t")
    if not text:
        return 0
    return int(text) if re.fullmatch("[0-9]{1,40}", text) else None


async def asked(port, path, *headers, cursor):
    """The answer to one connection, read to its end: its status, and what somebody with that cursor saw."""
    reader = await RawReader.connect(port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await reader.ask(path, "Connection: close", *headers)
            await reader.to_the_end()
        return reader.status, await reader.rendered(cursor) if reader.status == 200 else None
    finally:
        reader.close()


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=50&tokens=100&slots=64")


@pytest.mark.parametrize("ended", [False, True], ids=["while it runs", "when it has ended"])
@pytest.mark.parametrize("place", ["query", "header"])
async def test_a_cursor_of_any_content_gets_an_honest_answer(server, client, api, seeded, place, ended):
    reply = await api.start()
    if ended:
        await read_to_the_end(client, api.stream_url(reply))
    else:
        await read(client, api.stream_url(reply), cut=lambda seen: seen.last_id >= 10)
    cursors = [*FIXED, *(drawn(seeded, 90) for _ in range(100))]
    if place == "header":
        # The bytes themselves; what no header can hold never gets as far as us.
        cursors = [
            cursor for cursor in cursors if not re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", unquote_to_bytes(cursor))
        ]

    meanings = [meaning_of(cursor, place) for cursor in cursors]

    async def ask(cursor, meaning):
        path = reply["stream_url"]
        if place == "query":
            return await asked(server.port, f"{path}&last_event_id={cursor}", cursor=meaning or 0)
        header = f"Last-Event-ID: {unquote_to_bytes(cursor).decode('latin-1')}"
        return await asked(server.port, path, header, cursor=meaning or 0)

    turns = asyncio.Semaphore(40)

    async def in_turn(cursor, meaning):
        async with turns:
            return await ask(cursor, meaning)

    answers = await asyncio.gather(*map(in_turn, cursors, meanings))
    whole = await read_to_the_end(client, api.stream_url(reply))
    stored = (await api.message_of(reply))["content"]
    assert whole.text == stored
    events = [event for event in whole.events if event.id is not None]
    for cursor, meaning, (status, rendered) in zip(cursors, meanings, answers, strict=True):
        if meaning is None:
            assert status == 400, (cursor, status)
        elif status == 204:
            assert meaning >= events[-1].id, cursor
        else:
            assert status == 200, (cursor, status)
            seen = [event for event in rendered.events if event.id is not None]
            assert seen, cursor
            if seen[0].name == "snapshot":
                assert meaning > 0, cursor
                assert rendered.text == stored, cursor
            else:
                assert seen == events[meaning:], cursor
            assert seen[-1].name == "done", cursor
