"""Which replica a turn goes to: where its conversation's prefix is, unless that is crowded. Pure.

    home (it served the last turn) ─▶ the hash's choice ─▶ the least loaded
              each only while its load is within 1.25 times its share of all load

The hash is rendezvous hashing weighted by capacity: a replica that comes takes its share and no more, one that goes
gives back its own, and no other conversation moves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

CROWDED: Final = 1.25
"""A replica takes no more than so many times its share of all load, by capacity."""
NEVER_CROWDED: Final = 0.25
"""With this part of its places taken no replica is crowded, however little the others have to do: a few sequences in a
large batch slow each other down by less than reading a long prompt anew costs."""
HOP_S: Final = 0.05
"""A turn is left to its home for so long at least: it is there in a few milliseconds."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that serves the model."""

    id: str
    slots: int
    """Replies that it can write at the same time."""
    load: int = 0
    """Runs that it has: under way, waiting for it, and on their way to it."""


class Why(StrEnum):
    """What a choice rests on."""

    HOME = "home"
    HASHED = "hashed"
    LEAST_LOADED = "least_loaded"


class Choice(msgspec.Struct, frozen=True):
    """A replica's id, and why it was chosen."""

    replica_id: str
    why: Why


def choose(conversation_id: str, replicas: Sequence[Replica], home: str | None) -> Choice | None:
    """Where the conversation's next turn is to be served; ``home`` is who served its last one, if that is known.

    Only replicas with places count; None: there are none.
    """
    able = [replica for replica in replicas if replica.slots > 0]
    if not able:
        return None
    load = sum(replica.load for replica in able) + 1
    slots = sum(replica.slots for replica in able)

    def has_room(replica: Replica) -> bool:
        share = load * replica.slots / slots
        return replica.load + 1 <= max(math.ceil(CROWDED * share), math.ceil(NEVER_CROWDED * replica.slots))

    for replica in able:
        if replica.id == home and has_room(replica):
            return Choice(replica.id, Why.HOME)
    first = max(able, key=lambda replica: _score(conversation_id, replica))
    if has_room(first):
        return Choice(first.id, Why.HASHED)
    least = min(able, key=lambda replica: ((replica.load + 1) / replica.slots, replica.id))
    return Choice(least.id, Why.LEAST_LOADED)


def hashed(conversation_id: str, replicas: Iterable[Replica]) -> str | None:
    """The replica that the hash alone gives; None without any."""
    able = (replica for replica in replicas if replica.slots > 0)
    best = max(able, key=lambda replica: _score(conversation_id, replica), default=None)
    return None if best is None else best.id


def may_take(*, waited_s: float, lost_tokens: int, token_s: float) -> bool:
    """Whether an idle replica may take a turn from its home: waiting there takes longer than reading its prompt anew.

    How long the turn will wait nobody knows; that it has waited so long is the best guess that it will wait as long
    again, and with it the cost is never more than twice that of knowing. ``lost_tokens`` are cached at home and not
    here, a token takes ``token_s``: a cold turn, which loses nothing, may be taken at once.
    """
    return waited_s >= max(HOP_S, lost_tokens * token_s)


def _score(conversation_id: str, replica: Replica) -> float:
    """Weighted rendezvous hashing: the highest wins, with a probability that is proportional to the slots."""
    digest = hashlib.blake2b(f"{replica.id}\0{conversation_id}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2**64
    return replica.slots / -math.log(uniform)
