"""The page as a person uses it: what is on the screen, and what can be pressed."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Locator, Page, expect

LAN_NAME = "chat.lan"
"""Leads to this machine in the browsers of these tests; not localhost, so an insecure origin."""

# Copying is watched at the door the page uses. On plain HTTP from a LAN there is no such door.
WATCH_CLIPBOARD = """
Object.defineProperty(navigator, "clipboard", {
  configurable: true,
  value: { writeText: async (text) => { window.copiedText = text; } },
});
"""


class ChatPage:
    """One tab. ``problems`` collects what must never happen: script errors, CSP violations, dialogs."""

    def __init__(self, page: Page, base_url: str, api_url: str | None = None) -> None:
        self.page = page
        self.base_url = base_url
        self._api_url = api_url or base_url
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        page.on("dialog", self._on_dialog)
        page.on("console", self._on_console)

    async def _on_dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _on_console(self, message: Any) -> None:
        # A connection that a test cuts is reported by the browser itself; everything else is the page's fault.
        if message.type in {"error", "warning"} and not message.text.startswith("Failed to load resource"):
            self.problems.append(f"console: {message.text}")

    async def open(self, path: str = "") -> ChatPage:
        """Go to the start page, or to a path under it."""
        await self.page.goto(f"{self.base_url}/{path}")
        await expect(self.field).to_be_visible()
        return self

    @property
    def field(self) -> Locator:
        """Where messages are written."""
        return self.page.get_by_label("Message", exact=True)

    @property
    def messages(self) -> Locator:
        """The messages drawn now, pending ones excluded."""
        return self.page.locator("article[data-message-id]")

    @property
    def reply(self) -> Locator:
        """The last reply."""
        return self.page.locator("article.is-assistant").last

    @property
    def question(self) -> Locator:
        """The last message of the user."""
        return self.page.locator("article.is-user").last

    def button(self, name: str, within: Locator | None = None) -> Locator:
        """A button by what it is called."""
        return (within or self.page).get_by_role("button", name=name, exact=True)

    @property
    def conversation_id(self) -> str:
        """The conversation in the address bar."""
        return self.page.url.rsplit("/", 1)[-1]

    async def send(self, text: str) -> None:
        """Type a message and press Enter; returns when its reply has begun to exist."""
        count = await self.messages.count()
        await self.field.fill(text)
        await self.field.press("Enter")
        await expect(self.messages).to_have_count(count + 2)

    async def reply_is(self, status: str, timeout_s: float = 60) -> None:
        """Wait until the last reply has this status."""
        await expect(self.reply).to_have_attribute("data-status", status, timeout=timeout_s * 1000)

    async def reply_shows_text(self, characters: int = 1, timeout_s: float = 60) -> None:
        """Wait until so many characters of the last reply are drawn."""
        await self.page.wait_for_function(
            "(count) => [...document.querySelectorAll('.is-assistant')].at(-1)?.querySelector('.prose')"
            "?.textContent.length >= count",
            arg=characters,
            timeout=timeout_s * 1000,
        )

    async def stop_the_reply(self) -> None:
        """Press stop, and wait until the reply has stopped."""
        await self.button("Stop the reply").click()
        await self.reply_is("stopped")

    async def note_progress(self) -> None:
        """From now on keep all that is said of a running reply beside its text."""
        await self.page.evaluate("""() => {
            window.progress = [];
            new MutationObserver(() => {
                const said = document.querySelector(".progress")?.innerText.trim();
                if (said && said !== window.progress.at(-1)) window.progress.push(said);
            }).observe(document.body, { subtree: true, childList: true, characterData: true });
        }""")

    async def noted_progress(self) -> list[str]:
        """What was said of it since, without what was said twice in a row."""
        return await self.page.evaluate("() => window.progress")

    async def look_again(self) -> None:
        """Come back to the window from elsewhere: the page asks at once for what is new."""
        await self.page.evaluate("() => window.dispatchEvent(new Event('focus'))")

    async def shown_text(self) -> str:
        """What is drawn of the last reply."""
        return await self.reply.locator(".prose").inner_text()

    async def shown_html(self) -> str:
        """The last reply's nodes."""
        return await self.reply.locator(".prose").inner_html()

    async def copied_reply(self) -> str:
        """The last reply's text, as its copy button gives it."""
        await self.reply.hover()
        await self.button("Copy this reply", self.reply).click()
        await self.page.wait_for_function("() => window.copiedText !== undefined")
        return await self.page.evaluate(
            "() => { const text = window.copiedText; delete window.copiedText; return text; }"
        )

    async def api(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the API from outside of the page."""
        answer = await self.page.request.fetch(f"{self._api_url}/{path}", method=method, data=body)
        return await answer.json() if answer.ok and answer.status != 204 else answer.status

    async def stored(self) -> dict[str, Any]:
        """The conversation as it is stored."""
        return await self.api("GET", f"v1/conversations/{self.conversation_id}")

    async def stored_reply(self) -> dict[str, Any]:
        """The message that the last reply on the screen shows, as it is stored."""
        message_id = await self.reply.get_attribute("data-message-id")
        return next(message for message in (await self.stored())["messages"] if message["id"] == message_id)
