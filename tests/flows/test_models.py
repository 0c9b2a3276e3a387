"""Several models in one process, chosen for a conversation or for one message."""

import pytest
from api_client import Api
from reader import read_to_the_end

MODELS = """
[models.small]
engine = "scripted:?tokens_per_s=1000&text=small+words+&tokens=10"
default = true

[models.large]
engine = "scripted:?tokens_per_s=1000&text=large+words+&tokens=10&window=16000"
"""


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory):
    config = tmp_path_factory.mktemp("models") / "chatsvc.toml"
    config.write_text(MODELS)
    return start_server("", CHATSVC_CONFIG=str(config))


@pytest.fixture
def api(server, client):
    return Api(client, server.base_url)


async def test_the_models_are_listed_the_default_one_first(api):
    listed = (await api.call("GET", "/v1/models")).json()
    assert listed["object"] == "list"
    assert [(model["id"], model["object"], model["default"], model["ready"]) for model in listed["data"]] == [
        ("small", "model", True, True),
        ("large", "model", False, True),
    ]
    assert listed["data"][1]["window"] == 16_000


async def test_nobody_lists_models_without_saying_who_they_are(api, client):
    assert (await client.get(api.base + "/v1/models")).status_code == 401


async def test_a_conversation_has_a_model_and_a_message_may_name_another(api, client):
    async def said(conversation, **body):
        reply = await api.start(conversation_id=conversation, **body)
        return (await read_to_the_end(client, api.stream_url(reply))).text[:5]

    plain, large = await api.conversation(), await api.conversation(model="large")
    assert await said(plain) == "small"
    assert await said(large) == "large"
    assert await said(large, model="small") == "small"
    assert await said(large) == "large"
    refused = await api.send(plain, model="huge")
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_model")
