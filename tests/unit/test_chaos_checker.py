"""The chaos suite's checker: it accepts a history without fault and complains of each doctored one."""

from dataclasses import replace
from datetime import UTC, datetime

from chaos.checker import check
from chaos.crashes import late_news, marks, screens
from chaos.faults import TRACKS, plan
from chaos.figures import figures, longest_silence
from chaos.history import Connection, History, LogEntry, Reading, Reply, Saying, Seen, Stop, Trouble
from chaos.report import table, verdict
from chaos.suite import Options, Result

ID = "resp_local_1"
USAGE = {"prompt_tokens": 9, "cached_tokens": 0, "output_tokens": 3}
DONE = {"message_id": "msg_a", "finish_reason": "stop", "usage": USAGE}
TEXTS = ["One ", "two ", "three."]
WALL_AHEAD = 1.8e9
"""The wall clock, by which the database dates, before the suite's."""


def seen(number, name, data, *, at=None, connection=0):
    return Seen(at if at is not None else number / 10, connection, number, name, data)


def told(*, until=5):
    """The events of a complete reply: start, three deltas, done."""
    events = [seen(1, "start", {"response_id": ID, "message_id": "msg_a"})]
    events += [seen(number, "delta", {"text": text}) for number, text in enumerate(TEXTS, start=2)]
    events.append(seen(5, "done", DONE))
    return events[:until]


def history(**changes):
    """A reply that two devices saw whole, the second one cut after its third event."""
    reply = Reply(
        response_id=ID,
        message_id="msg_a",
        user_message_id="msg_u",
        conversation_id="conv_1",
        user_id="pat",
        client_msg_id="c1",
        model="quick",
        content="Count.",
        posted=0.0,
        answers=[ID, ID],
    )
    cut = told()
    for event in cut[3:]:
        event.connection = 1
    reply.readings = [
        Reading("laptop", [Connection(0, 0, 0)], told()),
        Reading("phone", [Connection(0, 0, 1), Connection(0.3, 3, 2)], cut),
    ]
    made = History(replies={ID: reply})
    evidence = made.evidence
    run = {
        "id": ID,
        "message_id": "msg_a",
        "user_message_id": "msg_u",
        "conversation_id": "conv_1",
        "user_id": "pat",
        "client_msg_id": "c1",
        "status": "complete",
        "attempt": 1,
        "last_seq": 5,
        "finish_reason": "stop",
        "error_code": None,
        "content": "".join(TEXTS),
        **USAGE,
    }
    evidence.runs[ID] = run | changes
    evidence.states[ID] = evidence.runs[ID]["status"]
    evidence.messages["msg_u"] = {"content": "Count."}
    evidence.replays[ID] = Reading("fresh replay", [Connection(9, 0, 0)], told())
    evidence.logs[ID] = [LogEntry(1, event.id, event.name, event.data) for event in told()]
    evidence.sayings[ID] = Saying("", "".join(TEXTS), 3, "stop")
    return made


def laptop(made):
    return made.replies[ID].readings[0]


def kinds(made):
    return {violation.kind for violation in check(made)}


def failed(text, *, seq=4):
    """The same reply, lost with its worker at 1.0: everything there is ends with an error after ``text``."""
    made = history(
        status="failed", error_code="worker_lost", finish_reason=None, content=text, last_seq=seq, output_tokens=2
    )
    error = seen(seq, "error", {"code": "worker_lost", "message": "", "retryable": True}, at=8.0)
    made.replies[ID].readings = [Reading("laptop", [Connection(0, 0, 0)], [*told(until=seq - 1), error])]
    made.evidence.replays[ID] = Reading("fresh replay", [Connection(9, 0, 0)], [*told(until=seq - 1), error])
    made.evidence.logs[ID] = []
    made.troubles = [Trouble("kill", 1.0, 3.0, "replica 0", [ID], WALL_AHEAD)]
    mark(made, 7.0)
    return made


