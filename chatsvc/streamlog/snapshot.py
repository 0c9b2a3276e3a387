"""L7: the text of a reply at some seq, made from what is left of its log and from what the store has saved."""

from __future__ import annotations

from collections.abc import Iterable

from chatsvc.events import Delta, Entry, Snapshot


def text_through(entries: Iterable[Entry], *, seq: int = 0, text: str = "") -> tuple[int, str] | None:
    """Read entries as a client does that has ``text`` as of ``seq``; returns what it has then: a seq and its text.

    A terminal entry is left out, so that it can still follow. None when an entry is missing in between and no later
    snapshot makes up for it.
    """
    parts: list[str] | None = [text]
    for entry in entries:
        if entry.seq <= seq or entry.terminal:
            follows_a_hole = entry.terminal and entry.seq > seq + 1
            parts = None if follows_a_hole else parts
            continue
        whole = entry.event == Snapshot.name
        if not whole and entry.seq != seq + 1:
            parts = None
        seq = entry.seq
        event = entry.decode() if entry.event in (Delta.name, Snapshot.name) else None
        if isinstance(event, Snapshot):
            parts = [event.text]
        elif isinstance(event, Delta) and parts is not None:
            parts.append(event.text)
    return None if parts is None else (seq, "".join(parts))
