"""A run is one attempt to produce one assistant message; on the wire it is called a *response*.

Its life is the table ``TRANSITIONS``. A run ends exactly once (L5); the compare-and-set in Postgres that moves it is
the only judge of who was first.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

from chatsvc.limits import TierName, Usage


class RunKind(StrEnum):
    """What a run is for."""

    REPLY = "reply"
    """It writes an assistant message, and people wait for it."""
    FOLD = "fold"
    """It writes a summary, in the background: no log, no message, no open reply."""


class RunStatus(StrEnum):
    """Where a run stands. Assistant messages carry the same word; other messages are always complete."""

    QUEUED = "queued"
    STREAMING = "streaming"
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """True when nothing more can happen to the run."""
        return not TRANSITIONS[self]


TRANSITIONS: Final[dict[RunStatus, frozenset[RunStatus]]] = {
    RunStatus.QUEUED: frozenset({RunStatus.STREAMING, RunStatus.STOPPED, RunStatus.FAILED}),
    # Back to queued only when no token was delivered (L6).
    RunStatus.STREAMING: frozenset({RunStatus.COMPLETE, RunStatus.STOPPED, RunStatus.FAILED, RunStatus.QUEUED}),
    RunStatus.COMPLETE: frozenset(),
    RunStatus.STOPPED: frozenset(),
    RunStatus.FAILED: frozenset(),
}


MOST_LOSSES: Final = 3
"""A run that lost its worker or engine so often is failed: it may be what breaks them."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``runs``. ``attempt`` is the fencing number of the worker that holds it, 0 before the first claim."""

    id: str
    user_id: str
    conversation_id: str
    user_message_id: str
    """The message being answered; empty for a fold."""
    message_id: str
    """The assistant message being written; empty for a fold."""
    client_msg_id: str
    """Empty for a fold: no client asked for it."""
    model: str
    tier: TierName
    status: RunStatus
    attempt: int
    created_at: datetime
    losses: int = 0
    """How often it was lost with its worker, or its engine failed it, and it was queued again."""
    continues_message_id: str | None = None
    """The reply whose text this one begins with; only the rest is generated."""
    asked_model: str | None = None
    """The model that was asked for, where another one answers because there was too little; None: ``model``."""
    degraded: tuple[str, ...] = ()
    """What was given up for the reply when it was taken in: ``model``, ``max_tokens``, ``history``."""
    owner: str | None = None
    """The worker holding the lease while streaming."""
    expected_prompt_tokens: int = 0
    """Tokens of the prompt when the run was submitted."""
    max_tokens: int | None = None
    temperature: float | None = None
    background: bool = False
    stop_requested: bool = False
    last_seq: int = 0
    """Sequence number of the terminal event once ended; of the last checkpoint before."""
    finish_reason: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    usage: Usage = Usage()
    started_at: datetime | None = None
    ended_at: datetime | None = None
    kind: RunKind = RunKind.REPLY
    fold_through_id: str | None = None
    """The last message that a fold's summary is to stand for."""
    fold_base_id: str | None = None
    """The summary that a fold goes on from; None when it is the branch's first."""


class WaitingRun(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be known of a run to decide when it is its turn."""

    id: str
    user_id: str
    tier: TierName
    model: str
    prompt_tokens: int
    """As counted when it was submitted; a guess where no tokenizer was at hand."""
    max_tokens: int | None = None
    kind: RunKind = RunKind.REPLY
    conversation_id: str = ""
    """Whose prefix its prompt begins with."""
    age_s: float = 0.0
    """Seconds since it was posted, when this was said: each process has a clock of its own."""


def waiting(run: Run, age_s: float = 0.0) -> WaitingRun:
    """The run, as lines see it."""
    return WaitingRun(
        id=run.id,
        user_id=run.user_id,
        tier=run.tier,
        model=run.model,
        prompt_tokens=run.expected_prompt_tokens,
        max_tokens=run.max_tokens,
        kind=run.kind,
        conversation_id=run.conversation_id,
        age_s=age_s,
    )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: what the compare-and-set writes into run and message in one transaction.

    ``last_seq`` is the sequence number that the terminal event has, or will have, in the log.
    """

    status: RunStatus
    text: str
    last_seq: int
    finish_reason: str | None = None
    usage: Usage = Usage()
    error_code: str | None = None
    error_message: str | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a running reply up to and including event ``seq``."""

    run_id: str
    attempt: int
    seq: int
    text: str
    usage: Usage = Usage()


class Lease(msgspec.Struct, frozen=True):
    """A worker's hold on a run: valid while the worker's heartbeat is fresh and the run's attempt is this one."""

    run_id: str
    owner: str
    attempt: int
