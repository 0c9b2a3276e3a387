"""One reply on the page: sent, streamed, refreshed, seen twice, cut, stopped. What is shown is what is stored (L3)."""

import pytest
from cutting_proxy import CuttingProxy
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def shows_what_is_stored(tab):
    """The copy button gives the stored text, and a fresh page draws the same nodes."""
    stored = await tab.stored_reply()
    assert await tab.copied_reply() == stored["content"]
    drawn = await tab.shown_html()
    await tab.page.reload()
    await tab.reply_is(stored["status"])
    assert await tab.shown_html() == drawn
    return stored


async def test_a_message_is_sent_and_its_reply_is_shown_as_it_is_stored(visit):
    tab = await visit()
    await tab.send("What is the capital of France?")
    assert "/c/conv_" in tab.page.url
    await expect(tab.question).to_contain_text("What is the capital of France?")
    await tab.reply_is("complete")
    assert (await shows_what_is_stored(tab))["status"] == "complete"
    await expect(tab.page).to_have_title("What is the capital of France?")


async def test_a_refresh_in_mid_reply_shows_the_beginning_and_then_the_rest(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    await tab.send("Tell me about refreshing.")
    await tab.reply_shows_text(100)
    before = await tab.shown_text()
    await tab.page.reload()
    await tab.reply_shows_text(len(before) + 40)
    assert (await tab.shown_text())[:60] == before[:60]
    await tab.stop_the_reply()
    await shows_what_is_stored(tab)


async def test_a_second_browser_shows_the_running_reply_live(visit, slow_server):
    first = await visit(base_url=slow_server.base_url)
    await first.send("Two screens, please.")
    await first.reply_shows_text(20)
    second = await visit(base_url=slow_server.base_url)
    await second.open(f"c/{first.conversation_id}")
    await second.reply_is("streaming")
    await second.reply_shows_text(len(await first.shown_text()) + 20)
    await second.stop_the_reply()
    await first.reply_is("stopped")
    assert await second.shown_html() == await first.shown_html()


async def test_an_idle_window_shows_a_reply_that_another_browser_starts(visit, slow_server):
    first = await visit(base_url=slow_server.base_url)
    conversation = await first.api("POST", "v1/conversations", {})
    await first.open(f"c/{conversation['id']}")
    second = await visit(base_url=slow_server.base_url)
    await second.page.clock.install()
    await second.open(f"c/{conversation['id']}")
    await first.send("Look here.")
    await second.page.clock.fast_forward(4_000)  # it asks every four seconds
    await expect(second.messages).to_have_count(2)
    await second.reply_is("streaming")
    await second.reply_shows_text()
    await second.stop_the_reply()
    await first.reply_is("stopped")
    assert await second.shown_html() == await first.shown_html()


async def test_a_connection_that_is_cut_again_and_again_loses_nothing(visit, slow_server):
    proxy = CuttingProxy(slow_server.port)
    proxy.cut_after = 700
    async with proxy.running():
        tab = await visit(base_url=f"http://127.0.0.1:{proxy.port}")
        await tab.send("Cut me off.")
        await proxy.have_cut(5)
        proxy.cut_after = None
        await tab.stop_the_reply()
        await shows_what_is_stored(tab)


async def test_a_server_that_was_away_for_a_while_is_come_back_to(visit, slow_server):
    async with CuttingProxy(slow_server.port).running() as proxy:
        tab = await visit(base_url=f"http://127.0.0.1:{proxy.port}")
        await tab.send("Go away for a while.")
        await tab.reply_shows_text(20)
        proxy.vanish()
        await expect(tab.reply).to_contain_text("The connection was lost")
        await tab.look_again()
        await expect(tab.page.get_by_text("The server cannot be reached")).to_be_visible()
        proxy.come_back()
        await tab.look_again()
        await expect(tab.page.get_by_text("The server cannot be reached")).to_be_hidden()
        await tab.reply_shows_text(len(await tab.shown_text()) + 40)
        await tab.stop_the_reply()
        await shows_what_is_stored(tab)


async def test_stop_stops_and_keeps_the_text(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    await tab.send("Never mind.")
    await tab.reply_shows_text(20)
    await tab.stop_the_reply()
    await expect(tab.reply).to_contain_text("Stopped")
    stored = await shows_what_is_stored(tab)
    assert stored["content"] != ""
    await expect(tab.button("Send")).to_be_visible()
