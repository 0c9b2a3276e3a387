"""Which runs in the background give their places to replies that wait. Pure.

What nobody waits for is begun when nobody waits; the next message may come a moment later, and is not to wait for it.
So the youngest is aborted, which loses least, and queued again. After two times it is let finish, whoever waits: it
gets done at last. So is one that was begun though replies waited, since it was its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from chatsvc.run import RunKind
from chatsvc.scheduler.active import ActiveRun

MOST_TIMES: Final = 2
"""How often a run gives way. Told by its attempts, which every replica knows; one lost with its worker, or given
back by one that shut down, counts too."""


def giving_way(
    actives: Sequence[ActiveRun],
    held_up: int,
    began_by_turn: Callable[[str], bool],
    helps: Callable[[Collection[str]], bool],
) -> list[ActiveRun]:
    """Of one engine's runs under way, those to be cut short for so many replies that wait for a place.

    ``actives`` are in the order in which they began. Places that become free by themselves count. ``helps`` says
    whether any reply could begin once these runs have ended: where it needs more room than all have that may give way,
    none does.
    """
    ending = [active.run.id for active in actives if active.settling or active.why is not None]
    needed = held_up - len(ending)
    if needed <= 0:
        return []
    able = [
        active
        for active in actives
        if active.run.kind is not RunKind.REPLY
        and active.why is None
        and not active.settling
        and active.run.attempt <= MOST_TIMES
        and not began_by_turn(active.run.id)
    ]
    youngest = able[::-1]
    for count in range(min(needed, len(youngest)), len(youngest) + 1):
        if count and helps([*ending, *(active.run.id for active in youngest[:count])]):
            return youngest[:count]
    return []
