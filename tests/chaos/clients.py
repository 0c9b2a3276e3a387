"""Users with one or two devices each, who do what users do, by the rules that a client has to follow.

A POST that fails for a passing reason is sent again with the same ``client_msg_id``, through any replica. How a device
reads is in ``device``.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from chaos.device import Device, follow
from chaos.history import TERMINAL, History, Reading, Reply, Stop, now
from chaos.servers import MODELS, Servers

TURNS = 6
CALL_S = 6.0
"""A call that is not answered for so long is made again, elsewhere."""
GIVE_UP_S = 120.0
PASSING = frozenset({"store_unavailable", "log_unavailable", "engine_unavailable", "draining", "conversation_busy"})
WEIGHTS = {"quick": 44, "plain": 26, "steady": 13, "slow": 9, "pensive": 8}
TIERS = ("free", "plus", "pro")
SUBJECTS = (
    "a story",
    "the sea 🌊",
    "日本の歴史",
    "how to bake bread",
    "why\nlines break",
    "e\u0301t\u00e9",
    "nothing at all",
)


class Gone(Exception):
    """Nothing more is to be had of this conversation: its user has deleted it, or a call was refused for good."""


@dataclass
class Talk:
    """A conversation as its user sees it."""

    id: str
    turns: int = 0
    last: Reply | None = None
    parents: list[str | None] = field(default_factory=list)
    gone: bool = False


class Caller:
    """Calls through any replica, again and again while the reason to fail is a passing one."""

    def __init__(self, servers: Servers, history: History, http: httpx.AsyncClient, draw: random.Random) -> None:
        self.servers = servers
        self.history = history
        self.http = http
        self.draw = draw
        self.why = ""
        self.user_id = f"user-{uuid.UUID(int=draw.getrandbits(128)).hex}"
        self.headers = {"x-forwarded-user": self.user_id, "x-forwarded-tier": draw.choice(TIERS)}

    def address(self) -> str:
        """Any replica, through its proxy."""
        return f"http://127.0.0.1:{self.draw.choice(self.servers.replicas).proxy.port}"

    async def once(self, method: str, path: str, body: Any = None) -> httpx.Response | None:
        """One try; None when it failed for a passing reason, which ``why`` then names. Raises ``Gone``."""
        try:
            answer = await self.http.request(method, self.address() + path, json=body, headers=self.headers)
        except httpx.TransportError as error:
            self.why = type(error).__name__
            return None
        if answer.is_success or answer.status_code == httpx.codes.NOT_FOUND:
            return answer
        problem = answer.json() if "json" in answer.headers.get("content-type", "") else {}
        if problem.get("retryable") and problem.get("code") in PASSING:
            self.why = problem["code"]
            return None
        self.history.surprises.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        raise Gone

    async def call(self, method: str, path: str, body: Any = None, *, count: bool = False) -> httpx.Response:
        """Until there is an answer. Raises ``TimeoutError``."""
        async with asyncio.timeout(GIVE_UP_S):
            while (answer := await self.once(method, path, body)) is None:
                if count:
                    self.history.post_retries[self.why] += 1
                await asyncio.sleep(self.draw.uniform(0.05, 0.6))
        return answer


class User(Caller):
    """One person. ``run`` takes turns until ``closing`` is set."""

    def __init__(self, servers: Servers, history: History, http: httpx.AsyncClient, draw: random.Random) -> None:
        super().__init__(servers, history, http, draw)
        self._talk: Talk | None = None

    async def run(self, closing: asyncio.Event) -> None:
        """Take turns."""
        while not closing.is_set():
            try:
                await self.turn()
            except* Gone:
                self._talk = None
            except* TimeoutError:
                self.history.surprises.append(f"a call of {self.user_id} was not answered for {GIVE_UP_S:g} s")
                self._talk = None
            await asyncio.sleep(self.draw.uniform(0, 0.3))

    async def turn(self) -> None:
        """One message, or one answer more, and everything that is done with its reply."""
        talk = self._talk
        if talk is None or talk.gone or talk.turns >= TURNS:
            body = {"system_prompt": "Be brief."} if self.draw.random() < 0.3 else {}
            talk = self._talk = Talk((await self.call("POST", "/v1/conversations", body)).json()["id"])
        reply = await self.ask(talk)
        talk.turns += 1
        talk.last = reply
        await self.live_with(talk, reply)

    # Starting a reply -----------------------------------------------------------------------------------------------

    async def ask(self, talk: Talk) -> Reply:
        """A message; or an edit of the last one; or a new answer to it; or the rest of what broke off."""
        draw, last = self.draw, talk.last
        model = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        body: dict[str, Any] = {"client_msg_id": uuid.UUID(int=draw.getrandbits(128)).hex, "model": model}
        if draw.random() < 0.08:
            body["max_tokens"] = draw.randrange(3, 30)
        broken = last is not None and any(
            event.name == "error" or event.data.get("finish_reason") in {"stopped", "length"}
            for reading in last.readings
            if (event := reading.end)
        )
        if last is not None and broken and draw.random() < 0.5:
            path = f"/v1/messages/{last.message_id}/responses"
            # Only the model that began a reply says its rest.
            body |= {"continue": True, "model": last.model}
        elif last is not None and draw.random() < 0.12:
            path = f"/v1/messages/{last.user_message_id}/responses"
        else:
            path = f"/v1/conversations/{talk.id}/messages"
            # Some say the same as others do: equal prompts give equal replies.
            body["content"] = f"Tell me about {draw.choice(SUBJECTS)}, number {draw.randrange(40)}."
            if talk.parents and draw.random() < 0.06:
                body["parent_id"] = talk.parents[-1]
            else:
                talk.parents.append(last.message_id if last else None)
        return await self.post(talk, path, body)

    async def post(self, talk: Talk, path: str, body: dict[str, Any]) -> Reply:
        """Send it, some of it twice at the same time, and again until there is a 202."""
        posted = now()
        answers: list[httpx.Response] = []
        if self.draw.random() < 0.15:
            self.history.post_duplicates += 1
            both = await asyncio.gather(*(self.once("POST", path, body) for _ in range(2)))
            answers = [answer for answer in both if answer is not None]
        if not answers or self.draw.random() < 0.05:
            answers.append(await self.call("POST", path, body, count=True))
        if any(answer.status_code == httpx.codes.NOT_FOUND for answer in answers):
            if not talk.gone:
                self.history.surprises.append(f"POST {path}: 404 though nobody deleted it")
            raise Gone
        accepted = answers[0].json()
        reply = Reply(
            response_id=accepted["response_id"],
            message_id=accepted["message_id"],
            user_message_id=accepted["user_message_id"],
            conversation_id=talk.id,
            user_id=self.user_id,
            client_msg_id=body["client_msg_id"],
            model=body["model"],
            content=body.get("content"),
            posted=posted,
            max_tokens=body.get("max_tokens"),
            answers=[answer.json()["response_id"] for answer in answers],
        )
        self.history.replies[reply.response_id] = reply
        return reply

    # Living with it -------------------------------------------------------------------------------------------------

    async def live_with(self, talk: Talk, reply: Reply) -> None:
        """Read it on one device or two, and now and then stop it, delete it, or read it once more afterwards."""
        draw = self.draw
        async with asyncio.TaskGroup() as doings:
            doings.create_task(self.read(reply, "laptop"))
            if draw.random() < 0.3:
                doings.create_task(self.read(reply, "phone", after_s=draw.expovariate(0.6)))
            if draw.random() < 0.15:
                doings.create_task(self.stop(reply, draw.expovariate(0.5)))
            elif draw.random() < 0.06:
                doings.create_task(self.stop_at_the_end(reply))
            elif draw.random() < 0.02:
                doings.create_task(self.delete(talk, reply, draw.expovariate(0.7)))
        if not reply.deleted and draw.random() < 0.25:
            await self.read(reply, "tablet")

    async def read(self, reply: Reply, device: str, after_s: float = 0.0) -> None:
        """On one device, to the end."""
        await asyncio.sleep(after_s)
        await follow(Device(self, device), reply)

    async def stop(self, reply: Reply, after_s: float) -> None:
        """Press stop at some moment, whatever has become of the reply."""
        await asyncio.sleep(after_s)
        asked = now()
        answer = await self.call("POST", f"/v1/responses/{reply.response_id}/stop")
        if answer.is_success:
            reply.stops.append(Stop(asked, now(), answer.json()["status"]))
        elif not reply.deleted:
            self.history.surprises.append(f"stop of {reply.response_id}: 404 though nobody deleted it")

    async def stop_at_the_end(self, reply: Reply) -> None:
        """Press stop when the last token is due, give or take 5 ms, by what the first device sees."""
        engine = MODELS[reply.model]
        most = engine["tokens"] if reply.max_tokens is None else min(reply.max_tokens, engine["tokens"])

        def first_text(readings: list[Reading]) -> float | None:
            for reading in readings:
                for event in reading.events:
                    if event.name == "delta" or event.name in TERMINAL:
                        return event.at
            return None

        async with asyncio.timeout(GIVE_UP_S):
            while (began := first_text(reply.readings)) is None:
                await asyncio.sleep(0.01)
        due = began + (most - 1) / engine["tokens_per_s"]
        await self.stop(reply, max(0.0, due + self.draw.uniform(-0.005, 0.005) - now()))

    async def delete(self, talk: Talk, reply: Reply, after_s: float) -> None:
        """Delete the conversation under the running reply."""
        await asyncio.sleep(after_s)
        talk.gone = reply.deleted = True
        for other in self.history.replies.values():
            if other.conversation_id == talk.id:
                other.deleted = True
        await self.call("DELETE", f"/v1/conversations/{talk.id}")
        self.history.deleted_conversations[talk.id] = now()