def mark(made, at):
    made.evidence.runs[ID]["ended_at"] = datetime.fromtimestamp(WALL_AHEAD + at, UTC)


def on_screen(device, at, *connections):
    """The reply lost with its worker as a device saw it that was told at ``at``; connections are (time, replica)."""
    ways = [Connection(when, 0 if number == 0 else 3, replica) for number, (when, replica) in enumerate(connections)]
    error = seen(4, "error", {"code": "worker_lost", "message": "", "retryable": True}, at=at)
    return Reading(device, ways, [*told(until=3), error])


def lost(*readings, marked=7.0, frozen=None):
    """The reply lost with its worker, seen by these devices, beside a freeze of replica 1."""
    made = failed("One two ")
    made.replies[ID].readings = list(readings)
    mark(made, marked)
    if frozen:
        made.troubles.append(Trouble("freeze", *frozen, "replica 1"))
    return made


def late(made):
    return [violation.what for violation in late_news(made) if violation.kind == "late"]


def test_a_history_without_fault_is_accepted():
    assert check(history()) == []


def test_a_reply_kept_up_to_the_crash_is_accepted():
    assert check(failed("One two ")) == []


def test_a_lost_event_is_found():
    made = history()
    del laptop(made).events[2]
    assert "lost" in kinds(made)


def test_an_event_lost_at_a_resume_is_found():
    made = history()
    del made.replies[ID].readings[1].events[3]
    assert {"lost", "mismatch"} <= kinds(made)


def test_a_repeated_event_is_found():
    made = history()
    laptop(made).events.insert(3, laptop(made).events[2])
    assert "repeated" in kinds(made)


def test_an_event_repeated_behind_the_cursor_of_a_resume_is_found():
    made = history()
    phone = made.replies[ID].readings[1]
    phone.events.insert(3, seen(3, "delta", {"text": "two "}, connection=1))
    assert "repeated" in kinds(made)


def test_a_text_that_is_not_the_stored_one_is_found():
    assert kinds(history(content="One two three!")) >= {"mismatch"}


def test_a_stored_text_that_the_engine_never_says_is_found():
    made = history()
    made.evidence.sayings[ID] = Saying("", "Quite another text.", 3, "stop")
    assert kinds(made) == {"mismatch"}


def test_one_number_with_two_events_is_found():
    made = history()
    made.evidence.logs[ID][2] = LogEntry(1, 3, "delta", {"text": "2 "})
    assert kinds(made) == {"mismatch"}


def test_two_ends_are_found():
    made = history()
    laptop(made).events.append(seen(6, "error", {"code": "worker_lost", "message": "", "retryable": True}))
    assert "ends" in kinds(made)


def test_an_end_that_the_store_does_not_know_is_found():
    assert "ends" in kinds(history(status="stopped", finish_reason="stopped"))


def test_a_log_that_goes_on_behind_its_end_is_found():
    made = history()
    made.evidence.logs[ID].append(LogEntry(2, 6, "delta", {"text": "more"}))
    assert "ends" in kinds(made)


def test_a_log_with_a_hole_is_found():
    made = history()
    del made.evidence.logs[ID][2]
    assert kinds(made) == {"lost"}


def test_a_reply_that_runs_for_ever_is_found():
    assert "stuck" in kinds(history(status="streaming", finish_reason=None))


def test_a_device_that_saw_no_end_is_found():
    made = history()
    laptop(made).events.pop()
    assert kinds(made) == {"stuck"}
    laptop(made).left = True
    assert check(made) == []


def test_a_reply_that_is_not_in_the_store_is_found():
    made = history()
    del made.evidence.runs[ID]
    assert "lost" in kinds(made)


def test_two_replies_to_one_client_msg_id_are_found():
    made = history()
    made.replies[ID].answers.append("resp_local_2")
    assert kinds(made) == {"twice"}


def test_a_snapshot_may_jump_and_what_follows_it_must_follow():
    made = history()
    laptop(made).events[1:3] = [seen(3, "snapshot", {"text": "One two ", "reason": "gap"})]
    assert check(made) == []
    del laptop(made).events[2]
    assert "lost" in kinds(made)


