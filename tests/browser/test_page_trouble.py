"""When something does not work: a calm word, nothing lost, and a way on."""

import asyncio
import json
import re
import uuid

import pytest
from cutting_proxy import CuttingProxy
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

MESSAGES = "**/v1/conversations/*/messages"


def problem(status, code, **more):
    body = {"type": "about:blank", "title": "No", "detail": "Because.", "status": status, "code": code}
    body |= {"retryable": status != 422, **more}
    return {"status": status, "content_type": "application/problem+json", "body": json.dumps(body)}


def new_message(text):
    return {"content": text, "client_msg_id": uuid.uuid4().hex}


async def test_too_many_open_replies_is_explained_and_the_text_is_kept(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    open_replies = []
    for number in range(3):
        conversation = await tab.api("POST", "v1/conversations", {})
        path = f"v1/conversations/{conversation['id']}/messages"
        open_replies.append((await tab.api("POST", path, new_message(f"Busy {number}")))["response_id"])
    await tab.field.fill("One too many")
    await tab.field.press("Enter")
    await expect(tab.page.get_by_text("3 replies of yours are still running")).to_be_visible()
    await expect(tab.field).to_have_value("One too many")
    for response in open_replies:
        await tab.api("POST", f"v1/responses/{response}/stop")
    await tab.button("Try again").click()
    await expect(tab.question).to_contain_text("One too many")
    await tab.reply_is("streaming")
    await expect(tab.page.get_by_text("still running")).to_be_hidden()
    await tab.stop_the_reply()


async def test_a_busy_branch_is_explained_and_looked_at_again(visit):
    tab = await visit()
    await tab.send("First.")
    await tab.reply_is("complete")
    await tab.page.route(
        MESSAGES, lambda route: route.fulfill(**problem(409, "conversation_busy", response_id="resp_x"))
    )
    await tab.field.fill("Too early.")
    async with tab.page.expect_response(f"**/v1/conversations/{tab.conversation_id}"):
        await tab.field.press("Enter")
    await expect(tab.page.get_by_text("A reply is still running here")).to_be_visible()
    await expect(tab.field).to_have_value("Too early.")


async def test_two_windows_that_send_at_the_same_time_keep_both_messages(visit):
    tab = await visit()
    await tab.send("Together.")
    await tab.reply_is("complete")
    # What the poll would show in a moment must not arrive before the message is sent.
    await tab.page.route("**/v1/conversations?*", lambda route: route.abort())
    path = f"v1/conversations/{tab.conversation_id}/messages"
    await tab.api("POST", path, new_message("From elsewhere."))
    await tab.field.fill("From here.")
    await tab.field.press("Enter")
    await expect(tab.question).to_contain_text("From here.")
    await tab.page.unroute("**/v1/conversations?*")
    await tab.look_again()
    await expect(tab.question.get_by_role("group", name="wording 2 of 2")).to_be_visible()
    await tab.reply_is("complete")
    await tab.question.hover()
    await tab.button("Previous wording", tab.question).click()
    await expect(tab.question).to_contain_text("From elsewhere.")
    await tab.reply_is("complete")


async def test_a_short_absence_of_the_server_is_waited_for(visit):
    tab = await visit()
    refusals = iter([problem(503, "store_unavailable", retry_after=0.2)] * 2)
    bodies = []

    async def refuse_twice(route):
        bodies.append(json.loads(route.request.post_data))
        refusal = next(refusals, None)
        await (route.fulfill(**refusal) if refusal else route.continue_())

    await tab.page.route(MESSAGES, refuse_twice)
    await tab.send("Patience.")
    await tab.reply_is("complete")
    assert len(bodies) == 3
    assert len({body["client_msg_id"] for body in bodies}) == 1


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (problem(503, "engine_unavailable", retry_after=30), "Try again in 30 s. Your text is kept."),
        (problem(422, "message_too_long", detail="It has 9,000 tokens, 8,192 fit."), "It has 9,000 tokens, 8,192 fit."),
        (problem(413, "payload_too_large"), "too large to send"),
    ],
)
async def test_a_refusal_is_told_and_the_text_comes_back(visit, refusal, said):
    tab = await visit()
    await tab.page.route(MESSAGES, lambda route: route.fulfill(**refusal))
    await tab.field.fill("Keep this text")
    await tab.field.press("Enter")
    await expect(tab.page.locator(".notice")).to_contain_text(said)
    await expect(tab.field).to_have_value("Keep this text")
    await tab.page.reload()
    await expect(tab.field).to_have_value("Keep this text")
    await expect(tab.page.get_by_role("heading", name="New chat")).to_be_visible()
    await expect(tab.page.get_by_text("Untitled")).to_have_count(0)
    await tab.page.unroute(MESSAGES)
    await tab.field.press("Enter")
    await expect(tab.question).to_contain_text("Keep this text")
    await expect(tab.page.locator(".notice")).to_be_hidden()
    await tab.reply_is("complete")


