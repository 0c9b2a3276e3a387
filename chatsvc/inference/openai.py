"""Any server that speaks OpenAI's chat completions: vLLM elsewhere, a gateway, a hosted model.

    openai:http://gpu-box:8000/v1#qwen3-8b
    openai:https://api.example.com/v1?window=128000#big-model

The far side renders and tokenizes. So prompt sizes are estimates on the safe side until it has said what it counted,
and the one way to abort is the protocol's: hanging up. The key comes from ``CHATSVC_OPENAI_API_KEY`` and
is never logged.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec

from chatsvc.conversation import Role
from chatsvc.errors import ChatError, EngineFailed, EngineRefused, EngineUnavailable
from chatsvc.inference.base import Engine, EngineHealth, EngineLimits, EngineLoad, Progress, ServerAway, room
from chatsvc.inference.openai_stream import Completion, estimate_tokens, event_data
from chatsvc.inference.slots import Slots
from chatsvc.logs import mask_secrets
from chatsvc.prompt import ChatMessage, Chunk, Prompt, Sampling

_DEFAULT_WINDOW: Final = 8192
_CONNECT_S: Final = 5.0
_HEALTH_S: Final = 1.5
_MOST_STOPS: Final = 4
"""More stop strings are refused by the protocol. ``Completion`` looks for all of them."""
_MESSAGE_TOKENS: Final = 8
"""A template's own tokens around a message, on the safe side."""
_RETRY_AFTER_MOST_S: Final = 600.0


class OpenAIOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The query of an ``openai:`` URL."""

    window: Annotated[int, msgspec.Meta(ge=16, le=100_000_000)] | None = None
    """Context window in tokens; default: what the server says as ``max_model_len``, else 8,192."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 64
    """Replies asked for at the same time; others wait here, by priority, then in order."""
    idle_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 120.0
    """A server that sends nothing for so long, before the first token or after, is given up."""


