"""Scarce service, told honestly: budgets, waiting, what was given up, which model; and what is known about the user."""

import json
import re

import pytest
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


async def test_a_model_is_chosen_for_a_conversation_when_there_is_a_choice(visit):
    tab = await visit()
    picker = tab.page.get_by_label("Model for this conversation")
    await expect(picker).to_have_count(0)
    model = {"object": "model", "owned_by": "chatsvc", "ready": True, "window": 4096}
    models = [{"id": "scripted", "default": True, **model}, {"id": "small", "default": False, **model}]
    await tab.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": models}))
    await tab.page.reload()
    await expect(picker).to_have_value("scripted")
    await tab.send("Which one?")
    await tab.reply_is("complete")
    stored = await tab.stored() | {"model": "small"}
    await tab.page.route("**/v1/conversations/*", lambda route: route.fulfill(json=stored))
    async with tab.page.expect_request(lambda request: request.method == "PATCH") as change:
        await picker.select_option("small")
    assert json.loads((await change.value).post_data) == {"model": "small"}
    await expect(picker).to_have_value("small")


async def test_what_could_not_be_asked_when_the_page_was_opened_is_there_later(visit):
    tab = await visit()
    model = {"object": "model", "owned_by": "chatsvc", "default": False, "ready": True, "window": 4096}
    models = [model | {"id": "scripted", "default": True}, model | {"id": "small", "ready": False}]
    away = True

    async def answer(route):
        if away:
            await route.abort()
        elif route.request.url.endswith("/models"):
            await route.fulfill(json={"object": "list", "data": models})
        else:
            await route.continue_()

    await tab.page.route(re.compile("/v1/(me|models)$"), answer)
    await tab.page.reload()
    memory, picker = tab.button("Memory: what is known about you"), tab.page.locator(".model-picker")
    await expect(tab.page.locator(".notice")).to_contain_text("The server cannot be reached.")
    await expect(memory.or_(picker)).to_have_count(0)
    away = False
    await expect(picker).to_contain_text("small (not ready)", timeout=20_000)
    await expect(memory).to_be_visible()
    models[1]["ready"] = True
    await expect(picker).not_to_contain_text("not ready", timeout=20_000)


async def test_a_budget_is_mentioned_when_little_of_it_is_left(visit):
    tab = await visit(**PHONE)
    quota = {"budget": {"limit": 1000, "used": 910, "left": 90}, "refills_at": "2099-01-01T12:00:00Z"}
    body = {"user": {"id": "ada"}, "tier": "free", "quota": quota}
    await tab.page.route("**/v1/me", lambda route: route.fulfill(json=body))
    await tab.page.reload()
    await expect(tab.page.get_by_text("9 % of your budget is left. More from")).to_be_visible()
    quota["budget"]["left"] = 900
    await tab.field.fill("This costs nothing.")
    await tab.button("Send").tap()
    await tab.reply_is("complete")
    await expect(tab.page.get_by_text("of your budget is left")).to_be_hidden()


async def test_replies_for_which_something_was_given_up_say_so_and_still_do_after_a_reload(visit):
    tab = await visit()
    given_up = [["model", "max_tokens"], ["history"]]
    said = [
        "The service is busy: this reply comes from a smaller model (scripted) and is kept short.",
        "The service is busy: this reply was given less of the conversation.",
    ]
    taken = 0

    async def degrade(route):
        nonlocal taken
        answer = await route.fetch()
        await route.fulfill(response=answer, json=await answer.json() | {"degraded": given_up[taken]})
        taken += 1

    async def degraded(route):
        answer = await route.fetch()
        tree = await answer.json()
        replies = [each for each in tree.get("messages", ()) if each["role"] == "assistant"]
        for message, what in zip(replies, given_up, strict=False):
            message["degraded"] = what
        await route.fulfill(response=answer, json=tree)

    await tab.page.route("**/v1/conversations/*/messages", degrade)
    await tab.page.route(re.compile("/v1/conversations/conv_[^/]*$"), degraded)
    for question, what in zip(("In a hurry?", "Still?"), said, strict=True):
        await tab.send(question)
        await tab.reply_is("complete")
        await expect(tab.reply.get_by_text(what)).to_be_visible()
    await tab.page.reload()
    for what in said:
        await expect(tab.page.get_by_text(what)).to_be_visible()


async def test_a_budget_that_is_used_up_is_told_with_the_time_and_the_text_is_kept(visit):
    tab = await visit()
    detail = "This message costs about 50 units, and 3 of 1,000 are left. There will be enough in 20 min."
    body = {"title": "No", "detail": detail, "status": 429, "code": "quota_exceeded", "retryable": True}
    headers = {"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "3"}
    refusal = {"status": 429, "headers": headers | {"content-type": "application/problem+json"}}
    text = json.dumps(body | {"retry_after": 1_200})
    await tab.page.route("**/v1/conversations/*/messages", lambda route: route.fulfill(**refusal, body=text))
    await tab.field.fill("Is there any left?")
    await tab.field.press("Enter")
    notice = tab.page.locator(".notice")
    await expect(notice).to_contain_text(detail)
    await expect(notice).to_contain_text(re.compile(r"Try again at \d+:\d+"))
    await expect(tab.field).to_have_value("Is there any left?")
    await expect(tab.page.get_by_text("Less than 1 % of your budget is left.")).to_be_visible()


async def test_what_is_known_about_the_user_is_listed_added_reworded_deleted_and_turned_off(visit):
    tab = await visit(**PHONE)
    await tab.button("Open the list").tap()
    await tab.button("Memory: what is known about you").tap()
    dialog = tab.page.get_by_role("dialog", name="Memory")
    switch = dialog.get_by_role("switch", name="Give my memories to the model")
    await expect(switch).not_to_be_checked()
    field = dialog.get_by_label("New memory")
    for text in ("I live in Lisbon.", "I am called Ada."):
        await field.fill(text)
        await field.press("Enter")
        await expect(field).to_have_value("")
    memories = dialog.get_by_role("list", name="Memories").get_by_role("listitem")
    await expect(memories).to_have_count(2)
    await tab.button("Reword: I live in Lisbon.", dialog).tap()
    reworded = dialog.get_by_label("Reword this memory")
    await expect(reworded).to_be_focused()
    await reworded.fill("I live in Porto.")
    await reworded.press("Enter")
    await expect(tab.button("Reword: I live in Porto.", dialog)).to_be_focused()
    await tab.button("Reword: I live in Porto.", dialog).tap()
    await reworded.fill("I live nowhere.")
    await tab.button("Cancel", dialog).tap()
    await expect(tab.button("Reword: I live in Porto.", dialog)).to_be_focused()
    await tab.button("Delete: I am called Ada.", dialog).tap()
    await expect(memories).to_have_text(["I live in Porto."])
    async with tab.page.expect_response("**/v1/me"):
        await switch.check()
    await expect(switch).to_be_checked()
    await tab.page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    assert (await tab.api("GET", "v1/me"))["memory"] is True
    await tab.page.reload()
    await tab.button("Open the list").tap()
    await tab.button("Memory: what is known about you").tap()
    await expect(memories).to_have_text(["I live in Porto."])
    await tab.button("Delete: I live in Porto.", dialog).tap()
    async with tab.page.expect_response("**/v1/me"):
        await switch.uncheck()
    await expect(memories).to_have_count(0)
    assert (await tab.api("GET", "v1/me/memories"))["data"] == []
    assert (await tab.api("GET", "v1/me"))["memory"] is False
