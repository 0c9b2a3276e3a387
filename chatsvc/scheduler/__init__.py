"""Decides which run the engines work on, and sees each run through to its one end.

``Scheduler`` is the door of this room: the API knows nothing behind it.

    submit.py     validate → admit → one transaction            queue.py      who is next (pure)
    dispatch.py   free slot → claim → task                      runner.py     one run, from claim to end: the main path
    lease.py      heartbeat, orphans                            checkpoint.py partial text, every 10 s
    positions.py  where a waiting run stands                    ending.py     how an end looks
"""

from chatsvc.scheduler.service import Scheduler
from chatsvc.scheduler.submit import NewAnswer, NewMessage

__all__ = ["NewAnswer", "NewMessage", "Scheduler"]
