"""Going on with a reply that broke off: the kept text is there at once, the rest follows, the broken-off one stays."""

import asyncio
import contextlib
import uuid

import pytest
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
PAST_THE_LIMIT = "Continue past the length limit that was reached"


@pytest.fixture(scope="module")
def story_server(start_server):
    """A server that says in five seconds what ``server`` says at once. It can be stopped and started again."""
    return start_server("scripted:?tokens_per_s=20&tokens=100&slots=16", CHATSVC_SERVER_GRACE_S="1")


async def ask(tab, text, **options):
    """Have a message answered without the page. Returns the conversation's id."""
    conversation = (await tab.api("POST", "v1/conversations", {}))["id"]
    body = {"content": text, "client_msg_id": uuid.uuid4().hex, **options}
    await tab.api("POST", f"v1/conversations/{conversation}/messages", body)
    return conversation


async def another_reply(tab, before):
    """Wait until the last reply is not the one with the id ``before``. Returns its id."""
    await expect(tab.reply).not_to_have_attribute("data-message-id", before)
    return await tab.reply.get_attribute("data-message-id")


@contextlib.asynccontextmanager
async def wordless_streams(tab):
    """While the block runs, streams tell that their reply has begun and no more. Yields: the page has heard that."""
    heard = asyncio.Event()
    asked = 0

    async def begin(route):
        nonlocal asked
        asked += 1
        if asked > 1:
            heard.set()
        start = "retry: 100\n\nid: 1\nevent: start\ndata: {}\n\n"
        await route.fulfill(content_type="text/event-stream", body=start)

    await tab.page.route("**/stream?*", begin)
    yield heard
    await tab.page.unroute("**/stream?*")


async def test_a_stopped_reply_is_continued_to_the_whole_story_and_the_arrows_lead_back(visit, server, story_server):
    quick = await visit(base_url=server.base_url)
    await quick.send("A long story, please.")
    await quick.reply_is("complete")
    whole = (await quick.stored_reply())["content"]

    tab = await visit(base_url=story_server.base_url)
    await tab.send("A long story, please.")
    await tab.reply_shows_text(20)
    await tab.stop_the_reply()
    broken = await tab.stored_reply()
    drawn = await tab.shown_html()
    assert whole.startswith(broken["content"])

    async with wordless_streams(tab) as heard:
        await tab.button("Continue", tab.reply).click()
        await another_reply(tab, broken["id"])
        assert await tab.shown_html() == drawn
        await heard.wait()
        assert await tab.shown_html() == drawn
        # Also when the conversation is fetched anew: the store may have no text of the new reply yet, or more.
        async with tab.page.expect_response(f"**/v1/conversations/{tab.conversation_id}"):
            await tab.api("PATCH", f"v1/conversations/{tab.conversation_id}", {"title": "A story"})
            await tab.look_again()
        await expect(tab.page.get_by_role("heading", name="A story", level=1)).to_be_visible()
        assert (await tab.shown_text()).startswith("You said: A long")
    await tab.reply_is("complete")
    stored = await tab.stored_reply()
    assert await tab.copied_reply() == stored["content"] == whole
    assert stored["parent_id"] == broken["parent_id"]
    await expect(tab.button("Continue")).to_be_hidden()

    await expect(tab.reply.get_by_role("group", name="answer 2 of 2")).to_be_visible()
    await tab.button("Previous answer", tab.reply).click()
    await expect(tab.reply).to_have_attribute("data-message-id", broken["id"])
    assert await tab.shown_html() == drawn
    await expect(tab.button("Continue", tab.reply)).to_be_visible()


async def test_a_reply_that_nobody_read_says_that_and_not_that_somebody_stopped_it(visit, start_server):
    engine = "scripted:?tokens_per_s=20&tokens=600"
    server = start_server(engine, CHATSVC_TIERS_PRO_ABANDON_AFTER_S="2", CHATSVC_SERVER_GRACE_S="1")
    tab = await visit(base_url=server.base_url)
    conversation = await ask(tab, "A story for nobody.")
    async with asyncio.timeout(60):
        while (await tab.api("GET", f"v1/conversations/{conversation}"))["messages"][-1]["status"] != "stopped":
            await asyncio.sleep(0.1)  # who followed its stream instead would be reading it
    await tab.open(f"c/{conversation}")
    await expect(tab.reply).to_contain_text("Nobody was reading, so it was stopped.")
    await expect(tab.reply.get_by_text("Stopped", exact=True)).to_be_hidden()
    await expect(tab.button("Continue", tab.reply)).to_be_visible()


async def test_a_reply_that_reached_its_limit_says_so_and_is_continued_with_the_keyboard(visit):
    tab = await visit()
    await tab.open("c/" + await ask(tab, "Briefly.", max_tokens=5))
    await tab.reply_is("complete")
    short = await tab.stored_reply()
    assert short["finish_reason"] == "length"
    await expect(tab.reply).to_contain_text("The reply reached its length limit.")
    button = tab.button(PAST_THE_LIMIT, tab.reply)
    await expect(button).to_have_text("Continue")
    await tab.button("Copy this reply", tab.reply).focus()
    await tab.page.keyboard.press("Shift+Tab")
    await expect(button).to_be_focused()
    await tab.page.keyboard.press("Enter")
    await another_reply(tab, short["id"])
    await tab.reply_is("complete")
    stored = await tab.stored_reply()
    assert stored["finish_reason"] == "stop"
    assert stored["content"].startswith(short["content"])
    assert len(stored["content"]) > len(short["content"])
    assert await tab.copied_reply() == stored["content"]
    await expect(tab.button(PAST_THE_LIMIT)).to_be_hidden()


@pytest.mark.slow
async def test_a_reply_whose_server_went_away_can_be_tried_again_or_continued(visit, story_server):
    tab = await visit(base_url=story_server.base_url, **PHONE)
    await tab.field.fill("Die, please.")
    await tab.button("Send").tap()
    await tab.reply_shows_text(20)
    await asyncio.to_thread(story_server.stop)
    await asyncio.to_thread(story_server.start)
    await tab.reply_is("failed")
    broken = await tab.stored_reply()
    assert broken["content"] != ""
    trouble = tab.reply.get_by_role("alert")
    await expect(trouble).to_contain_text("The server was shut down before this reply was finished.")
    await expect(tab.button("Try again", trouble)).to_be_in_viewport(ratio=1)
    await expect(tab.button("Continue", trouble)).to_be_in_viewport(ratio=1)
    sideways = "() => { const view = document.querySelector('.viewport'); return view.scrollWidth - view.clientWidth; }"
    assert await tab.page.evaluate(sideways) == 0
    await tab.button("Continue", trouble).tap()
    continued = await another_reply(tab, broken["id"])
    await tab.reply_shows_text(len(broken["content"]) + 40)
    await tab.stop_the_reply()
    stored = await tab.stored_reply()
    assert (stored["id"], stored["parent_id"]) == (continued, broken["parent_id"])
    assert stored["content"].startswith(broken["content"])
    assert await tab.copied_reply() == stored["content"]