def test_text_that_was_shown_and_is_gone_is_found():
    made = failed("One ", seq=3)
    laptop(made).events[2:2] = [
        seen(3, "delta", {"text": "two "}),
        seen(2, "snapshot", {"text": "One ", "reason": "stored"}),
    ]
    # Number 3 is the delta for one and the error for others, too: nobody may give a number twice.
    assert kinds(made) == {"kept", "mismatch"}
    # With worker and log both dead the text may be lost; a number is not given twice even then.
    made.troubles.append(Trouble("redis empty", 1.0, 2.0, "empty"))
    assert kinds(made) == {"mismatch"}


def test_text_that_was_taken_back_and_said_again_is_found():
    made = history()
    made.troubles = [Trouble("kill", 0.1, 3.0, "replica 0", [ID]), Trouble("redis empty", 0.1, 0.2, "empty")]
    laptop(made).events[3:3] = [seen(1, "snapshot", {"text": "", "reason": "gap"}), *told()[1:3]]
    assert kinds(made) == {"kept"}


def test_a_stop_whose_answer_was_taken_back_is_found():
    made = history()
    made.replies[ID].stops = [Stop(0.1, 0.2, "stopped")]
    assert kinds(made) == {"ends"}


def test_a_reply_that_runs_on_after_its_stop_is_found():
    made = history()
    made.replies[ID].stops = [Stop(0.1, 0.2, "streaming")]
    assert check(made) == []
    for reading in made.replies[ID].readings:
        reading.events[-1].at = 9.0
    assert kinds(made) == {"stop"}


def test_what_remains_of_a_deleted_conversation_is_found():
    made = history()
    made.replies[ID].deleted = True
    made.deleted_conversations["conv_1"] = 5.0
    assert [violation.kind for violation in check(made)] == ["deleted", "deleted"]
    del made.evidence.runs[ID], made.evidence.logs[ID]
    assert check(made) == []


def test_mark_and_screen_of_a_crash_are_timed_from_the_crash():
    made = failed("One two ")
    assert [round(news.after_s, 3) for news in marks(made)] == [6.0]
    assert [news.after_s for news in screens(made)] == [7.0]
    assert late(made) == []


def test_a_crash_that_is_marked_late_is_found_though_no_screen_tells_it():
    assert late(lost(marked=10.9)) == []
    assert late(lost(marked=11.2)) == ["a crash was marked after 10.2 s (p99 of 1)"]


def test_a_late_mark_is_found_though_the_device_hung_and_was_told_in_its_time():
    made = lost(on_screen("laptop", 12.1, (0.0, 1)), marked=11.5, frozen=(2.0, 12.0))
    assert late(made) == ["a crash was marked after 10.5 s (p99 of 1)"]


def test_a_late_mark_is_explained_by_an_outage_before_it_was_due_only():
    made = lost(marked=15.0)
    made.troubles.append(Trouble("postgres away", 12.0, 14.0))
    assert late(made) == ["a crash was marked after 14.0 s (p99 of 1)"]
    made.troubles[-1].at = 10.0
    assert late(made) == []
    assert [news.healthy for news in marks(made)] == [False]


def test_a_late_mark_is_explained_where_no_replica_could_judge():
    made = lost(marked=15.0, frozen=(2.0, 12.0))
    assert len(late(made)) == 1
    made.troubles.append(Trouble("roll", 0.0, 1.0, "replica 2"))
    assert late(made) == []


def test_a_screen_that_tells_late_with_no_fault_on_its_way_is_found():
    made = lost(on_screen("laptop", 11.2, (0.0, 0), (1.1, 2)), frozen=(2.0, 11.0))
    assert late(made) == ["a crash was told after 10.2 s on laptop, due after 10.0 s (p99 of 1)"]
    made.troubles.append(Trouble("redis away", 10.9, 14.0))
    assert late(made) == []


