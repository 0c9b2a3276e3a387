"""``openai:`` at its start: a server that is not there may come; one that is there and refuses is to be set right."""

import asyncio
import contextlib
import json
from http import HTTPStatus

import pytest

from chatsvc.errors import ChatError
from chatsvc.inference.base import ServerAway
from chatsvc.inference.factory import create_engine

LIST = {"data": [{"id": "far", "max_model_len": 12_000}]}


@contextlib.asynccontextmanager
async def listing(*answers):
    """A server that gives these answers, status and body, to requests in turn, the last one for ever."""
    left = list(answers)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        status, body = left.pop(0) if len(left) > 1 else left[0]
        text = json.dumps(body)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\ncontent-length: {len(text)}"
        writer.write(f"{head}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@contextlib.asynccontextmanager
async def engine_at(url, options="slots=3"):
    engine = create_engine(f"openai:{url}?{options}#far", name="m", data_dir=None)
    try:
        yield engine
    finally:
        await engine.aclose()


async def refused(engine):
    with pytest.raises(ChatError) as caught:
        await engine.start(lambda _line: None)
    return caught.value


@pytest.mark.parametrize(
    ("status", "body", "may_come"),
    [
        (500, {}, True),
        (502, {}, True),
        (503, {}, True),
        (429, {}, True),
        (401, {}, False),
        (403, {}, False),
        (400, {}, False),
        (302, {}, False),
        (200, {"data": [{"id": "near"}]}, False),
        (200, ["no list of models"], False),
    ],
)
async def test_what_may_pass_by_itself_is_told_apart_from_what_must_be_set_right(status, body, may_come):
    async with listing((status, body)) as url, engine_at(url) as engine:
        assert isinstance(await refused(engine), ServerAway) is may_come


async def test_a_server_that_cannot_be_reached_may_come_and_what_is_known_without_it_is_known():
    async with listing((200, LIST)) as url:
        pass
    async with engine_at(url) as engine:
        assert isinstance(await refused(engine), ServerAway)
        assert (engine.limits.window, engine.limits.slots) == (8192, 3)
    async with engine_at(url, "window=5000") as engine:
        assert isinstance(await refused(engine), ServerAway)
        assert engine.limits.window == 5000


@pytest.mark.parametrize("status", [302, 400, 401, 503])
async def test_a_server_that_answers_something_else_later_is_not_ready_until_it_lists_its_models_again(status):
    async with listing((200, LIST), (status, {}), (200, LIST)) as url, engine_at(url) as engine:
        await engine.start(lambda _line: None)
        assert engine.limits.window == 12_000
        health = await engine.health()
        assert not health.ready
        assert str(status) in health.reason
        assert (await engine.health()).ready


@pytest.mark.parametrize("answer", [None, (401, {}), (200, {"data": [{"id": "near"}]}), (200, ["no list of models"])])
async def test_no_fault_tells_who_signs_in_at_the_server_or_how(answer):
    async with listing(answer or (200, LIST)) as url:
        told = []
        if answer is not None:
            told.append(await fault_at(url, told.append))
    if answer is None:
        told.append(await fault_at(url, told.append))
    assert len(told) == 2
    assert not [line for line in told if "hunter2" in line or "mallory" in line]


async def fault_at(url, progress):
    async with engine_at(url.replace("://", "://mallory:hunter2@")) as engine:
        with pytest.raises(ChatError) as caught:
            await engine.start(progress)
    return caught.value.detail
