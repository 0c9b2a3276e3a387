"""Any status but 200 kills a native EventSource for good: what passes by itself is never said by one."""

from types import SimpleNamespace

import pytest

from chatsvc.api.auth import NoAuth
from chatsvc.api.stream import ResponseStream
from chatsvc.api.stream_token import StreamTokens
from chatsvc.clock import SystemClock
from chatsvc.errors import NotFound, StoreUnavailable
from chatsvc.ids import new_response_id
from chatsvc.run import RunStatus

RUN = SimpleNamespace(status=RunStatus.STREAMING, last_seq=0, user_id="local")


class Runs:
    """Answers every question alike."""

    def __init__(self, answer):
        self.answer = answer

    async def get(self, *_):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    find = get


async def answer_of(run, *, full=False, token=False, active=None, cursor=None):
    """Status, headers and body of a stream's answer. ``active``: the run, where this process works on it."""
    response_id = new_response_id("local")
    tokens = StreamTokens(b"key", SystemClock(), ttl_s=60, base_path="/")
    route = ResponseStream(
        store=SimpleNamespace(runs=Runs(run)),
        streams=SimpleNamespace(full=full),
        scheduler=SimpleNamespace(active=lambda response_id: active),
        authenticator=NoAuth(),
        tokens=tokens,
    )
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        raise AssertionError("nothing is to be received")

    headers = [] if cursor is None else [(b"last-event-id", str(cursor).encode())]
    query = f"token={tokens.token(response_id)}" if token else ""
    scope = {"type": "http", "query_string": query.encode(), "headers": headers, "client": ("127.0.0.1", 1)}
    await route(response_id, scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(part["body"] for part in sent[1:])


@pytest.mark.parametrize("token", [False, True], ids=["by identity", "by token"])
@pytest.mark.parametrize(
    ("run", "full"),
    [(StoreUnavailable("away"), False), (RUN, True)],
    ids=["postgres away", "too many streams"],
)
async def test_what_is_temporary_answers_200_and_asks_an_event_source_to_come_again(run, full, token):
    status, headers, body = await answer_of(run, full=full, token=token)
    assert (status, headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    # No event, so the cursor of the client stays as it is.
    assert body.startswith(b"retry: ")
    assert body.count(b"\n") == 1


async def test_what_is_permanent_is_a_refusal():
    with pytest.raises(NotFound):
        await answer_of(NotFound("gone"))


@pytest.mark.parametrize("token", [False, True], ids=["by identity", "by token"])
@pytest.mark.parametrize(
    ("last_seq", "cursor", "status"), [(7, 7, 204), (7, 99, 204), (7, 6, 200), (7, None, 200), (None, 7, 200)]
)
async def test_who_is_back_before_the_worker_is_done_with_a_reply_whose_end_was_seen_is_told_so(
    last_seq, cursor, status, token
):
    """An event source that got an empty stream there would come again and again, and wait for a while each time."""
    active = SimpleNamespace(run=RUN, last_seq=last_seq)
    assert (await answer_of(RUN, full=True, token=token, active=active, cursor=cursor))[0] == status