def test_a_screen_that_hung_on_a_frozen_replica_has_time_from_when_it_was_free():
    made = lost(on_screen("laptop", 11.2, (0.0, 0), (1.1, 2), (3.0, 1)), frozen=(2.0, 11.0))
    assert late(made) == []
    assert [news.hung for news in screens(made)] == [True]
    laptop(made).events[-1].at = 16.1
    assert late(made) == ["a crash was told after 15.1 s on laptop, due after 15.0 s (p99 of 1)"]


def test_a_screen_is_free_once_it_has_left_the_frozen_replica():
    made = lost(on_screen("laptop", 11.2, (0.0, 1), (3.0, 2)), frozen=(2.0, 11.0))
    assert late(made) == ["a crash was told after 10.2 s on laptop, due after 10.0 s (p99 of 1)"]


def test_a_freeze_that_was_over_before_the_crash_explains_no_late_screen():
    made = lost(on_screen("laptop", 11.2, (0.0, 1)), frozen=(0.1, 0.9))
    assert len(late(made)) == 1
    assert [news.hung for news in screens(made)] == [False]


def test_one_device_that_hung_does_not_explain_that_another_was_told_late():
    made = lost(on_screen("laptop", 11.1, (0.0, 1)), on_screen("phone", 11.2, (0.0, 2)), frozen=(2.0, 11.0))
    assert late(made) == ["a crash was told after 10.2 s on phone, due after 10.0 s (p99 of 2)"]


def test_a_device_that_lost_its_state_hung_as_itself():
    before = Reading("laptop", [Connection(0.0, 0, 1)], told(until=3), left=True)
    assert late(lost(before, on_screen("laptop", 11.2, (11.0, 2)), frozen=(2.0, 11.0))) == []


def test_a_device_that_comes_when_the_mark_is_there_is_told_soon():
    made = lost(on_screen("tablet", 12.0, (9.0, 2)))
    assert late(made) == []
    laptop(made).events[-1].at = 14.1
    assert late(made) == ["a crash was told after 13.1 s on tablet, due after 13.0 s (p99 of 1)"]


def test_of_many_crashes_one_in_a_hundred_may_be_late():
    made = lost(marked=11.2)
    for number in range(100):
        other = f"resp_local_{number}_of_many"
        made.replies[other] = replace(made.replies[ID], response_id=other)
        made.evidence.runs[other] = made.evidence.runs[ID] | {"ended_at": datetime.fromtimestamp(WALL_AHEAD + 7, UTC)}
        made.troubles[0].victims.append(other)
    assert late(made) == []
    made.evidence.runs[other]["ended_at"] = made.evidence.runs[ID]["ended_at"]
    assert late(made) == ["a crash was marked after 10.2 s (p99 of 101)"] * 2


def test_the_longest_silence_leaves_out_what_an_outage_explains():
    made = history()
    laptop(made).events[-1].at = 7.4
    assert round(longest_silence(made), 3) == 7.0
    made.troubles = [Trouble("postgres away", 2.0, 5.0)]
    assert round(longest_silence(made, "postgres"), 3) == 0.1


def test_the_report_counts_and_shows_what_was_broken(tmp_path):
    made = history()
    laptop(made).events.insert(3, laptop(made).events[2])
    found = check(made)
    told = figures(made, found)
    assert (told["replies"], told["repeated"], told["lost"]) == (1, 1, 0)
    result = Result(Options(seed=7, seconds=1), tmp_path, made, found, told)
    assert "repeated" in table(told)
    assert "seed 7" in verdict(result)
    assert "last_seq 5" in verdict(result)


def test_one_seed_is_one_plan_and_ten_minutes_meet_every_fault():
    assert plan(5, 600) == plan(5, 600)
    assert plan(5, 600) != plan(6, 600)
    met = {strike.name for strikes in plan(5, 600) for strike in strikes}
    assert met == {name for track in TRACKS for name in track.faults}
    assert sum(strike.name == "kill" for strikes in plan(5, 600) for strike in strikes) >= 29