async def test_a_lost_answer_does_not_start_a_second_reply(visit):
    tab = await visit()
    lost = iter([True])

    async def lose_the_answer(route):
        if next(lost, False):
            await route.fetch()  # the server has taken it; the answer never arrives
            await route.abort()
        else:
            await route.continue_()

    await tab.page.route(MESSAGES, lose_the_answer)
    await tab.send("Only once.")
    await tab.reply_is("complete")
    assert len((await tab.stored())["messages"]) == 2


async def test_going_offline_is_said_and_coming_back_is_noticed(visit):
    tab = await visit()
    asked, gone = asyncio.Event(), asyncio.Event()

    async def break_off(route):
        asked.set()
        await gone.wait()
        await route.abort()

    await tab.page.route("**/v1/models", break_off, times=1)
    await tab.page.reload()
    await asked.wait()
    await tab.page.context.set_offline(True)
    await expect(tab.page.get_by_text("You are offline")).to_be_visible()
    # What was under way breaks off, and that has the same cause.
    async with tab.page.expect_event("requestfailed", lambda request: request.url.endswith("/v1/models")):
        gone.set()
    await expect(tab.page.get_by_text("The server cannot be reached")).to_have_count(0)
    await expect(tab.page.get_by_text("You are offline")).to_be_visible()
    await tab.field.fill("Typed in a tunnel")
    await tab.page.context.set_offline(False)
    await expect(tab.page.get_by_text("You are offline")).to_be_hidden()
    await expect(tab.field).to_have_value("Typed in a tunnel")


@pytest.mark.slow
async def test_a_server_that_was_killed_is_away_not_the_network_and_its_return_is_noticed(visit, start_server):
    server = start_server("scripted:?tokens_per_s=20&tokens=300")
    tab = await visit(base_url=server.base_url)
    away = tab.page.locator(".notice", has_text="The server cannot be reached")
    await tab.send("And then it is gone.")
    await tab.reply_shows_text(20)
    server.kill()
    await expect(away).to_be_visible()
    await expect(tab.page.get_by_text("You are offline")).to_have_count(0)
    await tab.field.fill("Typed meanwhile")
    await asyncio.to_thread(server.start)
    await expect(away).to_be_hidden()
    await expect(tab.field).to_have_value("Typed meanwhile")
    await tab.reply_is("failed")


async def test_a_stream_that_comes_back_brings_the_news_that_the_server_is_there(visit, slow_server):
    async with CuttingProxy(slow_server.port).running() as proxy:
        tab = await visit(base_url=f"http://127.0.0.1:{proxy.port}")
        away = tab.page.get_by_text("The server cannot be reached")
        await tab.send("Back before the poll.")
        await tab.page.clock.install()
        await tab.page.reload()
        await tab.reply_shows_text(20)
        # From here on the page's clock stands still: no poll is due any more.
        await tab.page.clock.pause_at(await tab.page.evaluate("() => Date.now() + 1000"))
        await tab.page.route("**/v1/conversations?*", lambda route: route.abort())
        await tab.look_again()
        await expect(away).to_be_visible()
        await tab.page.unroute("**/v1/conversations?*")
        proxy.vanish()
        proxy.come_back()
        await expect(away).to_be_hidden()
        await tab.page.clock.resume()
        await tab.stop_the_reply()


