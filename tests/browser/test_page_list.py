"""The list of conversations: named, pinned, deleted; and ten thousand of them."""

import asyncio
import time

import pytest
from playwright.async_api import expect
from stand_ins import many_conversations

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def choose(tab, title, action):
    await tab.page.get_by_role("link", name=title, exact=True).hover()
    await tab.button(f"Actions for {title}").click()
    await tab.page.get_by_role("menuitem", name=action).click()


async def start(tab, text):
    await tab.send(text)
    await expect(tab.page.get_by_role("link", name=text, exact=True)).to_be_visible()


async def test_a_conversation_is_renamed_in_all_windows(visit):
    tab = await visit()
    await start(tab, "Rename me")
    other = await visit(beside=tab)
    await tab.page.bring_to_front()
    await choose(tab, "Rename me", "Rename")
    await tab.page.get_by_label("New title").fill("Renamed")
    await tab.page.get_by_label("New title").press("Enter")
    for one in (tab, other):
        await expect(one.page.get_by_role("link", name="Renamed", exact=True)).to_be_visible()
    await expect(tab.page.get_by_role("heading", name="Renamed", level=1)).to_be_visible()
    assert (await tab.stored())["title"] == "Renamed"


async def order(tab, *titles):
    """These conversations in the order in which they are listed; others may stand between them."""
    listed = await tab.page.locator(".chat-row a").all_inner_texts()
    return [title for title in listed if title in titles]


def pin_of(tab, title):
    """The mark of a pinned conversation."""
    return tab.page.get_by_role("link", name=title, exact=True).locator(".icon-pin")


async def test_a_pinned_conversation_stays_on_top(visit):
    tab = await visit()
    await start(tab, "Pin me")
    await choose(tab, "Pin me", "Pin")
    await expect(pin_of(tab, "Pin me")).to_be_visible()
    await expect(tab.page.get_by_role("heading", name="Pinned", exact=True)).to_be_visible()
    await tab.button("New chat").first.click()
    await start(tab, "Newer than the pinned one")
    await tab.page.reload()
    await expect(pin_of(tab, "Pin me")).to_be_visible()
    assert await order(tab, "Pin me", "Newer than the pinned one") == ["Pin me", "Newer than the pinned one"]
    await choose(tab, "Pin me", "Unpin")
    await expect(pin_of(tab, "Pin me")).to_have_count(0)
    assert await order(tab, "Pin me", "Newer than the pinned one") == ["Newer than the pinned one", "Pin me"]


async def test_a_list_that_was_under_way_brings_nothing_back(visit):
    tab = await visit()
    await start(tab, "Was here")
    await tab.reply_is("complete")
    link = tab.page.get_by_role("link", name="Was here", exact=True)
    caught, go_on = asyncio.Event(), asyncio.Event()

    async def hold(route):
        answer = await route.fetch()  # as things were before
        caught.set()
        await go_on.wait()
        await route.fulfill(response=answer)

    await tab.page.route("**/v1/conversations?*", hold, times=1)
    await tab.look_again()
    await caught.wait()
    await choose(tab, "Was here", "Delete")
    await tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(link).to_be_hidden()
    # The rows of this page from here on: what is drawn for a moment counts as well.
    await tab.page.evaluate(
        """() => {
          window.ghosts = 0;
          const look = () => {
            const links = [...document.querySelectorAll(".chat-row a")];
            if (links.some((link) => link.title === "Was here")) window.ghosts += 1;
          };
          new MutationObserver(look).observe(document.querySelector(".chats"), { childList: true, subtree: true });
        }"""
    )
    async with tab.page.expect_response("**/v1/conversations?*"):
        go_on.set()
    async with tab.page.expect_response("**/v1/conversations?*"):
        await tab.look_again()
    await expect(link).to_be_hidden()
    assert await tab.page.evaluate("() => window.ghosts") == 0


async def test_a_conversation_is_deleted_only_after_a_yes(visit):
    tab = await visit()
    await start(tab, "Delete me")
    link = tab.page.get_by_role("link", name="Delete me", exact=True)
    conversation = tab.conversation_id
    await choose(tab, "Delete me", "Delete")
    await tab.page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    await expect(link).to_be_visible()
    await choose(tab, "Delete me", "Delete")
    await tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(link).to_be_hidden()
    await expect(tab.page.get_by_text("What is on your mind?")).to_be_visible()
    assert await tab.api("GET", f"v1/conversations/{conversation}") == 404
    await tab.page.goto(f"{tab.base_url}/c/{conversation}")
    await expect(tab.page.get_by_text("does not exist, or is not yours")).to_be_visible()
    await expect(tab.page.get_by_role("heading", name="Not found")).to_be_visible()


async def test_a_conversation_deleted_elsewhere_while_its_reply_streams_leaves_the_screen(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    await tab.send("Delete me while I am read.")
    await tab.reply_shows_text(5)
    assert await tab.api("DELETE", f"v1/conversations/{tab.conversation_id}") == 204
    await tab.look_again()
    await expect(tab.page.get_by_role("heading", name="Not found")).to_be_visible()
    await expect(tab.page.get_by_text("was deleted")).to_be_visible()
    await expect(tab.page.get_by_text("Delete me while I am read.")).to_have_count(0)
    await expect(tab.page.get_by_text("The assistant is writing.")).to_have_count(0)


async def test_a_conversation_deleted_elsewhere_is_not_taken_for_a_lost_connection(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    await tab.send("Delete me while I am read, and say nothing wrong.")
    await tab.reply_shows_text(5)
    await tab.note_progress()
    assert await tab.api("DELETE", f"v1/conversations/{tab.conversation_id}") == 204
    await expect(tab.page.get_by_role("heading", name="Not found")).to_be_visible()
    assert set(await tab.noted_progress()) <= {"Reconnecting…"}


async def test_back_and_forward_move_between_conversations(visit):
    tab = await visit()
    await start(tab, "The first stop")
    await tab.button("New chat").first.click()
    await start(tab, "The second stop")
    await tab.page.go_back()
    await tab.page.go_back()
    await expect(tab.question).to_contain_text("The first stop")
    await tab.page.go_forward()
    await tab.page.go_forward()
    await expect(tab.question).to_contain_text("The second stop")


@pytest.mark.slow
async def test_ten_thousand_conversations_are_fetched_as_they_are_needed_and_few_are_drawn(visit):
    tab = await visit()
    fetched = await many_conversations(tab, 10_000)
    await tab.open()
    rows = tab.page.locator(".chat-row")
    await expect(rows.first).to_be_visible()
    assert len(fetched) <= 3
    drawn, state = 0, (0, "")
    deadline = time.monotonic() + 120
    while "Chat 9999" not in state[1] and time.monotonic() < deadline:
        state = await tab.page.evaluate(
            """async () => {
              const list = document.querySelector(".chats");
              list.scrollTop = list.scrollHeight;
              await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
              const last = [...document.querySelectorAll(".chat-row")].at(-1);
              return [document.querySelectorAll(".chat-row").length, last?.textContent ?? ""];
            }"""
        )
        drawn = max(drawn, state[0])
    assert "Chat 9999" in state[1]
    assert drawn < 120
