"""The page without a mouse: shortcuts, focus, input methods, drafts."""

import pytest
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def focused(tab):
    """What has the focus: its label, else its text."""
    return await tab.page.evaluate(
        "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"
    )


async def test_everything_can_be_done_with_the_keyboard_alone(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    keyboard = tab.page.keyboard
    await tab.page.get_by_role("link", name="Skip to the message field").focus()
    await keyboard.press("Enter")
    assert await focused(tab) == "Message"
    await keyboard.type("No mouse here.")
    await keyboard.press("Shift+Enter")
    await keyboard.type("Second line.")
    await keyboard.press("Enter")
    await expect(tab.question.locator(".question")).to_have_text("No mouse here.\nSecond line.")
    await tab.reply_shows_text(20)
    await keyboard.press("Escape")
    await tab.reply_is("stopped")

    await keyboard.press("Control+Shift+O")
    await expect(tab.page.get_by_text("What is on your mind?")).to_be_visible()
    assert await focused(tab) == "Message"
    link = tab.page.get_by_role("link", name="No mouse here.")
    await link.focus()
    await keyboard.press("Tab")
    assert (await focused(tab)).startswith("Actions for No mouse here.")
    await keyboard.press("Enter")
    assert await focused(tab) == "Pin"
    await keyboard.press("ArrowUp")
    assert await focused(tab) == "Delete"
    await keyboard.press("Escape")
    await expect(tab.page.get_by_role("menuitem", name="Delete")).to_be_hidden()
    await keyboard.press("Enter")
    await keyboard.press("End")
    await keyboard.press("Enter")
    assert await focused(tab) == "Cancel"
    await keyboard.press("Tab")
    await keyboard.press("Enter")
    await expect(link).to_be_hidden()


@pytest.mark.parametrize("keys", ["/", "Control+k", "Meta+k"])
async def test_a_key_leads_to_the_message_field(visit, keys):
    tab = await visit()
    await tab.page.evaluate("() => document.activeElement.blur()")
    await tab.page.keyboard.press(keys)
    assert await focused(tab) == "Message"
    await expect(tab.field).to_have_value("")


async def test_the_focus_can_be_seen(visit):
    tab = await visit()
    await tab.page.keyboard.press("Shift+Tab")
    outline = await tab.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


async def test_every_button_has_a_name_and_every_field_a_label(visit):
    tab = await visit()
    await tab.send("Names.")
    await tab.reply_is("complete")
    nameless = await tab.page.evaluate(
        """() => [...document.querySelectorAll("button, a, input, textarea")]
             .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim()))
             .map((node) => node.outerHTML)"""
    )
    assert nameless == []


async def test_enter_that_ends_a_word_of_an_input_method_does_not_send(visit):
    tab = await visit()
    await tab.field.focus()
    session = await tab.page.context.new_cdp_session(tab.page)
    await session.send("Input.imeSetComposition", {"text": "にほん", "selectionStart": 3, "selectionEnd": 3})
    await expect(tab.field).to_have_value("にほん")
    assert await composing_enter(tab, session) == [True]
    await session.send("Input.insertText", {"text": "日本"})
    await expect(tab.field).to_have_value("日本")
    await expect(tab.page.locator("article")).to_have_count(0)
    await tab.field.press("Enter")
    await expect(tab.question.locator(".question")).to_have_text("日本")


async def composing_enter(tab, session):
    """Press Enter as a keyboard does while an input method is at work; returns what the page was told."""
    await tab.page.evaluate(
        """() => {
          window.composing = [];
          addEventListener("keydown", (event) => window.composing.push(event.isComposing), true);
        }"""
    )
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
    await session.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", **key})
    await session.send("Input.dispatchKeyEvent", {"type": "keyUp", **key})
    return await tab.page.evaluate("() => window.composing")


async def test_drafts_are_kept_apart_and_outlive_a_reload(visit):
    tab = await visit()
    await tab.send("A conversation with a draft.")
    await tab.reply_is("complete")
    await tab.field.fill("half a thought")
    await tab.button("New chat").first.click()
    await expect(tab.field).to_have_value("")
    await tab.field.fill("another thought")
    await tab.page.go_back()
    await expect(tab.field).to_have_value("half a thought")
    await tab.page.reload()
    await expect(tab.field).to_have_value("half a thought")
    await tab.button("New chat").first.click()
    await expect(tab.field).to_have_value("another thought")


async def test_a_suggestion_never_replaces_what_is_written(visit):
    tab = await visit()
    suggestion = tab.page.get_by_role("button", name="Explain how tides work")
    await expect(suggestion).to_be_visible()
    await tab.field.fill("My own question")
    await expect(suggestion).to_be_hidden()
    await tab.page.evaluate("() => document.querySelector('.empty button').click()")
    await expect(tab.field).to_have_value("My own question")
    await tab.field.fill("")
    await suggestion.click()
    await expect(tab.field).to_have_value("Explain how tides work, in three sentences.")
    assert await focused(tab) == "Message"


async def test_the_reply_is_read_out_as_it_comes(visit):
    tab = await visit()
    spoken = tab.page.locator("[aria-live=polite]")
    await tab.send("Read it to me.")
    await tab.reply_is("complete")
    await expect(spoken).to_have_text("Reply finished.")
    await expect(spoken).to_have_role("status")
