"""Long conversations: the line where they are folded, the summary, recalled turns, the meter, pins."""

import asyncio
import itertools
import re

import pytest
from contrast import worst_contrast
from folded import PARTS, WINDOW, Folded, message_id
from playwright.async_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
CONTEXT = re.compile(r"Context: \d+ % of the model's window is used")
TALL = "A paragraph of a reply, long enough to fill a few lines on any screen that shows it. " * 4


def texts_of(count):
    """Questions and answers in turn."""
    return [f"Turn {number}. " + (TALL if number % 2 else "And then?") for number in range(count)]


def row(tab, number):
    """One of the messages, by its number."""
    return tab.page.locator(f"article[data-message-id={message_id(number)}]")


async def test_where_a_conversation_is_folded_a_line_says_so_and_the_summary_can_be_reworded(visit):
    tab = await visit()
    folded = Folded(tab, texts_of(12), 5, {})
    await folded.open()
    line = tab.button("Earlier messages are summarised")
    await expect(line.locator("xpath=ancestor::article")).to_have_attribute("data-message-id", message_id(5))
    keyboard = tab.page.keyboard
    await line.focus()
    await keyboard.press("Enter")
    dialog = tab.page.get_by_role("dialog", name="Summary of the earlier messages")
    await expect(dialog.get_by_role("heading", name="Facts")).to_be_visible()
    await expect(dialog).to_contain_text("321 tokens, version 1.")
    await expect(tab.button("Close", dialog)).to_be_focused()
    await keyboard.press("Shift+Tab")
    await keyboard.press("Enter")
    area = dialog.get_by_label("Summary text")
    await expect(area).to_be_focused()
    await area.fill("The cat is called Mo.")
    await tab.button("Save", dialog).click()
    await expect(dialog).to_contain_text("version 2, edited by you")
    await expect(dialog.get_by_role("region", name="Summary")).to_have_text("The cat is called Mo.")
    await expect(tab.button("Edit", dialog)).to_be_focused()
    await keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await expect(line).to_be_focused()
    assert folded.versions[-1]["text"] == "The cat is called Mo."


async def test_a_summary_that_changed_meanwhile_is_shown_beside_the_text_that_was_written(visit):
    tab = await visit(**PHONE)
    folded = Folded(tab, texts_of(12), 5, {})
    await folded.open()
    await tab.button("Earlier messages are summarised").tap()
    dialog = tab.page.get_by_role("dialog", name="Summary of the earlier messages")
    await tab.button("Edit", dialog).tap()
    area = dialog.get_by_label("Summary text")
    await area.fill("x" * 1_500)
    await tab.button("Save", dialog).tap()
    await expect(dialog.get_by_role("alert")).to_have_text("It has 1,500 tokens, 1,000 are allowed.")
    await area.fill("Mine.")
    await tab.page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    await tab.page.reload()
    await tab.button("Earlier messages are summarised").tap()
    await expect(area).to_have_value("Mine.")  # not lost by leaving
    folded.change("Theirs.")
    await tab.button("Save", dialog).tap()
    await expect(dialog.get_by_role("region", name="The newer version")).to_have_text("Theirs.")
    await expect(area).to_have_value("Mine.")
    width = await tab.page.evaluate("() => [document.documentElement.scrollWidth, visualViewport.width]")
    assert width == [390, 390]
    await tab.button("Replace it with mine", dialog).tap()
    await expect(dialog.get_by_role("region", name="Summary")).to_have_text("Mine.")
    assert [version["text"] for version in folded.versions][1:] == ["Theirs.", "Mine."]


@pytest.mark.parametrize("count", [60, 400])  # all drawn; only those near the viewport
async def test_a_chip_leads_to_the_recalled_turn_however_far_up_it_is(visit, count):
    tab = await visit()
    texts = texts_of(count)
    # Not as tall as it looks: where the rows below it are is known only when it is drawn.
    texts[7] = "Links.\n\n" + "".join(f"[{number}]: https://example.org/{number}\n" for number in range(60))
    folded = Folded(tab, texts, count - 21, {count - 1: [8, 20]})
    await folded.open()
    chips = tab.reply.get_by_role("group", name="What this reply rests on")
    await expect(chips.get_by_role("button")).to_have_count(2)  # a turn each, not a message each
    await expect(chips).to_contain_text("2 oldest turns left out")
    await expect(row(tab, 8)).not_to_be_in_viewport()
    await chips.get_by_role("button", name="Recalled: Turn 8. And then?. Go there").focus()
    await tab.page.keyboard.press("Enter")
    await expect(row(tab, 8)).to_be_in_viewport(ratio=1)
    await expect(row(tab, 8)).to_be_focused()
    await expect(row(tab, 8)).to_have_class("message is-user is-flashed")
    await expect(row(tab, 8)).not_to_have_class("is-flashed")
    assert len(folded.asked) < 12  # of the replies that were seen, not of all
    await tab.button("Jump to the newest message").click()
    await expect(chips).to_be_in_viewport()


