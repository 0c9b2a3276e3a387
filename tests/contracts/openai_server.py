"""A small server that speaks OpenAI's chat completions, its replies said by an engine: the far side of ``openai:``.

It does on purpose what servers out there do: comments between events, both kinds of line ends, characters that some
clients take for line ends sent raw, and characters cut into the halves of a surrogate pair.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn

from chatsvc.conversation import Role
from chatsvc.inference.base import Engine
from chatsvc.prompt import ChatMessage, Chunk, Sampling

MOST_STOPS = 4
"""As the protocol says."""


class OpenAIServer:
    """An ASGI application. ``key`` is the only one accepted; ``faults`` are statuses to answer the next posts with."""

    def __init__(self, engine: Engine, *, key: str = "k") -> None:
        self.engine = engine
        self.key = key
        self.faults: list[int] = []
        self.break_after: int | None = None
        """Cut the connection of each reply after so many events."""
        self.asked: list[dict[str, Any]] = []
        self._served = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        if headers.get(b"authorization") != f"Bearer {self.key}".encode():
            await self._json(send, 401, {"error": {"message": "wrong key"}})
        elif scope["path"] == "/v1/models":
            listed = [{"id": self.engine.limits.model, "max_model_len": self.engine.limits.window}]
            await self._json(send, 200, {"object": "list", "data": listed})
        elif scope["path"] == "/v1/chat/completions":
            body = b""
            while (message := await receive())["type"] == "http.request":
                body += message["body"]
                if not message["more_body"]:
                    break
            asked = json.loads(body)
            if len(asked.get("stop", ())) > MOST_STOPS:
                await self._json(send, 400, {"error": {"message": "too many stop strings"}})
            elif self.faults:
                await self._json(send, self.faults.pop(0), {"error": {"message": "told to"}}, {b"retry-after": b"7"})
            else:
                await self._complete(asked, receive, send)
        else:
            await self._json(send, 404, {"error": {"message": "no such path"}})

    async def _complete(self, body: dict[str, Any], receive: Any, send: Any) -> None:
        self.asked.append(body)
        answering = asyncio.create_task(self._stream(body, send))
        leaving = asyncio.create_task(receive())
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _stream(self, body: dict[str, Any], send: Any) -> None:
        messages = [ChatMessage(Role(m["role"]), m["content"]) for m in body["messages"]]
        sampling = Sampling(max_tokens=body["max_tokens"], stop=tuple(body.get("stop", ())))
        prompt = await self.engine.render(messages)
        self._served += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        events = 0
        output_tokens = 0
        last: Chunk | None = None
        async with aclosing(self.engine.generate(prompt, sampling, f"served-{self._served}")) as chunks:
            async for chunk in chunks:
                last = chunk
                output_tokens += chunk.output_tokens
                for text in _halves(chunk.text):
                    events += 1
                    await self._event(send, {"choices": [{"index": 0, "delta": {"content": text}}]}, events)
                    if events == self.break_after:
                        raise ConnectionError("told to")
        assert last is not None
        await self._event(send, {"choices": [{"index": 0, "delta": {}, "finish_reason": last.finish_reason}]}, events)
        usage = {
            "prompt_tokens": prompt.tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        }
        await self._event(send, {"choices": [], "usage": usage}, events)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _event(self, send: Any, event: dict[str, Any], number: int) -> None:
        # Escapes are needed where a character was cut in half; elsewhere everything that JSON allows goes out raw.
        text = json.dumps(event, ensure_ascii=_is_cut(event))
        end = "\r\n" if number % 2 else "\n"
        comment = f": ping{end}{end}" if number % 5 == 0 else ""
        body = f"{comment}data: {text}{end}{end}".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    @staticmethod
    async def _json(send: Any, status: int, body: Any, headers: dict[bytes, bytes] | None = None) -> None:
        sent = [(b"content-type", b"application/json"), *(headers or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _halves(text: str) -> list[str]:
    """The text, cut inside its last character where that takes two units of UTF-16."""
    if not text or ord(text[-1]) < 0x10000:
        return [text]
    high, low = divmod(ord(text[-1]) - 0x10000, 0x400)
    return [text[:-1] + chr(0xD800 + high), chr(0xDC00 + low)]


def _is_cut(event: dict[str, Any]) -> bool:
    text = event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
    return any("\ud800" <= character <= "\udfff" for character in text)


@asynccontextmanager
async def serving(application: OpenAIServer) -> AsyncIterator[str]:
    """Serve on a free port of the loopback; yields the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = _leave_signals  # type: ignore[method-assign]
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await running
        listener.close()


class _leave_signals:  # noqa: N801 - stands in for a function
    """The test process keeps its own signal handlers."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
