"""The report: a table to read, and what was seen where a law was broken."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from chaos.history import History, Reply
from chaos.suite import Result

SHOWN_COLUMNS = (
    *("status", "attempt", "owner", "last_seq", "finish_reason", "error_code", "stop_requested", "has_text"),
    *("created_at", "started_at", "ended_at", "output_tokens", "continues_message_id", "client_msg_id"),
)
SHOWN = 12
"""Broken replies that are printed whole; the rest by one line each."""


def table(figures: dict[str, Any]) -> str:
    """One line a figure."""
    width = max(map(len, figures))
    return "\n".join(f"{name.replace('_', ' '):<{width}}  {_plain(value)}" for name, value in figures.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items()) or "none"
    return "–" if value is None else str(value)


def verdict(result: Result) -> str:
    """What was broken, and the evidence; one line when nothing was."""
    if not result.violations:
        return "No law was broken."
    lines = [f"{len(result.violations)} violations, seed {result.options.seed}:"]
    ordered = sorted(result.violations, key=lambda violation: (violation.subject, violation.kind))
    for place, (subject, group) in enumerate(groupby(ordered, key=lambda violation: violation.subject)):
        lines += map(str, group)
        if subject and place < SHOWN:
            lines += dossier(result.history, result.history.replies[subject])
            lines += said_by_servers(result.directory, subject)
    return "\n".join(lines)


def dossier(history: History, reply: Reply) -> Iterator[str]:
    """Everything known of one reply."""
    evidence = history.evidence
    yield f"    {reply.model}, posted at {reply.posted:.2f} by {reply.user_id}; stops {reply.stops}"
    for trouble in history.troubles:
        if trouble.at <= reply.over and trouble.until >= reply.posted - 10:
            struck = trouble.victims is not None and reply.response_id in trouble.victims
            held = " (held it)" if struck else ""
            clock = datetime.fromtimestamp(trouble.at + trouble.wall_ahead_s, UTC)
            yield f"    {trouble.at:.2f}–{trouble.until:.2f} ({clock:%X}) {trouble.name} {trouble.target}{held}"
    run = evidence.runs.get(reply.response_id, {})
    yield f"    store: {', '.join(f'{name} {run[name]}' for name in SHOWN_COLUMNS if name in run)}"
    entries = evidence.logs.get(reply.response_id)
    if entries is not None:
        yield f"    log: {' '.join(f'{entry.attempt}-{entry.seq}:{entry.event}' for entry in _thinned(entries))}"
    for reading in [*reply.readings, *filter(None, [evidence.replays.get(reply.response_id)])]:
        yield f"    {reading.device}: {'left' if reading.left else reading.gave_up or 'to the end'}"
        for number, connection in enumerate(reading.connections):
            events = [event for event in reading.events if event.connection == number]
            told = " ".join(f"{event.name}:{event.id}" for event in _thinned(events))
            times = f" {events[0].at:.2f}–{events[-1].at:.2f}" if events else ""
            yield f"      {connection.at:.2f} replica {connection.replica} from {connection.cursor}:{times} {told}"


def said_by_servers(directory: Path, response_id: str) -> Iterator[str]:
    """What the replicas logged about a reply."""
    for path in sorted(directory.glob("replica*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if response_id in line:
                yield f"    {path.stem}: {line[:300]}"


def _thinned(events: list[Any]) -> list[Any]:
    """The first and last of many deltas."""
    return events if len(events) <= 8 else [*events[:4], *events[-4:]]
