"""A server that is started where something is missing says what, why, and what to do."""

import json

from api_client import Api
from server import free_port


def lines(server, level):
    """The log lines of one level."""
    parsed = (json.loads(line) for line in server.log().splitlines() if line.startswith("{"))
    return [line for line in parsed if line["level"] == level]


async def test_a_wrong_redis_address_is_warned_of_once_and_refuses_new_messages_only(start_server, client):
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    server = start_server(CHATSVC_REDIS_URL=url, CHATSVC_DATABASE_TIMEOUT_S="1")
    (warning,) = [line for line in lines(server, "warning") if line["message"].startswith("Redis does not answer")]
    assert "CHATSVC_REDIS_URL" in warning["message"]
    assert "503 log_unavailable" in warning["message"]
    assert warning["reason"]
    assert "secret" not in server.log()
    api = Api(client, server.base_url)
    ready = await api.call("GET", "/readyz")
    assert ready.status_code == 200
    assert ready.json()["checks"]["redis"] != "ok"
    refused = await api.send(await api.conversation(), "hi")
    assert (refused.status_code, refused.json()["code"]) == (503, "log_unavailable")


async def test_nothing_is_warned_of_where_redis_answers(start_server):
    server = start_server()
    assert [line for line in lines(server, "warning") if "Redis" in line["message"]] == []
