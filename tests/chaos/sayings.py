"""What the scripted engines say to the prompts as they are stored, asked of engines of our own."""

from __future__ import annotations

import msgspec

from chaos.history import History, Saying
from chaos.servers import MODELS
from chatsvc.context.budget import reply_limit
from chatsvc.conversation import Message, Role
from chatsvc.inference.base import Engine
from chatsvc.inference.scripted import ScriptedEngine, ScriptedOptions
from chatsvc.prompt import ChatMessage, Sampling


async def say_all(history: History) -> dict[str, Saying]:
    """By response id. The branch above a reply had ended when it began, so it is what the prompt was made from."""
    engines = {name: await _engine(name) for name in MODELS}
    evidence = history.evidence
    said: dict[tuple[str, str | None, str, int | None], Saying] = {}
    found = {}
    for response_id, run in evidence.runs.items():
        key = (run["user_message_id"], run["continues_message_id"], run["model"], run["max_tokens"])
        if key not in said:
            branch = _branch(evidence.messages, run["user_message_id"])
            system_prompt = evidence.conversations[run["conversation_id"]]["system_prompt"]
            continued = evidence.messages.get(run["continues_message_id"] or "")
            kept = continued["content"] if continued else ""
            shown = (*branch, _message(continued)) if continued and kept else branch
            said[key] = await _say(engines[run["model"]], system_prompt, shown, kept, run["max_tokens"])
        found[response_id] = said[key]
    return found


async def _engine(name: str) -> Engine:
    told = {key: value for key, value in MODELS[name].items() if key == "tokens"}
    engine = ScriptedEngine(ScriptedOptions(**told), model=name)
    await engine.start(lambda line: None)
    return engine


async def _say(
    engine: Engine, system_prompt: str | None, shown: tuple[Message, ...], kept: str, max_tokens: int | None
) -> Saying:
    # Put together here and not by what is being checked: these conversations are too short to be folded.
    system = [ChatMessage(Role.SYSTEM, system_prompt)] if system_prompt else []
    prompt = await engine.render([*system, *(ChatMessage(message.role, message.content) for message in shown)])
    limit = reply_limit(prompt_tokens=prompt.tokens, window=engine.limits.window, requested=max_tokens)
    text, tokens, finish_reason = "", 0, ""
    async for chunk in engine.generate(prompt, Sampling(max_tokens=limit), "checked"):
        text += chunk.text
        tokens += chunk.output_tokens
        finish_reason = chunk.finish_reason or ""
    return Saying(kept, text, tokens, finish_reason)


def _branch(messages: dict[str, dict[str, object]], leaf: str) -> tuple[Message, ...]:
    path = []
    at: object = leaf
    while at is not None:
        row = messages[str(at)]
        path.append(_message(row))
        at = row["parent_id"]
    return tuple(reversed(path))


def _message(row: dict[str, object]) -> Message:
    return msgspec.convert({name: row[name] for name in Message.__struct_fields__ if name in row}, Message)
