"""L6 by the clock: how soon a reply whose worker died is marked failed, and how soon each screen tells so.

The law speaks of the mark, which the database dates. A screen takes its device's own time besides: one that hangs on a
frozen replica sees nothing until it gives that connection up or the replica goes on. Only that is allowed for, and only
to the device that hung; every other one has to be told as soon as the law wants the mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chaos.checker import CRASHES, Violation
from chaos.history import History, Reply, Trouble

TOLD_S = 10.0
FREED_S = 5.0
"""For a device that is free again, or came when the mark was there: one try that the proxy stalls, a pause, another."""
SETTLED_JUDGE_S = 8.0
"""A replica that has lived for so long may judge others: a lease, and a beat."""


@dataclass(frozen=True)
class News:
    """One reply's mark, or its end on one device's screen. Times are those of the suite's clock."""

    response_id: str
    crash: float
    at: float
    due: float
    healthy: bool
    """Postgres, Redis and a replica that could judge were there until it came, or was due."""
    device: str = ""
    hung: bool = False
    """The device hung on a frozen replica after the crash."""

    @property
    def after_s(self) -> float:
        """Seconds from the crash."""
        return self.at - self.crash


def marks(history: History) -> list[News]:
    """When each reply that was lost with its worker was marked so, whether or not a screen told it; soonest first."""
    return sorted((mark for _, mark in _marked(history)), key=lambda news: news.after_s)


def screens(history: History) -> list[News]:
    """When each device told that, of those that came to the reply before its mark was due; soonest first."""
    told = (news for reply, mark in _marked(history) for news in _on_screens(history, reply, mark))
    return sorted(told, key=lambda news: news.after_s)


def late_news(history: History) -> Iterator[Violation]:
    """Marks and screens that are late, unless 99 of 100 on an otherwise healthy service are in time."""
    for what, all_news in (("marked", marks(history)), ("told", screens(history))):
        judged = [news for news in all_news if news.healthy]
        late = sorted(news.at - news.due for news in judged)
        if not late or percentile(late, 0.99) <= 0:
            continue
        for news in judged:
            if news.at > news.due:
                where = f" on {news.device}, due after {news.due - news.crash:.1f} s" if news.device else ""
                told = f"a crash was {what} after {news.after_s:.1f} s{where} (p99 of {len(judged)})"
                yield Violation("late", news.response_id, told)


def percentile(ordered: list[float], share: float) -> float:
    """The value below which that share of an ordered list lies; the list is not empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _marked(history: History) -> Iterator[tuple[Reply, News]]:
    """Those of which it is known what they were lost with. Of a deleted one there is no mark."""
    for reply in history.replies.values():
        run = history.evidence.runs.get(reply.response_id)
        if reply.deleted or run is None or run["error_code"] != "worker_lost":
            continue
        ended = run["ended_at"].timestamp()
        crashes = [
            (trouble.at, ended - trouble.wall_ahead_s)
            for trouble in history.troubles
            if trouble.victims and reply.response_id in trouble.victims and trouble.at < ended - trouble.wall_ahead_s
        ]
        if crashes:
            crash, marked = max(crashes)
            due = crash + TOLD_S
            yield reply, News(reply.response_id, crash, marked, due, _was_healthy(history, crash, min(marked, due)))


def _on_screens(history: History, reply: Reply, mark: News) -> Iterator[News]:
    for device in dict.fromkeys(reading.device for reading in reply.readings):
        # A device that lost its state has several: the same way, with another screen.
        readings = [reading for reading in reply.readings if reading.device == device]
        came = readings[0].connections[0].at
        ends = [reading.end.at for reading in readings if reading.end]
        if not ends or came > mark.due:
            continue  # one that saw no end is told of as stuck
        seen = min(ends)
        hung = _hung_until(history, reply, device, mark.crash, seen)
        free = max(hung or mark.crash, came if came > mark.at else mark.crash)
        due = max(mark.due, free + FREED_S)
        healthy = _was_healthy(history, mark.crash, min(seen, due))
        yield News(reply.response_id, mark.crash, seen, due, healthy, device, hung is not None)


def _hung_until(history: History, reply: Reply, device: str, crash: float, seen: float) -> float | None:
    """When the device, after the crash, was last free of a replica that was frozen under it; None: it met none."""
    connections = [each for reading in reply.readings if reading.device == device for each in reading.connections]
    ends = [*(each.at for each in connections[1:]), seen]
    until = [
        min(end, freeze.until)
        for connection, end in zip(connections, ends, strict=True)
        for freeze in history.troubles
        if _froze(freeze, connection.replica) and max(connection.at, freeze.at) < min(end, freeze.until, seen)
    ]
    return max((each for each in until if each > crash), default=None)


def _froze(trouble: Trouble, replica: int) -> bool:
    return trouble.name == "freeze" and trouble.target == f"replica {replica}"


def _was_healthy(history: History, crash: float, until: float) -> bool:
    begin = crash - SETTLED_JUDGE_S
    if history.overlaps(begin, until, "postgres", "redis"):
        return False
    shaken = {
        trouble.target
        for trouble in history.troubles
        if trouble.name.startswith(CRASHES) and trouble.at <= until and trouble.until >= begin
    }
    return len(shaken) < history.replicas
