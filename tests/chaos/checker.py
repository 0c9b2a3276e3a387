"""The laws, asked of a history. One function a law; each yields what breaks it.

A double fault is judged by what was promised for it: text that was shown may be lost only where a worker and the log
died together, and then no more of it than a checkpoint's interval brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chaos.history import TERMINAL, History, Reading, Reply
from chaos.servers import MODELS

ENDED = frozenset({"complete", "stopped", "failed"})
CRASHES = ("kill", "freeze", "roll")
CHECKPOINT_S = 10 + 3
"""A checkpoint is written every ten seconds, looked for every second, and takes its time."""
TOKEN_CHARS = 12
STOP_S = 5.0
CALL_S = 6.0
LEAP = 1_000_000


@dataclass(frozen=True)
class Violation:
    """``kind`` is what the report counts; ``subject`` the reply."""

    kind: str
    subject: str
    what: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.subject} {self.what}".replace("  ", " ")


Law = Callable[[History, Reply], Iterator[tuple[str, str]]]


def check(history: History) -> list[Violation]:
    """Everything that breaks a law, in no particular order."""
    found = [Violation("surprise", "", what) for what in history.surprises]
    for reply in history.replies.values():
        laws = LAWS_OF_THE_DELETED if reply.deleted else LAWS
        found += [Violation(kind, reply.response_id, what) for law in laws for kind, what in law(history, reply)]
    return found


# L2, L3, L7 ----------------------------------------------------------------------------------------------------------


def no_gap_and_no_repeat(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """Behind the cursor that was sent come its successors, one by one; only a snapshot jumps."""
    for reading in all_readings(history, reply):
        cursor, connection, ended = 0, -1, False
        for event in reading.events:
            if event.connection != connection:
                connection = event.connection
                cursor = reading.connections[connection].cursor
            if ended:
                yield "ends", f"{reading.device}: {event.name} {event.id} came after the end"
            ended = ended or event.name in TERMINAL
            if event.id is None:
                if event.name != "queued":
                    yield "repeated", f"{reading.device}: {event.name} came without an id"
                continue
            if event.name != "snapshot" and event.id <= cursor:
                yield "repeated", f"{reading.device}: {event.name} {event.id} came again behind {cursor}"
            elif event.name != "snapshot" and event.id != cursor + 1:
                yield "lost", f"{reading.device}: {event.name} {event.id} came behind {cursor}"
            cursor = event.id


def all_see_the_same_events(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """One number, one event, whoever reads and whenever."""
    known: dict[int, tuple[str, Any]] = {}
    told = [(event.id, event.name, event.data) for one in all_readings(history, reply) for event in one.events]
    told += [(entry.seq, entry.event, entry.data) for entry in history.evidence.logs.get(reply.response_id, ())]
    for number, name, data in told:
        if number is None or name == "snapshot":
            continue
        if known.setdefault(number, (name, data)) != (name, data):
            yield "mismatch", f"event {number} is {known[number]} for one and {(name, data)} for another"


def the_text_is_the_stored_text(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """Byte for byte, for every device that has seen the end."""
    run = history.evidence.runs.get(reply.response_id)
    if run is None:
        return
    for reading in all_readings(history, reply):
        if reading.end is not None and reading.text != run["content"]:
            yield "mismatch", f"{reading.device} shows {_ends(reading.text)}, stored is {_ends(run['content'])}"


# L5 ------------------------------------------------------------------------------------------------------------------


def one_end(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """The store, the API, the log and every device tell the same one."""
    evidence = history.evidence
    run = evidence.runs.get(reply.response_id)
    if run is None:
        yield "lost", "it got its 202 and is not in the store"
        return
    if run["status"] not in ENDED:
        yield "stuck", f"still {run['status']}, attempt {run['attempt']}"
        return
    if evidence.states.get(reply.response_id) != run["status"]:
        yield "stuck", f"the API says {evidence.states.get(reply.response_id)}, the store {run['status']}"
    due = end_of(run)
    for reading in all_readings(history, reply):
        if reading.gave_up:
            yield "stuck", f"{reading.device}: {reading.gave_up}; stored is {due} at {run['last_seq']}"
        elif reading.end is None and not reading.left:
            yield "stuck", f"{reading.device} saw no end"
        for event in reading.events:
            if event.name in TERMINAL and (event.name, told(event.data)) != due:
                yield "ends", f"{reading.device} saw {(event.name, told(event.data))}, stored is {due}"


def end_of(run: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """What the terminal event of such a run says."""
    if run["status"] == "failed":
        return "error", (run["error_code"],)
    usage = tuple(run[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens"))
    return "done", (run["message_id"], run["finish_reason"], *usage)


def told(data: dict[str, Any]) -> tuple[Any, ...]:
    """The same of an event's data."""
    if "code" in data:
        return (data["code"],)
    usage = tuple(data["usage"][name] for name in ("prompt_tokens", "cached_tokens", "output_tokens"))
    return (data["message_id"], data["finish_reason"], *usage)


