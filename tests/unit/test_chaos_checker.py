"""The chaos suite's checker: it accepts a history without fault and complains of each doctored one."""

from chaos.checker import check
from chaos.faults import TRACKS, plan
from chaos.figures import crash_times, figures, late_news, longest_silence
from chaos.history import Connection, History, LogEntry, Reading, Reply, Saying, Seen, Stop, Trouble
from chaos.report import table, verdict
from chaos.suite import Options, Result

ID = "resp_local_1"
USAGE = {"prompt_tokens": 9, "cached_tokens": 0, "output_tokens": 3}
DONE = {"message_id": "msg_a", "finish_reason": "stop", "usage": USAGE}
TEXTS = ["One ", "two ", "three."]


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
    """The same reply, lost with its worker: everything there is ends with an error after ``text``."""
    made = history(
        status="failed", error_code="worker_lost", finish_reason=None, content=text, last_seq=seq, output_tokens=2
    )
    error = seen(seq, "error", {"code": "worker_lost", "message": "", "retryable": True}, at=8.0)
    made.replies[ID].readings = [Reading("laptop", [Connection(0, 0, 0)], [*told(until=seq - 1), error])]
    made.evidence.replays[ID] = Reading("fresh replay", [Connection(9, 0, 0)], [*told(until=seq - 1), error])
    made.evidence.logs[ID] = []
    made.troubles = [Trouble("kill", 1.0, 3.0, "replica 0", [ID])]
    return made


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


def test_a_crash_that_is_told_late_is_found_unless_everything_was_down():
    made = failed("One two ")
    assert crash_times(made, healthy=True) == [7.0]
    assert late_news(made) == []
    laptop(made).events[-1].at = 12.0
    assert [violation.kind for violation in late_news(made)] == ["late"]
    made.troubles.append(Trouble("postgres away", 2.0, 9.0))
    assert late_news(made) == []
    assert crash_times(made, healthy=False) == [11.0]


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
