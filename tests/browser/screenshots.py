"""Takes the pictures of the README: ``python tests/browser/screenshots.py http://127.0.0.1:8080 docs/img``.

A server must be running there; it is asked a few questions when it has no conversation yet. Not a test.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import uuid
from pathlib import Path

from chat_page import ChatPage
from playwright.async_api import async_playwright

QUESTIONS = (
    ("Write a haiku about the sea.",),
    ("What is photosynthesis?",),
    ("Give me five names for a small sailing boat, as a list.",),
    ("What is the capital of France?", "Write a Python function that reverses a string."),
)
SHOTS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1200, "height": 760}, "device_scale_factor": 2},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1200, "height": 760}, "device_scale_factor": 2},
    "phone": {
        "color_scheme": "light",
        "viewport": {"width": 390, "height": 780},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
}


async def take(base_url: str, folder: Path) -> None:
    """Write ``screenshot-<name>.png`` for each of ``SHOTS``."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        first = await ChatPage(await browser.new_page(), base_url).open()
        if not (await first.api("GET", "v1/conversations?limit=1"))["data"]:
            await ask(first)
        conversation = (await first.api("GET", "v1/conversations?limit=1"))["data"][0]["id"]
        for name, options in SHOTS.items():
            tab = await ChatPage(await browser.new_page(**options), base_url).open(f"c/{conversation}")
            await tab.reply_is("complete")
            await tab.page.mouse.move(0, 0)
            await tab.page.screenshot(path=folder / f"screenshot-{name}.png")
        await browser.close()


async def ask(tab: ChatPage) -> None:
    """Have all questions answered, each group in a conversation of its own; without chance, to get equal pictures."""
    for questions in QUESTIONS:
        conversation = (await tab.api("POST", "v1/conversations", {}))["id"]
        for question in questions:
            body = {"content": question, "client_msg_id": uuid.uuid4().hex, "temperature": 0}
            await tab.api("POST", f"v1/conversations/{conversation}/messages", body)
            await tab.open(f"c/{conversation}")
            await tab.reply_is("complete", timeout_s=180)


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1], Path(sys.argv[2])))
