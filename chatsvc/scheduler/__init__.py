"""Decides which run the engines work on, and sees each run through to its one end.

``Scheduler`` is the door of this room: the API knows nothing behind it.

    submit.py     validate → admit → one transaction            fair_queue.py who is next (pure)
    degrade.py    what is given up when it is tight (pure)      pressure.py   … measured and applied
    dispatch.py   free slot → claim → task                      runner.py     one run, from claim to end: the main path
    lease.py      heartbeat, orphans                            checkpoint.py partial text, every 10 s
    positions.py  where a waiting run stands                    ending.py     how an end looks
    folds.py      when a conversation is folded                 fold_runner.py one fold, from claim to end
"""

from chatsvc.scheduler.request import NewAnswer, NewMessage
from chatsvc.scheduler.service import Scheduler

__all__ = ["NewAnswer", "NewMessage", "Scheduler"]