async def test_word_of_a_running_reply_goes_when_the_reply_has_ended(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    await tab.send("Still going.")
    await tab.reply_shows_text(5)
    await tab.field.fill("Next.")
    await tab.field.press("Enter")
    notice = tab.page.get_by_text("The reply is still running")
    await expect(notice).to_be_visible()
    await tab.api("POST", f"v1/responses/{(await tab.stored_reply())['response_id']}/stop")
    await tab.reply_is("stopped")
    await expect(notice).to_be_hidden()
    await expect(tab.field).to_have_value("Next.")


async def test_being_signed_out_is_said(visit):
    tab = await visit()
    await tab.page.route(MESSAGES, lambda route: route.fulfill(**problem(401, "not_authenticated")))
    await tab.field.fill("Who am I?")
    await tab.field.press("Enter")
    await expect(tab.page.get_by_text("You are signed out")).to_be_visible()
    await expect(tab.button("Reload")).to_be_visible()
    await expect(tab.field).to_have_value("Who am I?")


@pytest.fixture(scope="module")
def one_at_a_time(start_server):
    return start_server("scripted:?tokens_per_s=25&tokens=1500&slots=1", CHATSVC_SERVER_GRACE_S="1")


async def line_up(visit, server, hold=None):
    """Two tabs whose replies run at the same time where only one can: the second waits.

    Its streams are held back until ``hold`` is set.
    """
    first = await visit(base_url=server.base_url)
    second = await visit(base_url=server.base_url)
    if hold is not None:

        async def when_let(route):
            await hold.wait()
            await route.continue_()

        await second.page.route("**/stream?*", when_let)
    await first.send("First in line.")
    await first.reply_shows_text(5)
    await second.send("Second in line.")
    return first, second


async def test_a_queued_reply_tells_its_place_and_then_streams(visit, one_at_a_time):
    let = asyncio.Event()
    first, second = await line_up(visit, one_at_a_time, hold=let)
    # The answer to the message says where; only the stream, for how long.
    await expect(second.reply).to_contain_text("Waiting in the queue, position 1")
    await expect(second.reply).not_to_contain_text("about")
    # It may be over in a moment, so it is not drawn at once.
    passing = second.reply.locator(".progress .is-late")
    await expect(passing).to_have_count(1)
    let.set()
    await expect(second.reply).to_contain_text(re.compile(r"Waiting in the queue, position 1 · about \d+ (s|min)"))
    await expect(passing).to_have_count(0)
    await expect(second.page.locator("[aria-live=polite]")).to_contain_text("Waiting in the queue, position 1")
    await first.stop_the_reply()
    await second.reply_is("streaming")
    await second.reply_shows_text(40)
    await second.stop_the_reply()
    stored = await second.stored_reply()
    assert await second.copied_reply() == stored["content"]


async def test_a_queued_reply_can_be_stopped(visit, one_at_a_time):
    first, second = await line_up(visit, one_at_a_time)
    await second.reply_is("queued")
    await second.stop_the_reply()
    await expect(second.reply).to_contain_text("Stopped")
    await expect(second.button("Continue")).to_be_hidden()
    await first.stop_the_reply()


async def test_a_hidden_tab_lets_go_of_its_stream_and_resumes_where_it_was(visit, slow_server):
    tab = await visit(base_url=slow_server.base_url)
    streams = []
    tab.page.on("request", lambda request: streams.append(request.url) if "/stream" in request.url else None)
    await tab.send("Look away.")
    await tab.reply_shows_text(20)
    await tab.page.clock.install()
    await set_visibility(tab, "hidden")
    async with tab.page.expect_event("requestfailed", lambda request: "/stream" in request.url):
        await tab.page.clock.fast_forward(5_000)
    assert len(streams) == 1
    before = len(await tab.shown_text())
    await set_visibility(tab, "visible")
    await tab.reply_shows_text(before + 20)
    await tab.stop_the_reply()
    assert "last_event_id=" in streams[1]
    stored = await tab.stored_reply()
    assert await tab.copied_reply() == stored["content"]


async def set_visibility(tab, state):
    await tab.page.evaluate(
        """(state) => {
          Object.defineProperty(document, "visibilityState", { configurable: true, get: () => state });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        state,
    )
