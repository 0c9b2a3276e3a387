"""A folded conversation in the place of the server's: its summary, what its replies were made of, and its pins."""

from __future__ import annotations

import json
from typing import Any

from chat_page import ChatPage
from playwright.async_api import Route
from stand_ins import conversation_of

WINDOW = 8_192
LONGEST_SUMMARY = 1_000
PARTS = {
    "system": 100, "memory": 0, "summary": 321, "pinned": 0, "verbatim": 3_000, "recalled": 400, "question": 50,
}  # fmt: skip
"""Tokens of every reply's prompt."""


def message_id(number: int) -> str:
    """Of the conversation's messages, from 0."""
    return f"msg_{number:05d}"


class Folded:
    """Messages up to number ``through`` are summarised. ``refusal`` answers the next PUT of a summary."""

    def __init__(self, tab: ChatPage, texts: list[str], through: int, recalled: dict[int, list[int]]) -> None:
        self._tab = tab
        self._texts = texts
        self._recalled = recalled
        self.through = through
        self.versions = [self._summary(1, "## Facts\n\n- The cat is called **Mu**.", edited=False)]
        self.asked: list[str] = []
        self.pins: list[tuple[str, bool]] = []
        self.changes: dict[str, dict[str, Any]] = {}

    async def open(self) -> None:
        """Answer for the server from here on, and show the conversation."""
        page = self._tab.page
        identifier = await conversation_of(self._tab, self._texts, self.changes)
        await page.route(f"**/v1/conversations/{identifier}/summaries**", self._summaries)
        await page.route("**/v1/responses/*/context", self._context)
        await page.route("**/v1/messages/*", self._pin)
        await self._tab.open(f"c/{identifier}")

    def change(self, text: str) -> None:
        """Somebody else rewrites the summary."""
        self.versions.append(self._summary(len(self.versions) + 1, text, edited=True))

    def _summary(self, version: int, text: str, *, edited: bool) -> dict[str, Any]:
        return {
            "id": f"sum_{version}",
            "through_message_id": message_id(self.through),
            "version": version,
            "text": text,
            "tokens": 321,
            "edited": edited,
            "created_at": "2026-01-01T00:00:00Z",
        }

    async def _summaries(self, route: Route) -> None:
        if route.request.method == "GET":
            answer: dict[str, Any] = {"json": {"data": self.versions[-1:]}}
        else:
            answer = self._put(json.loads(route.request.post_data or ""))
        await route.fulfill(**answer)

    def _put(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["version"] != self.versions[-1]["version"]:
            return refusal(409, "summary_changed", "It has changed.")
        if len(body["text"]) > LONGEST_SUMMARY:
            return refusal(422, "invalid_input", "It has 1,500 tokens, 1,000 are allowed.")
        self.change(body["text"])
        return {"json": self.versions[-1]}

    async def _context(self, route: Route) -> None:
        response = route.request.url.split("/")[-2]
        self.asked.append(response)
        turns = self._recalled.get(int(response.rsplit("_", 1)[-1]), [])
        body = {
            "window": WINDOW,
            "reply_reserve": 2_048,
            "prompt_tokens": sum(PARTS.values()),
            "cached_tokens": 3_200,
            "parts": PARTS,
            "condensed": True,
            "left_out": 2 if turns else 0,
            "summary": {"id": "sum_1", "version": 1, "through_message_id": message_id(self.through), "tokens": 321},
            "recalled": [
                {
                    "message_ids": [message_id(turn), message_id(turn + 1)],
                    "score": 0.5,
                    "tokens": 200,
                    "created_at": "2026-01-01T00:00:00Z",
                }
                for turn in turns
            ],
        }
        await route.fulfill(json=body)

    async def _pin(self, route: Route) -> None:
        pinned = json.loads(route.request.post_data or "")["pinned"]
        message = route.request.url.rsplit("/", 1)[-1]
        self.pins.append((message, pinned))
        self.changes[message] = {"pinned": pinned}
        await route.fulfill(json={"id": message, "pinned": pinned})


def refusal(status: int, code: str, detail: str) -> dict[str, Any]:
    """A problem document, as a route's answer."""
    body = {"title": "No", "detail": detail, "status": status, "code": code, "retryable": False}
    return {"status": status, "content_type": "application/problem+json", "body": json.dumps(body)}
