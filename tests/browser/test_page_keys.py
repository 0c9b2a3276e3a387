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
    actions = tab.page.locator(":focus")
    await expect(actions).to_have_attribute("aria-haspopup", "menu")
    await expect(actions).to_have_attribute("aria-expanded", "false")
    await keyboard.press("Enter")
    assert await focused(tab) == "Pin"
    await expect(tab.page.locator(".menu-button[aria-expanded=true]")).to_have_count(1)
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


async def test_the_keyboard_stays_on_the_arrows_from_answer_to_answer(visit):
    tab = await visit()
    await tab.send("Three ways.")
    await tab.reply_is("complete")
    for count in (2, 3):
        await tab.reply.hover()
        await tab.button("Answer again", tab.reply).click()
        await expect(tab.reply.get_by_role("group", name=f"answer {count} of {count}")).to_be_visible()
        await tab.reply_is("complete")
    await tab.button("Previous answer").focus()
    for key, place, name in (
        ("Enter", 2, "Previous answer"),
        ("Enter", 1, "Next answer"),  # there is none before the first
        ("Space", 2, "Next answer"),
        ("Enter", 3, "Previous answer"),
    ):
        async with tab.page.expect_response(lambda answer: answer.request.method == "PATCH"):
            await tab.page.keyboard.press(key)
        await expect(tab.reply.get_by_role("group", name=f"answer {place} of 3")).to_be_visible()
        await expect(tab.button(name, tab.reply)).to_be_focused()


async def test_the_keyboard_comes_back_from_the_message_editor(visit):
    tab = await visit()
    await tab.send("As it is.")
    await tab.reply_is("complete")
    edit = tab.button("Edit this message")
    editor = tab.page.get_by_label("Edit your message")
    for way_out in ("Escape", "Cancel"):
        await edit.focus()
        await tab.page.keyboard.press("Enter")
        await expect(editor).to_be_focused()
        if way_out == "Cancel":
            await tab.button("Cancel").focus()
            await tab.page.keyboard.press("Enter")
        else:
            await tab.page.keyboard.press("Escape")
        await expect(edit).to_be_focused()
    await tab.page.keyboard.press("Enter")
    await editor.fill("As it should be.")
    await tab.page.keyboard.press("Enter")
    await expect(tab.question).to_contain_text("As it should be.")
    await expect(tab.field).to_be_focused()


@pytest.mark.parametrize(("key", "title"), [("Enter", "Other name"), ("Escape", "Older one.")])
async def test_the_keyboard_comes_back_from_renaming(visit, key, title):
    tab = await visit()
    await tab.send("Older one.")
    await tab.reply_is("complete")
    await tab.button("New chat").first.click()
    await tab.send("Newer one.")
    await tab.reply_is("complete")
    await tab.page.get_by_role("button", name="Actions for Older one.").first.focus()
    await tab.page.keyboard.press("Enter")
    await tab.page.keyboard.press("ArrowDown")
    await tab.page.keyboard.press("Enter")
    await expect(tab.page.get_by_label("New title")).to_be_focused()
    await tab.page.get_by_label("New title").fill("Other name")
    if key == "Enter":
        async with tab.page.expect_response(lambda answer: answer.request.method == "PATCH"):
            await tab.page.keyboard.press(key)
    else:
        await tab.page.keyboard.press(key)
    await expect(tab.page.get_by_role("button", name=f"Actions for {title}").first).to_be_focused()
    await tab.look_again()
    await expect(tab.page.get_by_role("button", name=f"Actions for {title}").first).to_be_focused()


async def test_the_keyboard_stays_on_a_conversation_that_is_pinned_and_so_moves_up(visit):
    tab = await visit()
    for number in (1, 2, 3):
        await tab.send(f"Pin me, {number}.")
        await tab.reply_is("complete")
        await tab.button("New chat").first.click()
    for number in (1, 2):
        actions = tab.page.get_by_role("button", name=f"Actions for Pin me, {number}.")
        await actions.focus()
        async with tab.page.expect_response(lambda answer: answer.request.method == "PATCH"):
            await tab.page.keyboard.press("Enter")
            await tab.page.keyboard.press("Enter")
        await expect(actions).to_be_focused()


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
