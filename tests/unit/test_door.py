"""The outermost layer: base path, foreign pages, foreign host names, media types."""

import json

import pytest

from chatsvc.api.door import Door


class Heard:
    """The application and the stream behind the door; remembers what reached them."""

    def __init__(self):
        self.requests = []

    async def app(self, scope, receive, send):
        self.requests.append(("app", scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def stream(self, response_id, scope, receive, send):
        self.requests.append(("stream", response_id))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def knock(path, method="GET", headers=(), *, base_path="/", only_local_names=False):
    heard = Heard()
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    door = Door(heard.app, heard.stream, base_path=base_path, only_local_names=only_local_names)
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in dict(headers).items()],
    }
    await door(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], heard.requests, json.loads(body) if body else None


@pytest.mark.parametrize(
    ("base", "path", "reached"),
    [
        ("/", "/v1/me", ("app", "/v1/me")),
        ("/chat/", "/chat/v1/me", ("app", "/v1/me")),
        ("/chat/", "/chat", ("app", "/")),
        ("/chat/", "/chat/", ("app", "/")),
        ("/chat/", "/healthz", ("app", "/healthz")),
        ("/chat/", "/chat/v1/responses/resp_x_1/stream", ("stream", "resp_x_1")),
        ("/", "/v1/responses/resp_x_1/stream", ("stream", "resp_x_1")),
    ],
)
async def test_requests_reach_their_route_below_the_base_path(base, path, reached):
    status, requests, _ = await knock(path, base_path=base)
    assert (status, requests) == (200, [reached])


@pytest.mark.parametrize("path", ["/", "/v1/me", "/chatter/v1/me", "/other/chat/v1/me"])
async def test_what_lies_outside_the_base_path_is_not_found(path):
    status, requests, problem = await knock(path, base_path="/chat/")
    assert (status, requests, problem["code"]) == (404, [], "not_found")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin", "origin": "http://chat.example", "host": "internal:8080"},
        {"sec-fetch-site": "none"},
        {"origin": "http://localhost:3000", "host": "localhost:8080"},
        {"origin": "https://chat.example", "host": "10.0.0.1:8080", "x-forwarded-host": "chat.example"},
    ],
)
async def test_our_own_page_and_programs_may_write_whatever_the_port(headers):
    status, requests, _ = await knock("/v1/x", "POST", headers)
    assert (status, len(requests)) == (200, 1)


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site", "origin": "https://evil.example", "host": "localhost:8080"},
        {"sec-fetch-site": "cross-site", "host": "localhost:8080"},
        {"sec-fetch-site": "same-site", "origin": "https://evil.chat.example", "host": "chat.example"},
        {"origin": "https://evil.example", "host": "localhost:8080"},
        {"origin": "null", "host": "localhost:8080"},
        {"origin": "https://[bad", "host": "localhost:8080"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE", "PUT"])
async def test_a_foreign_page_may_not_write(headers, method):
    status, requests, problem = await knock("/v1/x", method, headers)
    assert (status, requests, problem["code"]) == (403, [], "not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1:9", "[::1]:8080", "192.168.1.7", "a.localhost"]
)
async def test_local_names_and_addresses_are_answered_without_authentication(host):
    status, _, _ = await knock("/v1/me", headers={"host": host}, only_local_names=True)
    assert status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "[bad"])
async def test_a_foreign_name_that_leads_here_is_refused_without_authentication(host):
    status, requests, problem = await knock("/v1/me", headers={"host": host}, only_local_names=True)
    assert (status, requests, problem["code"]) == (403, [], "not_allowed")


async def test_a_body_must_be_declared_as_json_since_other_types_need_no_leave_from_a_browser():
    status, requests, problem = await knock("/v1/x", "POST", {"content-type": "text/plain", "content-length": "2"})
    assert (status, requests, problem["code"]) == (415, [], "unsupported_media_type")
    status, _, _ = await knock(
        "/v1/x", "POST", {"content-type": "application/json; charset=utf-8", "content-length": "2"}
    )
    assert status == 200


async def test_a_stream_is_read_with_get_only():
    status, _, problem = await knock("/v1/responses/r/stream", "POST")
    assert (status, problem["code"]) == (405, "method_not_allowed")
