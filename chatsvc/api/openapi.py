"""The API's own description: what the framework derives, plus what it cannot see:

the stream and the shape of errors.
"""

from __future__ import annotations

from typing import Final

from litestar import Litestar
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    Example,
    License,
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    PathItem,
    Reference,
    Schema,
    Server,
)

from chatsvc import __version__
from chatsvc.api.openapi_examples import ANSWERS

STREAM_PATH: Final = "/v1/responses/{response_id}/stream"

_OF_BUDGETS: Final = ("sendMessage", "answerAgain")
"""The calls that take a message, and tell in headers what is left for others."""
_BUDGET_HEADERS: Final = {
    "x-ratelimit-limit-requests": "Replies that may be open at once.",
    "x-ratelimit-remaining-requests": "How many more may be opened now.",
    "x-ratelimit-limit-tokens": "The budget, in units of service; absent where there is none.",
    "x-ratelimit-remaining-tokens": "What is left of the budget.",
    "x-ratelimit-reset-tokens": "Time until more of it is free again, such as `1h2m3s`.",
}
_STREAM_EXAMPLE: Final = (
    "retry: 1873\n\n"
    'id: 1\nevent: start\ndata: {"response_id":"resp_local_0199…","message_id":"msg_0199…",'
    '"model":"SmolLM2-135M-Instruct","created_at":"2026-01-01T12:00:00Z","served_model":"SmolLM2-135M-Instruct",'
    '"degraded":[]}\n\n'
    'id: 2\nevent: context\ndata: {"condensed":false,"summary_through":null,"retrieved":[],"prompt_tokens":37,'
    '"cached_tokens":0,"window":8192,"left_out":0,"parts":{"system":0,"memory":0,"summary":0,"pinned":0,'
    '"verbatim":0,"recalled":0,"question":37}}\n\n'
    'id: 3\nevent: delta\ndata: {"text":"The capital"}\n\n'
    'id: 4\nevent: delta\ndata: {"text":" of France is Paris."}\n\n'
    'id: 5\nevent: done\ndata: {"message_id":"msg_0199…","finish_reason":"stop",'
    '"usage":{"prompt_tokens":37,"cached_tokens":0,"output_tokens":8}}\n\n'
)
_STREAM_DESCRIPTION: Final = """\
Server-sent events of one reply, from the beginning or after a cursor. Reconnect as often as you like: give the last
`id` you saw as `Last-Event-ID` (an `EventSource` does) or `last_event_id`, and the rest follows without a gap or a
repeat.

| event | data |
|---|---|
| `queued` (no id) | `{position, eta_s, tier}` |
| `start` | `{response_id, message_id, model, created_at, served_model, degraded}` |
| `context` | `{condensed, summary_through, retrieved, prompt_tokens, cached_tokens, window, left_out, parts}` |
| `delta` | `{text}`: append it |
| `snapshot` | `{text, reason}`: replace what you show, go on from this id |
| `done` | `{message_id, finish_reason, usage, error_code}`; the last event; a code only where the service stopped it |
| `error` | `{code, message, retryable}`; the last event |

A cursor at or past the end is answered with 204, which stops an `EventSource`. Drop events whose id is not above the
last one you saw, except `snapshot`.
"""


def openapi_config() -> OpenAPIConfig:
    """The description's head; served as JSON at ``/schema``, without any page that would load code from elsewhere."""
    return OpenAPIConfig(
        title="chatsvc",
        version=__version__,
        description="A chat service whose replies outlive connections. Errors are RFC 9457 problem documents.",
        license=License(name="Apache-2.0", identifier="Apache-2.0"),
        path="/schema",
        render_plugins=[JsonRenderPlugin(path=["/", "/openapi.json"])],
        use_handler_docstrings=True,
    )


def complete(app: Litestar, base_path: str) -> None:
    """Add the stream, the error answers and the base path to the derived description."""
    schema = app.openapi_schema
    schema.servers = [Server(url=base_path.rstrip("/") or "/")]
    paths = schema.paths = schema.paths or {}
    problem = OpenAPIResponse(
        description="What went wrong (RFC 9457), whether to try again, and when.",
        content={"application/problem+json": OpenAPIMediaType(schema=_problem_schema())},
    )
    for item in paths.values():
        for operation in (item.get, item.post, item.put, item.patch, item.delete):
            if operation is not None:
                operation.responses = {**(operation.responses or {}), "default": problem}
                operation.responses.pop("400", None)
                _show_answer(operation)
    paths[STREAM_PATH] = PathItem(get=_stream_operation(problem))


def _budget_headers() -> dict[str, OpenAPIHeader | Reference]:
    text = Schema(type=OpenAPIType.STRING)
    return {name: OpenAPIHeader(schema=text, description=said) for name, said in _BUDGET_HEADERS.items()}


def _show_answer(operation: Operation) -> None:
    for status, answer in (operation.responses or {}).items():
        if not status.startswith("2") or not isinstance(answer, OpenAPIResponse):
            continue
        if operation.operation_id in ANSWERS:
            for media_type in (answer.content or {}).values():
                media_type.example = ANSWERS[operation.operation_id]
        if operation.operation_id in _OF_BUDGETS:
            answer.headers = {**(answer.headers or {}), **_budget_headers()}


def _stream_operation(problem: OpenAPIResponse) -> Operation:
    text = Schema(type=OpenAPIType.STRING)
    digits = Schema(type=OpenAPIType.STRING, pattern="^[0-9]*$", examples=["4"])
    return Operation(
        operation_id="streamResponse",
        tags=["responses"],
        summary="Stream a reply",
        description=_STREAM_DESCRIPTION,
        parameters=[
            Parameter(name="response_id", param_in="path", required=True, schema=text),
            Parameter(
                name="Last-Event-ID", param_in="header", schema=digits, description="Cursor; wins over the query."
            ),
            Parameter(name="last_event_id", param_in="query", schema=digits, description="Cursor."),
            Parameter(
                name="token", param_in="query", schema=text, description="From `stream_url`; stands in for identity."
            ),
        ],
        responses={
            "200": OpenAPIResponse(
                description="The events.",
                content={
                    "text/event-stream": OpenAPIMediaType(
                        schema=text, examples={"a short reply": Example(value=_STREAM_EXAMPLE)}
                    )
                },
            ),
            "204": OpenAPIResponse(description="The cursor is at or past the end: there is nothing more."),
            "default": problem,
        },
    )


def _problem_schema() -> Schema:
    string = Schema(type=OpenAPIType.STRING)
    return Schema(
        title="Problem",
        type=OpenAPIType.OBJECT,
        required=["type", "title", "status", "detail", "code", "retryable"],
        properties={
            "type": string,
            "title": string,
            "status": Schema(type=OpenAPIType.INTEGER),
            "detail": string,
            "code": string,
            "retryable": Schema(type=OpenAPIType.BOOLEAN),
            "retry_after": Schema(type=OpenAPIType.NUMBER, description="Seconds."),
            "field": Schema(type=OpenAPIType.STRING, description="The part of the request that is to blame."),
        },
        examples=[
            {
                "type": "urn:chatsvc:problem:conversation_busy",
                "title": "A reply is still running on this branch",
                "status": 409,
                "detail": "Wait for its end, or stop it.",
                "code": "conversation_busy",
                "retryable": True,
                "response_id": "resp_local_0199c1a2b3c4d5e6f708192a3b4c5d6e",
            }
        ],
        additional_properties=True,
    )
