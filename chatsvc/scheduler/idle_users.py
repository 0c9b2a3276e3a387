"""Users without work: remembered while they are ahead of those who wait, so that idling forgives no debt."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from chatsvc.scheduler.fair_flow import Flow


class IdleUsers:
    """By how far each is ahead. Each is in here once, for as long as it says so itself (``Flow.noted``)."""

    def __init__(self, tag: Callable[[Flow], float]) -> None:
        self._tag = tag
        self._entries: list[tuple[float, str, Flow]] = []

    def note(self, flow: Flow) -> None:
        """This one has no work now."""
        if not flow.noted:
            flow.noted = True
            heapq.heappush(self._entries, (self._tag(flow), flow.user_id, flow))

    def settled(self, until: float) -> list[Flow]:
        """Those whose counter is no larger: nothing needs to be known of them. They are in here no more."""
        found = []
        while self._entries and self._entries[0][0] <= until:
            flow = heapq.heappop(self._entries)[2]
            flow.noted = False
            if flow.has_work:
                continue
            if self._tag(flow) <= until:
                found.append(flow)
            else:
                self.note(flow)
        return found

    def clear(self) -> None:
        """None is remembered any more."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