# L6 ------------------------------------------------------------------------------------------------------------------


def the_engine_said_it_once(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """What is stored is what this engine says to this prompt: whole when complete, else its beginning."""
    run, saying = history.evidence.runs.get(reply.response_id), history.evidence.sayings.get(reply.response_id)
    if run is None or saying is None or run["status"] not in ENDED:
        return
    whole = saying.kept + saying.rest
    if run["status"] == "complete":
        if run["content"] != whole:
            yield "mismatch", f"stored is {_ends(run['content'])}, the engine says {_ends(whole)}"
        if (run["finish_reason"], run["output_tokens"]) != (saying.finish_reason, saying.tokens):
            yield (
                "mismatch",
                (
                    f"stored are {run['finish_reason']} and {run['output_tokens']} tokens, "
                    f"the engine says {saying.finish_reason} and {saying.tokens}"
                ),
            )
    elif not whole.startswith(run["content"]) or not run["content"].startswith(saying.kept):
        yield "mismatch", f"stored is {_ends(run['content'])}, which the engine never says: {_ends(whole)}"


def what_was_shown_is_kept(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """A screen only ever grows, and what it showed is stored; nothing is sampled again behind the user's back."""
    run = history.evidence.runs.get(reply.response_id)
    if run is None or run["status"] not in ENDED:
        return
    lost = [loss for reading in reply.readings for loss in _losses(reading, run["content"])]
    if not lost:
        return
    worst = max(lost, key=len)
    if not (may_have_crashed(history, reply) and history.overlaps(reply.posted, reply.over, "redis")):
        yield "kept", f"{_ends(worst)} had been shown and is gone; {run['status']}, {run['error_code']}"
    elif run["status"] == "complete":
        yield "kept", f"{_ends(worst)} had been shown, was taken back, and was said again"
    elif not history.overlaps(reply.posted, reply.over, "postgres"):
        most = CHECKPOINT_S * MODELS[reply.model]["tokens_per_s"] * TOKEN_CHARS
        if len(worst) > most:
            yield "kept", f"{len(worst)} characters that had been shown are gone, more than a checkpoint's interval has"


def _losses(reading: Reading, stored: str) -> Iterator[str]:
    shown = ""
    for event in reading.events:
        if event.name == "delta":
            shown += event.data["text"]
        elif event.name == "snapshot":
            if not event.data["text"].startswith(shown):
                yield shown[len(_common(shown, event.data["text"])) :]
            shown = event.data["text"]
    if not stored.startswith(shown):
        yield shown[len(_common(shown, stored)) :]


def _common(one: str, other: str) -> str:
    length = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: min(len(one), len(other)) if length is None else length]


# L8, L9, L10 ---------------------------------------------------------------------------------------------------------


def one_id_one_run(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """Every 202 to one ``client_msg_id`` names the same reply, and what was written is what was sent."""
    if set(reply.answers) != {reply.response_id}:
        yield "twice", f"one client_msg_id, several replies: {sorted(set(reply.answers))}"
    run = history.evidence.runs.get(reply.response_id)
    asked = history.evidence.messages.get(reply.user_message_id)
    if run is None or asked is None:
        return
    if (run["user_id"], run["client_msg_id"]) != (reply.user_id, reply.client_msg_id):
        yield "twice", "the stored run belongs to another request"
    if reply.content is not None and asked["content"] != reply.content:
        yield "mismatch", f"the user wrote {reply.content!r}, stored is {asked['content']!r}"
    for reading in all_readings(history, reply):
        for event in reading.events:
            if event.name == "start" and event.data["response_id"] != reply.response_id:
                yield "mismatch", f"{reading.device} was shown {event.data['response_id']}"


def stop_means_stop(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """An end that a stop's answer tells stays so; and a stopped reply does not run on for seconds."""
    run = history.evidence.runs.get(reply.response_id)
    if run is None:
        return
    seen = min((reading.end.at for reading in reply.readings if reading.end), default=None)
    for stop in reply.stops:
        if stop.status in ENDED and stop.status != run["status"]:
            yield "ends", f"the stop was answered {stop.status}, stored is {run['status']}"
        late = seen is not None and seen - stop.answered > STOP_S
        if late and run["status"] == "complete" and not history.overlaps(stop.asked - 5, seen or 0, ""):
            yield "stop", f"went on for {(seen or 0) - stop.answered:.1f} s after its stop, to the end"


def nothing_of_it_remains(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """Of a deleted conversation."""
    evidence = history.evidence
    answered = history.deleted_conversations.get(reply.conversation_id)
    if answered is None:
        return
    if reply.response_id in evidence.runs or reply.conversation_id in evidence.conversations:
        yield "deleted", "its rows are still there"
    if reply.response_id in evidence.logs and not _died_with_redis_away(history, answered):
        yield "deleted", f"its log is still there: {len(evidence.logs[reply.response_id])} entries"


def _died_with_redis_away(history: History, answered: float) -> bool:
    """The process that was to remove the logs may have died before Redis was back: they expire by themselves."""
    for redis in history.troubles:
        if redis.name.startswith("redis") and redis.at <= answered and redis.until >= answered - CALL_S:
            return history.overlaps(answered - CALL_S, redis.until + 3, *CRASHES)
    return False


# The log -------------------------------------------------------------------------------------------------------------


def the_log_agrees(history: History, reply: Reply) -> Iterator[tuple[str, str]]:
    """What is in Redis at the end: in order, with one end, the stored one."""
    entries = history.evidence.logs.get(reply.response_id)
    run = history.evidence.runs.get(reply.response_id)
    if not entries or run is None or run["status"] not in ENDED:
        return
    for before, after in pairwise(entries):
        # An end that leaps over all numbers that may have been seen: its log was away when its worker died.
        leap = after.event in TERMINAL and may_have_crashed(history, reply) and after.seq - before.seq >= LEAP
        if after.seq != before.seq + 1 and after.event != "snapshot" and not leap:
            yield "lost", f"the log has {after.seq} behind {before.seq}"
        if before.event in TERMINAL:
            yield "ends", f"the log goes on with {after.event} {after.seq} behind its end"
    last = entries[-1]
    if last.event in TERMINAL and ((last.event, told(last.data)), last.seq) != (end_of(run), run["last_seq"]):
        yield "ends", f"the log ends with {last.event} {told(last.data)} at {last.seq}, stored is {end_of(run)}"
    if last.event not in TERMINAL and not history.overlaps(reply.posted, reply.over + 5, ""):
        yield "ends", f"the log has no end, its last entry is {last.event} {last.seq}"
    begins = entries[0].seq == 1 or entries[0].event == "snapshot" or entries[0].seq > LEAP
    if not begins and not history.log_lost(reply.posted):
        yield "lost", f"the log begins with {entries[0].event} {entries[0].seq}"


# What they share -----------------------------------------------------------------------------------------------------


def all_readings(history: History, reply: Reply) -> list[Reading]:
    """Of all devices, and the fresh replay at the end."""
    replay = history.evidence.replays.get(reply.response_id)
    return [*reply.readings, *([replay] if replay else [])]


def may_have_crashed(history: History, reply: Reply) -> bool:
    """Its worker was killed or frozen; where that is not known, some worker was, in its time."""
    for trouble in history.troubles:
        if not trouble.name.startswith(CRASHES) or trouble.at > reply.over or trouble.until < reply.posted:
            continue
        if trouble.victims is None or reply.response_id in trouble.victims:
            return True
    return False


def _ends(text: str) -> str:
    """Enough of a text to know it by."""
    shown = text if len(text) <= 60 else f"{text[:25]}…{text[-30:]}"
    return f"{shown!r} ({len(text)})"


LAWS: tuple[Law, ...] = (
    no_gap_and_no_repeat,
    all_see_the_same_events,
    the_text_is_the_stored_text,
    one_end,
    the_engine_said_it_once,
    what_was_shown_is_kept,
    one_id_one_run,
    stop_means_stop,
    the_log_agrees,
)
LAWS_OF_THE_DELETED: tuple[Law, ...] = (no_gap_and_no_repeat, nothing_of_it_remains)
