"""Who stands around a log writer: its audience, the leases it asks for, and what is in the log."""

from chatsvc.errors import StoreUnavailable
from chatsvc.events import Context
from chatsvc.streamlog.snapshot import text_through

A, B = "resp_local_a", "resp_local_b"
CONTEXT = Context(condensed=False, summary_through=None, retrieved=(), prompt_tokens=1, cached_tokens=0, window=100)


class Audience:
    """What the hub would hear."""

    def __init__(self):
        self.told = []
        self.held = []

    def hold(self, response_id):
        self.held.append(response_id)

    def release(self, response_id):
        self.held.remove(response_id)

    def deliver(self, response_id, entries):
        self.told.extend((response_id, entry.seq) for entry in entries)


class Leases:
    """Who holds what, as the store would say."""

    def __init__(self):
        self.held = True
        self.away = False
        self.asked = []

    async def holds(self, response_id, attempt):
        self.asked.append((response_id, attempt))
        if self.away:
            raise StoreUnavailable("away")
        return self.held


def logged(log, response_id=A):
    """The events in the log: seq, name, event."""
    return [(entry.seq, entry.event, entry.decode()) for entry in log._logs[response_id].entries]


def text_in(log, response_id=A):
    return text_through(log._logs[response_id].entries)[1]
