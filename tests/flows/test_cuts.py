"""Clients that are cut again and again still show the stored text, byte for byte (L3)."""

import asyncio

import pytest
from api_client import Api
from reader import Rendered, read

CUTS = 5


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("scripted:?tokens_per_s=120&tokens=800&slots=256")


async def follow_with_cuts(api, reply, random):
    """Read, cut at a random event, come back after a random pause: at least ``CUTS`` times, then to the end."""
    rendered = Rendered()
    cuts = 0
    while rendered.end is None:
        at = len(rendered.events) + random.randint(1, 2)
        # The last cuts fall where they may, also before the first id; after enough of them read on to the end.
        await read(
            api.client,
            api.stream_url(reply),
            rendered,
            cut=(lambda seen, at=at: len(seen.events) >= at) if cuts < CUTS else None,
        )
        cuts += rendered.end is None
        await asyncio.sleep(random.uniform(0, 0.1))
    return rendered, cuts


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
async def test_replies_cut_at_random_points_are_shown_as_they_are_stored(server, client, seeded, count):
    async def one(api, number):
        cuts = 0
        while cuts < CUTS:  # where a machine stands still, all tokens may come as a few events
            reply = await api.start(f"Story {number}, please.", max_tokens=200)
            rendered, cuts = await follow_with_cuts(api, reply, seeded)
            stored = await api.message_of(reply)
            assert stored["status"] == "complete"
            assert rendered.text == stored["content"]
            assert rendered.snapshots == 0

    numbers = iter(range(count))

    async def user():
        api = Api(client, server.base_url)
        for number in numbers:
            await one(api, number)

    await asyncio.gather(*(user() for _ in range(25)))


async def test_20_cuts_within_one_reply_lose_and_repeat_nothing(api):
    # Where a machine stands still, many tokens come as one event.
    reply = await api.start("A long one.", max_tokens=800)
    rendered = Rendered()
    for _ in range(20):
        last = len(rendered.events)
        await read(api.client, api.stream_url(reply), rendered, cut=lambda seen, last=last: len(seen.events) > last)
        assert rendered.end is None, "the reply was over before it was cut 20 times"
    await read(api.client, api.stream_url(reply), rendered)
    assert rendered.text == (await api.message_of(reply))["content"]


async def test_connections_that_end_before_the_first_id_lose_nothing(api):
    reply = await api.start("Quick.", max_tokens=200)
    for _ in range(2):
        async with api.client.stream("GET", api.stream_url(reply)) as answer:
            await anext(answer.aiter_raw())
    rendered = await read(api.client, api.stream_url(reply))
    assert rendered.text == (await api.message_of(reply))["content"]


async def test_two_resumes_from_one_cursor_both_see_the_rest_once(api):
    reply = await api.start("Twice.", max_tokens=200)
    begun = await read(api.client, api.stream_url(reply), cut=lambda seen: len(seen.events) >= 5)
    rest = await asyncio.gather(
        *(read(api.client, api.stream_url(reply), Rendered(text=begun.text, last_id=begun.last_id)) for _ in range(2))
    )
    stored = await api.message_of(reply)
    assert [one.text for one in rest] == [stored["content"]] * 2
