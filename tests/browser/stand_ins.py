"""Answers in place of the server's, for amounts that would take long to make."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

from chat_page import ChatPage
from playwright.async_api import Route

DAY = "2026-01-01"


def _conversation(identifier: str, title: str, time: str) -> dict[str, Any]:
    times = {"created_at": time, "updated_at": time}
    return {"id": identifier, "title": title, "pinned": False, "head_message_id": None, **times}


async def conversation_of(tab: ChatPage, texts: list[str], changes: dict[str, dict[str, Any]] | None = None) -> str:
    """A stored conversation with these texts, the user's and the model's in turn. Returns its id.

    ``changes`` are members of messages by id, looked at for each answer.
    """
    messages = [
        {
            "id": f"msg_{number:05d}",
            "parent_id": f"msg_{number - 1:05d}" if number else None,
            "role": "assistant" if number % 2 else "user",
            "content": text,
            "status": "complete",
            "model": "scripted" if number % 2 else None,
            "response_id": f"resp_local_{number:05d}" if number % 2 else None,
            "finish_reason": "stop" if number % 2 else None,
            "tokens": 1,
            "error_code": None,
            "created_at": f"{DAY}T{number // 3600:02d}:{number // 60 % 60:02d}:{number % 60:02d}Z",
        }
        for number, text in enumerate(texts)
    ]
    conversation = _conversation("conv_stand_in", "Stand-in", f"{DAY}T00:00:00Z")
    body = conversation | {"head_message_id": messages[-1]["id"]}

    async def answer(route: Route) -> None:
        now = [message | (changes or {}).get(message["id"], {}) for message in messages]
        await route.fulfill(json=body | {"messages": now})

    await tab.page.route("**/v1/conversations/conv_stand_in", answer)
    return "conv_stand_in"


async def many_conversations(tab: ChatPage, count: int) -> list[int]:
    """A list of that many conversations. Returns the offsets asked for, which grows as the page asks."""
    fetched: list[int] = []
    rows = [
        _conversation(
            f"conv_{number:05d}",
            f"Chat {number}",
            f"{DAY}T{23 - number // 3600:02d}:{59 - number // 60 % 60:02d}:{59 - number % 60:02d}Z",
        )
        for number in range(count)
    ]

    async def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        start, limit = int(query.get("cursor", ["0"])[0]), int(query["limit"][0])
        fetched.append(start)
        end = min(start + limit, count)
        await route.fulfill(json={"data": rows[start:end], "next_cursor": str(end) if end < count else None})

    await tab.page.route("**/v1/conversations?*", answer)
    return fetched
