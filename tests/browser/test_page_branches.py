"""Wordings and answers beside one another: nothing is overwritten, and the chosen branch is remembered."""

import pytest
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def press(tab, message, name):
    """A button under a message, as with a mouse: it appears when the pointer is there."""
    await message.hover()
    await tab.button(name, message).click()


async def test_answering_again_makes_a_sibling_and_the_arrows_remember_the_choice(visit):
    tab = await visit()
    await tab.send("Say it twice.")
    await tab.reply_is("complete")
    first = await tab.reply.get_attribute("data-message-id")
    await press(tab, tab.reply, "Answer again")
    await expect(tab.reply).not_to_have_attribute("data-message-id", first)
    await tab.reply_is("complete")
    second = await tab.reply.get_attribute("data-message-id")
    await expect(tab.reply.get_by_role("group", name="answer 2 of 2")).to_be_visible()
    assert (await tab.stored())["head_message_id"] == second

    async with tab.page.expect_response(lambda answer: answer.request.method == "PATCH"):
        await press(tab, tab.reply, "Previous answer")
    await expect(tab.reply).to_have_attribute("data-message-id", first)
    await expect(tab.messages).to_have_count(2)
    await tab.page.reload()
    await expect(tab.reply).to_have_attribute("data-message-id", first)


async def test_an_edit_of_the_first_message_begins_a_new_root(visit):
    tab = await visit()
    await tab.send("Frist.")
    await tab.reply_is("complete")
    await press(tab, tab.question, "Edit this message")
    editor = tab.page.get_by_label("Edit your message")
    await expect(editor).to_have_value("Frist.")
    await editor.fill("First.")
    await editor.press("Enter")
    await expect(tab.question).to_contain_text("First.")
    await expect(tab.question.get_by_role("group", name="wording 2 of 2")).to_be_visible()
    await tab.reply_is("complete")
    roots = [message for message in (await tab.stored())["messages"] if message["parent_id"] is None]
    assert [root["content"] for root in roots] == ["Frist.", "First."]

    await press(tab, tab.question, "Previous wording")
    await expect(tab.question).to_contain_text("Frist.")
    await press(tab, tab.question, "Next wording")
    await expect(tab.question).to_contain_text("First.")


async def test_the_arrows_of_a_question_stand_under_its_end(visit):
    """The buttons beside them show under the mouse only, and would leave a gap."""
    tab = await visit()
    await tab.send("First wording.")
    await tab.reply_is("complete")
    await press(tab, tab.question, "Edit this message")
    await tab.page.get_by_label("Edit your message").fill("Second wording.")
    await tab.button("Send", tab.page.locator(".editor")).click()
    await expect(tab.question.locator(".count")).to_have_text("2/2")
    bubble = await tab.question.locator(".question").bounding_box()
    arrows = await tab.question.locator(".arrows").bounding_box()
    assert abs(bubble["x"] + bubble["width"] - arrows["x"] - arrows["width"]) < 1


async def test_an_edit_in_the_middle_keeps_the_old_branch_whole(visit):
    tab = await visit()
    for text in ("One.", "Two."):
        await tab.send(text)
        await tab.reply_is("complete")
    question = tab.page.locator("article.is-user").nth(1)
    await press(tab, question, "Edit this message")
    await tab.page.get_by_label("Edit your message").fill("Zwei.")
    await tab.button("Send", question).click()
    await expect(question).to_contain_text("Zwei.")
    await expect(question.get_by_role("group", name="wording 2 of 2")).to_be_visible()
    await tab.reply_is("complete")
    await expect(tab.messages).to_have_count(4)
    await press(tab, question, "Previous wording")
    await expect(question).to_contain_text("Two.")
    await expect(tab.messages).to_have_count(4)
    assert len((await tab.stored())["messages"]) == 6


async def test_an_edit_that_is_given_up_changes_nothing(visit):
    tab = await visit()
    await tab.send("As it is.")
    await tab.reply_is("complete")
    await press(tab, tab.question, "Edit this message")
    await tab.page.get_by_label("Edit your message").fill("Otherwise.")
    await tab.page.keyboard.press("Escape")
    await expect(tab.question).to_contain_text("As it is.")
    assert len((await tab.stored())["messages"]) == 2


async def test_a_failed_reply_says_so_and_can_be_tried_again_or_continued(visit, start_server):
    failing = start_server("scripted:?tokens_per_s=100&tokens=40&fault=error@8")
    tab = await visit(base_url=failing.base_url)
    await tab.send("Fail, please.")
    await tab.reply_is("failed")
    await expect(tab.reply.get_by_role("alert")).to_be_visible()
    first = await tab.reply.get_attribute("data-message-id")
    shown = await tab.shown_text()
    assert shown != ""
    await tab.page.reload()
    await tab.reply_is("failed")
    assert await tab.shown_text() == shown
    await tab.button("Try again").click()
    await expect(tab.reply).not_to_have_attribute("data-message-id", first)
    await tab.reply_is("failed")
    second = await tab.stored_reply()
    await tab.button("Continue", tab.reply).click()
    await expect(tab.reply).not_to_have_attribute("data-message-id", second["id"])
    await tab.reply_is("failed")
    third = await tab.stored_reply()
    assert third["content"].startswith(second["content"])
    assert len(third["content"]) > len(second["content"])
