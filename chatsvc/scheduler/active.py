"""The runs this process is working on, and the one way to interrupt one."""

from __future__ import annotations

import asyncio
from enum import Enum

from chatsvc.run import Run
from chatsvc.scheduler.lines import Meter
from chatsvc.scheduler.prompts import Prepared


class Interrupt(Enum):
    """Why a generation is cut short."""

    STOP = "stop"
    """The user said so: the text is kept (L9)."""
    ABANDON = "abandon"
    """Nobody reads it: the text is kept, and the end says why."""
    DRAIN = "drain"
    """The process shuts down and the grace time is over:

    failed and retryable, or queued again when nothing was shown.
    """
    GIVE_WAY = "give way"
    """A reply waits for the place of this run, for which nobody waits: it is queued again."""
    LOST = "lost"
    """The lease is gone: whoever has it now decides; not another byte from here (L1)."""
    GONE = "gone"
    """The conversation was deleted: nothing is kept."""


class ActiveRun:
    """One run in this process, from its claim to its end."""

    def __init__(self, run: Run, meter: Meter, prepared: Prepared | None = None) -> None:
        self.run = run
        self.meter = meter
        self.complete = False
        """It came to its own end."""
        self.output_tokens = 0
        """Of the reply, so far."""
        self.queued_again = False
        """Nothing of it was shown, and it waits again."""
        self.prepared = prepared
        """What the run is to answer, where that was put together already when it was submitted."""
        self.why: Interrupt | None = None
        self.ended = asyncio.Event()
        self.settling = False
        """True once its end is being written to the store: the lease may then be gone rightly."""
        self.last_seq: int | None = None
        """Of its terminal event, once the store has it: from then on readers may have seen all there is."""
        self._generation: asyncio.Task[None] | None = None

    def guard(self, generation: asyncio.Task[None]) -> None:
        """Let ``interrupt`` cancel this task from now on; at once when an interrupt came before it started."""
        self._generation = generation
        if self.why is not None:
            generation.cancel()

    def interrupt(self, why: Interrupt) -> None:
        """Cut the generation short. The first reason holds, except that losing the run overrules all others."""
        if self.why is None or (why in {Interrupt.LOST, Interrupt.GONE} and self.why is not Interrupt.GONE):
            self.why = why
        if self._generation is not None:
            self._generation.cancel()