class OpenAIEngine(Engine):
    """See the module's docstring. ``model`` is the name served here, ``remote_model`` the one over there.

    ``remote_model`` None: the first that the server lists.
    """

    def __init__(
        self, options: OpenAIOptions, *, model: str, base_url: str, remote_model: str | None, api_key: str | None
    ) -> None:
        self._options = options
        self._model = model
        self._remote_model = remote_model
        self._base_url = base_url.rstrip("/")
        self._shown = _without_user(self._base_url)
        """For what people read: faults are told to everybody who asks ``/readyz``."""
        self._api_key = api_key
        self._slots = Slots(options.slots)
        self._client: httpx.AsyncClient | None = None
        self._limits: EngineLimits | None = None

    async def start(self, progress: Progress) -> None:
        progress(f"{self._model}: asking {self._shown}")
        self._limits = self._limits_with(None)
        headers = {"accept-encoding": "identity"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(self._options.idle_s, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self._options.slots),
        )
        try:
            served = await self._served_models(_CONNECT_S)
        except ChatError:
            await self.aclose()
            raise
        if self._remote_model is None and served:
            self._remote_model = next(iter(served))
        if self._remote_model not in served and (served or self._remote_model is None):
            await self.aclose()
            raise EngineUnavailable(
                f"{self._shown} serves {', '.join(served) or 'no model that it names'}, not '{self._remote_model}'."
                " Name one after '#' in the engine URL."
            )
        self._limits = self._limits_with(served.get(self._remote_model or "", {}).get("max_model_len"))

    def _limits_with(self, window: object) -> EngineLimits:
        """``window``: what the server says of it, if anything."""
        usable = self._options.window or (window if isinstance(window, int) else _DEFAULT_WINDOW)
        return EngineLimits(model=self._model, window=usable, slots=self._options.slots)

    @property
    def limits(self) -> EngineLimits:
        if self._limits is None:
            raise EngineUnavailable(f"The model {self._model} is not started.")
        return self._limits

    async def render(self, messages: Sequence[ChatMessage]) -> Prompt:
        kept = tuple(messages)
        tokens = _MESSAGE_TOKENS + sum(_MESSAGE_TOKENS + estimate_tokens(message.content) for message in kept)
        return Prompt(messages=kept, token_ids=(), tokens=tokens)

    async def encode(self, text: str) -> Sequence[int]:
        return range(estimate_tokens(text))

    async def generate(
        self, prompt: Prompt, sampling: Sampling, run_id: str, priority: int = 0
    ) -> AsyncGenerator[Chunk, None]:
        body = self._request(prompt, sampling, room(prompt, sampling, self.limits))
        async with self._slots.hold(priority):
            client = self._ready_client()
            completion = Completion(sampling.stop)
            try:
                async with client.stream(
                    "POST", f"{self._base_url}/chat/completions", json=body, headers={"x-request-id": run_id}
                ) as response:
                    if response.status_code != httpx.codes.OK:
                        raise self._refusal(response)
                    async with aclosing(event_data(response.aiter_bytes())) as events:
                        async for data in events:
                            for chunk in completion.feed(data):
                                yield chunk
                                if chunk.finish_reason:
                                    return
                for chunk in completion.close():
                    yield chunk
            except httpx.HTTPError as error:
                raise self._lost(error, any_said=completion.output_tokens > 0) from error

    def load(self) -> EngineLoad:
        return EngineLoad(running=self._slots.held, waiting=self._slots.waiting)

    async def health(self) -> EngineHealth:
        try:
            await self._served_models(_HEALTH_S)
        except ChatError as error:  # a redirect, say, is no refusal of a prompt here
            return EngineHealth(ready=False, reason=error.detail)
        return EngineHealth(ready=True)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        self._slots.close(f"The model {self._model} was closed.")
        if client is not None:
            await client.aclose()

    def _request(self, prompt: Prompt, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._remote_model,
            "messages": [{"role": message.role.value, "content": message.content} for message in prompt.messages],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.messages and prompt.messages[-1].role is Role.ASSISTANT:
            # As vLLM and SGLang name it. Servers without these words either go on by themselves or refuse plainly.
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if sampling.stop:
            body["stop"] = list(sampling.stop[:_MOST_STOPS])
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    async def _served_models(self, timeout_s: float) -> Mapping[str, Mapping[str, Any]]:
        """What the server says it serves, by name; empty where it keeps no such list."""
        try:
            response = await self._ready_client().get(f"{self._base_url}/models", timeout=timeout_s)
        except httpx.HTTPError as error:
            raise self._lost(error, any_said=False) from error
        if response.status_code == httpx.codes.NOT_FOUND:
            return {}
        if response.status_code != httpx.codes.OK:
            raise self._refusal(response)
        try:
            listed = response.json()["data"]
            return {entry["id"]: entry for entry in listed}
        except (ValueError, KeyError, TypeError) as error:
            raise EngineUnavailable(f"{self._shown}/models answers something else than a list of models.") from error

    def _ready_client(self) -> httpx.AsyncClient:
        if self._client is None:
            raise EngineUnavailable(f"The model {self._model} is not running.")
        return self._client

    def _refusal(self, response: httpx.Response) -> ChatError:
        """A status other than 200. The body is left out: it may repeat the user's text."""
        status = response.status_code
        if status in _REFUSALS:
            return EngineUnavailable(f"The server of {self._model} answers {status}: {_REFUSALS[status]}.")
        if status >= httpx.codes.INTERNAL_SERVER_ERROR or status == httpx.codes.TOO_MANY_REQUESTS:
            wait = response.headers.get("retry-after", "")
            seconds = min(float(wait), _RETRY_AFTER_MOST_S) if wait.isdecimal() else 2.0
            return ServerAway(f"The server of {self._model} answers {status}.", retry_after=seconds)
        return EngineRefused(f"The server of {self._model} refuses this request with {status}.")

    def _lost(self, error: httpx.HTTPError, *, any_said: bool) -> ChatError:
        what = type(error).__name__
        if any_said:
            return EngineFailed(f"The connection to the server of {self._model} broke ({what}).")
        return ServerAway(f"The server of {self._model} at {self._shown} cannot be reached ({what}).")


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return mask_secrets(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])))


_REFUSALS: Final = {
    401: "it wants another key; set CHATSVC_OPENAI_API_KEY",
    403: "the key of CHATSVC_OPENAI_API_KEY may not do this",
    404: "it does not serve this model, or its base URL is another",
}
