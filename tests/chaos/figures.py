"""What the report says besides violations: counts, silences, and how soon a crash is told."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from chaos.checker import Violation
from chaos.crashes import News, marks, percentile, screens
from chaos.history import History

ZERO_KINDS = ("lost", "repeated", "mismatch", "stuck")


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
    marked, shown = marks(history), screens(history)
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
        "crash_to_mark_s": _summary([news for news in marked if news.healthy]),
        "crash_to_mark_with_outages_s": _summary(marked),
        "crash_to_screen_s": _summary([news for news in shown if news.healthy and not news.hung]),
        "crash_to_hung_screen_s": _summary([news for news in shown if news.healthy and news.hung]),
        "crash_to_screen_with_outages_s": _summary(shown),
        "settled_after_s": round(history.settled_after_s, 1),
    }


def _summary(news: list[News]) -> dict[str, float | int | None]:
    ordered = [each.after_s for each in news]
    spots = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    return {"count": len(ordered)} | {
        name: round(percentile(ordered, share), 1) if ordered else None for name, share in spots
    }
