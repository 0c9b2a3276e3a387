"""Two replicas behind one address, one of which dies while a reply is read in the page."""

import asyncio

import pytest
import pytest_asyncio
from cutting_proxy import CuttingProxy
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

ENGINE = "scripted:?tokens_per_s=20&tokens=120&slots=16"


@pytest.fixture(scope="module")
def writer(start_server):
    """The replica that writes all replies; it serves pages as well."""
    return start_server(ENGINE)


@pytest.fixture(scope="module")
def reader(start_server, writer):
    """The replica that only serves."""
    return start_server(ENGINE, beside=writer, CHATSVC_ROLES="api")


@pytest_asyncio.fixture(loop_scope="session")
async def door(reader, writer):
    """One address for both; it leads to the reader."""
    for server in (reader, writer):
        if server.exit_status is not None:
            await asyncio.to_thread(server.start)
    async with CuttingProxy(reader.port).running() as proxy:
        yield proxy


async def ask(visit, door):
    tab = await visit(base_url=f"http://127.0.0.1:{door.port}")
    await tab.send("Which of you is it?")
    await tab.reply_shows_text(60)
    return tab


async def test_a_reply_goes_on_when_the_replica_that_serves_it_is_killed(visit, door, reader, writer):
    tab = await ask(visit, door)
    reader.kill()
    door.lead_to(writer.port)
    await tab.reply_is("complete")
    stored = await tab.stored_reply()
    assert stored["status"] == "complete"
    assert await tab.copied_reply() == stored["content"]


async def test_a_reply_whose_replica_is_killed_keeps_its_text_and_can_be_continued(visit, door, writer):
    tab = await ask(visit, door)
    seen = await tab.shown_text()
    writer.kill()
    await expect(tab.reply.get_by_text("Waiting for the server…")).to_be_visible()
    await tab.reply_is("failed")
    assert "The server working on this reply went away." in await tab.reply.inner_text()
    kept = (await tab.stored_reply())["content"]
    assert await tab.copied_reply() == kept
    assert (await tab.shown_text()).startswith(seen[:40])
    await asyncio.to_thread(writer.start)
    await tab.button("Continue", tab.reply).click()
    await tab.reply_is("complete")
    stored = await tab.stored_reply()
    assert stored["content"].startswith(kept)
    assert await tab.copied_reply() == stored["content"]
