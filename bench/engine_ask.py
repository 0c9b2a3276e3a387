"""How ``bench/engine.py`` asks the two servers: plain sockets, as little work per token as can be."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class Conversation(NamedTuple):
    """A conversation and whose it is."""

    user: str
    id: str


class Reply(NamedTuple):
    """Seconds from the POST to the first text, the tokens that the server says it made, and chatsvc's name for it."""

    first_s: float
    tokens: int
    response_id: str = ""


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Ask = Callable[[Connection, Conversation, str, int], Awaitable[Reply]]
"""Takes connection, conversation, prompt and the number of tokens."""


def request(method: str, path: str, body: Any = None, user: str = "nobody") -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    lines = (
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"x-forwarded-user: {user}",
    )
    return "\r\n".join((*lines, f"content-length: {len(payload)}", "", "")).encode() + payload


async def answer(reader: asyncio.StreamReader) -> Any:
    """The JSON body of an answer with a content-length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    if status >= 300:
        sys.exit(f"{status}: {body}")
    return body


async def ask_vllm(connection: Connection, _: Conversation, prompt: str, tokens: int) -> Reply:
    reader, writer = connection
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    writer.write(request("POST", "/v1/chat/completions", body))
    first = 0.0
    used = 0
    async for line in reader:
        if line.startswith(b"data: {"):
            if not first and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
            elif b'"choices":[]' in line:
                used = json.loads(line[6:])["usage"]["completion_tokens"]
        elif line.startswith(b"data: [DONE]"):
            break
    return Reply(first, used)


async def ask_chatsvc(connection: Connection, conversation: Conversation, prompt: str, tokens: int) -> Reply:
    reader, writer = connection
    body = {"content": prompt, "client_msg_id": uuid.uuid4().hex, "max_tokens": tokens, "temperature": 0}
    began = time.perf_counter()
    writer.write(request("POST", f"/v1/conversations/{conversation.id}/messages", body, conversation.user))
    started = await answer(reader)
    writer.write(request("GET", started["stream_url"], user=conversation.user))
    first = 0.0
    ending = False
    async for line in reader:
        if line.startswith(b"event: delta"):
            first = first or time.perf_counter() - began
        elif line.startswith((b"event: done", b"event: error")):
            ending = True
        elif ending and line.startswith(b"data: "):
            ended = json.loads(line[6:])
            if "usage" not in ended:
                sys.exit(f"a reply failed: {ended}")
            return Reply(first, ended["usage"]["output_tokens"], started["response_id"])
    sys.exit("a stream ended early")


async def new_conversations(port: int, count: int) -> list[Conversation]:
    """One each for so many users."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = []
    for number in range(count):
        user = f"user-{number}"
        writer.write(request("POST", "/v1/conversations", {}, user))
        made.append(Conversation(user, (await answer(reader))["id"]))
    writer.close()
    return made
