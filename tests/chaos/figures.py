"""What the report says besides violations: counts, silences, and how soon a crash is told."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from chaos.checker import CRASHES, Violation
from chaos.history import History, Reply, Trouble

CRASH_TOLD_S = 10.0
SETTLED_JUDGE_S = 8.0
"""A replica that has lived for so long may judge others: a lease, and a beat."""
ZERO_KINDS = ("lost", "repeated", "mismatch", "stuck")


def crash_times(history: History, *, healthy: bool) -> list[float]:
    """Seconds from a crash to the ``error`` on the first screen, of all replies that ended so.

    ``healthy``: only crashes that some other replica could judge and tell: Postgres and Redis were up all the time.
    """
    times = []
    for reply in history.replies.values():
        run = history.evidence.runs.get(reply.response_id)
        if reply.deleted or run is None or run["error_code"] != "worker_lost":
            continue
        seen = min((reading.end.at for reading in reply.readings if reading.end), default=None)
        crash = _crash_of(history, reply, seen)
        if seen is None or crash is None:
            continue
        if not healthy or _was_healthy(history, crash, seen):
            times.append(seen - crash.at)
    return sorted(times)


def _crash_of(history: History, reply: Reply, seen: float | None) -> Trouble | None:
    before = [
        trouble
        for trouble in history.troubles
        if trouble.victims and reply.response_id in trouble.victims and (seen is None or trouble.at < seen)
    ]
    return max(before, key=lambda trouble: trouble.at, default=None)


def _was_healthy(history: History, crash: Trouble, seen: float) -> bool:
    begin = crash.at - SETTLED_JUDGE_S
    if history.overlaps(begin, seen, "postgres", "redis"):
        return False
    shaken = {
        trouble.target
        for trouble in history.troubles
        if trouble.name.startswith(CRASHES) and trouble.at <= seen and trouble.until >= begin
    }
    return len(shaken) < history.replicas


def percentile(ordered: list[float], share: float) -> float | None:
    """The value below which that share of an ordered list lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


def late_news(history: History) -> list[Violation]:
    """L6: within ten seconds, in 99 of 100 crashes on an otherwise healthy service."""
    times = crash_times(history, healthy=True)
    p99 = percentile(times, 0.99)
    if p99 is None or p99 <= CRASH_TOLD_S:
        return []
    return [Violation("late", "", f"a crash was told after {p99:.1f} s (p99 of {len(times)})")]


def longest_silence(history: History, *names: str) -> float:
    """Seconds between two events on one screen, its reconnects included; without those in which such a fault was on."""
    longest = 0.0
    for reply in history.replies.values():
        for reading in reply.readings:
            for before, after in pairwise(reading.events):
                gap = after.at - before.at
                if gap > longest and not (names and history.overlaps(before.at, after.at, *names)):
                    longest = gap
    return longest


def figures(history: History, violations: list[Violation]) -> dict[str, Any]:
    """Everything countable, for the table and the JSON file."""
    ends: Counter[str] = Counter()
    for reply in history.replies.values():
        run = history.evidence.runs.get(reply.response_id)
        if reply.deleted:
            ends["deleted"] += 1
        elif run is not None:
            ends[run["error_code"] or run["status"]] += 1
    readings = [reading for reply in history.replies.values() for reading in reply.readings]
    kinds = Counter(violation.kind for violation in violations)
    times, clean = crash_times(history, healthy=False), crash_times(history, healthy=True)
    return {
        "replies": len(history.replies),
        "ends": dict(ends.most_common()),
        "devices": len(readings),
        "connections": sum(len(reading.connections) for reading in readings),
        "events": sum(len(reading.events) for reading in readings),
        "snapshots": sum(event.name == "snapshot" for reading in readings for event in reading.events),
        "stops": sum(len(reply.stops) for reply in history.replies.values()),
        "faults": dict(Counter(trouble.name for trouble in history.troubles).most_common()),
        "post_retries": {"total": history.post_retries.total(), **dict(history.post_retries.most_common())},
        "post_duplicates": history.post_duplicates,
        **{kind: kinds.pop(kind, 0) for kind in ZERO_KINDS},
        "other_violations": dict(kinds),
        "longest_silence_s": round(longest_silence(history), 1),
        "longest_silence_stores_up_s": round(longest_silence(history, "postgres", "redis"), 1),
        "crash_to_error_s": _summary(clean),
        "crash_to_error_with_outages_s": _summary(times),
        "settled_after_s": round(history.settled_after_s, 1),
    }


def _summary(ordered: list[float]) -> dict[str, float | int | None]:
    spots = {name: percentile(ordered, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {"count": len(ordered)} | {name: None if at is None else round(at, 1) for name, at in spots.items()}
