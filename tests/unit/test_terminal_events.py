"""What a reply's last event says, told from how it ended and, later, from what is stored of that (L3)."""

from datetime import UTC, datetime

import pytest

from chatsvc.errors import Abandoned, EngineFailed
from chatsvc.events import encode
from chatsvc.limits import TierName
from chatsvc.run import Outcome, Run, RunStatus
from chatsvc.scheduler.ending import terminal_event_for, terminal_event_of

ENDS = {
    "complete": Outcome(status=RunStatus.COMPLETE, text="Yes.", last_seq=4, finish_reason="length"),
    "stopped by hand": Outcome(status=RunStatus.STOPPED, text="Ye", last_seq=4, finish_reason="stopped"),
    "abandoned": Outcome(
        status=RunStatus.STOPPED,
        text="Ye",
        last_seq=4,
        finish_reason="stopped",
        error_code=Abandoned.code,
        error_message="Nobody was reading, so it was stopped.",
    ),
    "failed": Outcome(
        status=RunStatus.FAILED, text="", last_seq=4, error_code=EngineFailed.code, error_message="It broke."
    ),
}


def stored(outcome):
    return Run(
        id="resp_1",
        conversation_id="conv_1",
        user_id="ada",
        user_message_id="msg_0",
        message_id="msg_1",
        client_msg_id="c",
        model="m",
        tier=TierName.FREE,
        status=outcome.status,
        attempt=1,
        created_at=datetime.now(UTC),
        last_seq=outcome.last_seq,
        finish_reason=outcome.finish_reason,
        error_code=outcome.error_code,
        error_message=outcome.error_message,
    )


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_told_in_the_same_bytes_from_the_log_and_from_the_store(end):
    logged, later = terminal_event_for("msg_1", ENDS[end]), terminal_event_of(stored(ENDS[end]))
    assert (logged.name, encode(logged)) == (later.name, encode(later))


def test_an_abandoned_reply_ends_with_done_and_why_and_one_stopped_by_hand_says_nothing_of_it():
    abandoned = terminal_event_for("msg_1", ENDS["abandoned"])
    assert (abandoned.name, abandoned.finish_reason, abandoned.error_code) == ("done", "stopped", "abandoned")
    assert b"error_code" not in encode(terminal_event_for("msg_1", ENDS["stopped by hand"]))