async def test_what_is_learned_late_moves_nothing_that_is_read(visit):
    tab = await visit()
    folded = Folded(tab, texts_of(40), 9, {number: [2] for number in range(21, 40, 2)})
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def wait(route):
        asked.set()
        await go_on.wait()
        await route.fallback()

    await folded.open()
    await tab.page.route("**/summaries**", wait)
    await tab.page.route("**/v1/responses/*/context", wait)
    await tab.page.reload()
    await expect(row(tab, 39)).to_be_in_viewport()
    await asked.wait()
    where = """(id) => {
      const view = document.querySelector(".viewport");
      const row = document.querySelector(`[data-message-id=${id}]`);
      return [row.getBoundingClientRect().top, row.getBoundingClientRect().height];
    }"""
    await row(tab, 29).evaluate("(row) => row.scrollIntoView({ block: 'start' })")
    await expect(tab.button("Jump to the newest message")).to_be_visible()
    before = await tab.page.evaluate(where, message_id(29))
    go_on.set()
    await expect(tab.button("Earlier messages are summarised")).to_be_attached()
    await expect(row(tab, 29).get_by_role("group", name="What this reply rests on")).to_be_visible()
    assert await tab.page.evaluate(where, message_id(29)) == pytest.approx(before, abs=1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_that_is_told_can_be_read_on_its_ground(visit, scheme):
    tab = await visit(color_scheme=scheme)
    await Folded(tab, texts_of(12), 5, {11: [0]}).open()
    await expect(tab.reply.get_by_role("group", name="What this reply rests on")).to_be_visible()
    await tab.page.locator(".meter").click()
    worst = [await worst_contrast(tab)]
    await tab.page.keyboard.press("Escape")
    await tab.button("Earlier messages are summarised").click()
    worst.append(await worst_contrast(tab))
    assert min(worst)[0] >= 4.5, worst


# Of a bar, the share of its width that each part takes.
WIDTHS = """bar => Object.fromEntries([...bar.children].map((part) =>
    [part.className, part.getBoundingClientRect().width / bar.getBoundingClientRect().width]))"""


async def test_the_meter_tells_what_the_window_holds(visit):
    tab = await visit()
    await Folded(tab, texts_of(12), 5, {11: [2]}).open()
    meter = tab.button("Context: 47 % of the model's window is used")
    await meter.focus()
    await tab.page.keyboard.press("Enter")
    details = tab.page.get_by_role("dialog", name="What the model was given")
    await expect(details).to_be_focused()
    told = (await details.inner_text()).split("\n")
    numbers = dict(itertools.pairwise(told))
    assert (
        numbers.items()
        >= {
            "Instructions": "100",
            "Summary": "321",
            "Messages, word for word": "3,000",
            "Recalled messages": "400",
            "Your message": "50",
            "Kept free for the reply": "2,048",
        }.items()
    )
    assert not {"Memory", "Pinned messages"} & set(told)
    for bar in (meter, details):
        widths = await bar.locator(".meter-bar").evaluate(WIDTHS)
        assert widths == {f"part-{part}": pytest.approx(size / WINDOW, abs=0.005) for part, size in PARTS.items()}
    await expect(details).to_contain_text(
        "3,871 of 8,192 tokens for the newest reply. 3,200 of them were ready from before."
    )
    await expect(details).to_contain_text("The 2 oldest turns did not fit and were left out.")
    await tab.page.keyboard.press("Escape")
    await expect(details).to_be_hidden()
    await expect(meter).to_be_focused()


async def test_a_message_is_pinned_and_unpinned_with_the_keyboard(visit):
    tab = await visit()
    folded = Folded(tab, texts_of(12), 5, {})
    await folded.open()
    more = tab.button("More for this message", row(tab, 10))
    for name in ("Pin this message", "Unpin this message"):
        await more.focus()
        await tab.page.keyboard.press("Enter")
        await expect(tab.page.get_by_role("menuitem", name=name, exact=True)).to_be_focused()
        async with tab.page.expect_response(lambda answer: answer.request.method == "PATCH"):
            await tab.page.keyboard.press("Enter")
        await expect(row(tab, 10).get_by_text("Pinned", exact=True)).to_have_count(
            1 if name == "Pin this message" else 0
        )
        await expect(more).to_be_focused()
    assert folded.pins == [(message_id(10), True), (message_id(10), False)]


async def test_a_conversation_that_outgrows_the_window_is_folded_and_goes_on(visit):
    tab = await visit()
    words = "and some more words about it "
    await tab.send("My cat is called Mu, " + words * 180)
    await expect(tab.page.locator(".meter")).to_have_accessible_name(CONTEXT)
    await tab.reply_is("complete")
    await tab.button("More for this message", tab.question).click()
    await tab.page.get_by_role("menuitem", name="Pin this message").click()
    line = tab.button("Earlier messages are summarised")
    # So long that a fold is due, of the one turn before it: no other one comes while its summary is reworded.
    await tab.send("And then, " + words * 650)
    await tab.reply_is("complete")
    await line.click()
    dialog = tab.page.get_by_role("dialog", name="Summary of the earlier messages")
    await tab.button("Edit", dialog).click()
    await dialog.get_by_label("Summary text").fill("The cat is called Mo now.")
    await tab.button("Save", dialog).click()
    await expect(dialog).to_contain_text("version 2, edited by you")
    await tab.page.keyboard.press("Escape")
    await tab.send("What is my cat called?")
    await tab.reply_is("complete")
    context = await tab.api("GET", f"v1/responses/{(await tab.stored_reply())['response_id']}/context")
    assert context["condensed"]
    await tab.page.reload()
    await expect(line).to_be_attached()
    first = tab.messages.first
    await expect(first.get_by_text("Pinned", exact=True)).to_be_attached()
    summaries = (await tab.api("GET", f"v1/conversations/{tab.conversation_id}/summaries"))["data"]
    assert "The cat is called Mo now." in [summary["text"] for summary in summaries]
