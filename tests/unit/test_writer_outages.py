"""The log writer when the log is away, does not say what became of an append, or comes back with less."""

import asyncio
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import DONE, FragileLog, append, delta, running, until
from writer_world import CONTEXT, A, Audience, B, Leases, logged, text_in

from chatsvc.events import Snapshot, ToolCall, clean_text
from chatsvc.streamlog.base import Position
from chatsvc.streamlog.memory import MemoryLog
from chatsvc.streamlog.snapshot import text_through
from chatsvc.streamlog.writer import LogWriter

# The log is away ------------------------------------------------------------------------------------------------------


async def test_while_the_log_is_away_text_becomes_one_delta(make_writer, log, audience):
    writer = make_writer(batch_ms=1, batch_tokens=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("here ")
        assert await reply.flush(5)
        log.away = True
        for number in range(200):
            reply.delta(f"{number} ")
            if number % 20 == 0:
                await asyncio.sleep(0.002)
        assert not await reply.flush(0.05)
        reply.delta("end")
        log.away = False
        assert await reply.flush(5)
    assert text_in(log) == reply.text
    # One that was under way when the log went, one cut by the flush, one for the rest.
    assert len(logged(log)) <= 4
    assert [seq for _, seq in audience.told] == list(range(1, len(logged(log)) + 1))


async def test_a_log_that_stays_away_is_looked_at_ever_less_often(make_writer, log):
    position, looked_at = log.position, []

    async def noted(response_id):
        looked_at.append(asyncio.get_running_loop().time())
        return await position(response_id)

    log.position = noted
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("here")
        assert await reply.flush(5)
        log.away = True
        reply.delta(" gone")
        await until(lambda: len(looked_at) == 6)
        log.away = False
        assert await reply.flush(5)
    # The first look is at once.
    waits = [later - earlier for earlier, later in pairwise(looked_at[:6])]
    assert [wait >= least for wait, least in zip(waits, (0.019, 0.049, 0.099, 0.199, 0.499), strict=True)] == [True] * 5


async def test_a_reply_begins_though_the_log_is_away_and_is_written_when_it_is_back(make_writer, log):
    writer = make_writer(batch_ms=1)
    log.away = True
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.event(CONTEXT)
        reply.delta("text")
        assert not await reply.flush(0.05)
        log.away = False
        assert await reply.flush(5)
        assert await log.position(A) == Position(1, 2)
    assert text_in(log) == "text"


async def test_numbers_given_out_while_the_log_was_away_and_already_in_it_are_led_on_by_a_snapshot(make_writer, log):
    """The first attempt wrote two events; the second could not know and began with 1 again."""
    await log.open(A, 1)
    await log.append([append(A, delta(1, "", attempt=1), delta(2, "", attempt=1))])
    writer = make_writer(batch_ms=1)
    log.away = True
    async with running(writer.run()):
        reply = await writer.open(A, 2)
        reply.event(CONTEXT)
        reply.delta("text")
        assert not await reply.flush(0.05)
        log.away = False
        assert await reply.flush(5)
    seqs = [seq for seq, _, _ in logged(log)]
    assert seqs == sorted(set(seqs))
    assert text_in(log) == "text"
    assert "context" in [name for _, name, _ in logged(log)]


async def test_a_newer_attempt_that_came_while_the_log_was_away_ends_the_reply(make_writer, log, audience):
    writer = make_writer(batch_ms=1)
    log.away = True
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("text")
        await MemoryLog.open(log, A, 2)
        log.away = False
        await until(lambda: reply.fenced)
    assert logged(log) == []
    assert audience.held == []


# The outcome is unknown -----------------------------------------------------------------------------------------------


async def test_what_was_written_though_the_answer_was_lost_is_not_written_twice(make_writer, log, audience):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        for number in range(5):
            log.swallow_answers = 1
            reply.delta(f"{number} ")
            assert await reply.flush(5)
    assert text_in(log) == "0 1 2 3 4 "
    assert [seq for seq, _, _ in logged(log)] == [1, 2, 3, 4, 5]
    assert [seq for _, seq in audience.told] == [1, 2, 3, 4, 5]


async def test_what_was_not_written_is_written_again_byte_for_byte(make_writer, log):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("a")
        assert await reply.flush(5)
        log.away = True
        reply.delta("b")
        await log.appends(2)
        reply.delta("c")
        log.away = False
        assert await reply.flush(5)
    (failed,) = log.batches[1]
    assert log.batches[2][0].entries[: len(failed.entries)] == failed.entries
    assert text_in(log) == "abc"


async def test_an_append_that_arrives_late_from_a_broken_connection_changes_nothing(make_writer, log):
    """The retry is refused as 'already there'; that is not taken for a fence."""
    writer = make_writer(batch_ms=1)
    append_now, late = log.append, []

    async def delayed(batch):
        if not late:
            late.append(batch)
            log.append = append_now
            log.away = True
            return await append_now(batch)
        return await append_now(batch)

    async with running(writer.run()):
        reply = await writer.open(A, 1)
        log.append = delayed
        reply.delta("a")
        await until(lambda: late)
        position_now = log.position

        async def position_then_arrival(response_id):
            found = await position_now(response_id)
            await MemoryLog.append(log, late[0])
            return found

        log.position = position_then_arrival
        log.away = False
        reply.delta("b")
        assert await reply.flush(5)
        assert not reply.fenced
    assert text_in(log) == "ab"


# The log was lost -----------------------------------------------------------------------------------------------------


async def test_a_lost_log_is_begun_anew_with_a_snapshot_that_takes_the_next_number(make_writer, log, audience):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("one ")
        assert await reply.flush(5)
        log.lose_everything()
        reply.delta("two ")
        assert await reply.flush(5)
        assert reply.checkpoint() == (3, "one two ")
        reply.delta("three")
        assert await reply.flush(5)
    assert [(seq, name) for seq, name, _ in logged(log)] == [(3, "snapshot"), (4, "delta")]
    assert logged(log)[0][2] == Snapshot(text="one two ", reason="log_lost")
    assert [seq for _, seq in audience.told] == [1, 3, 4]


async def test_a_log_that_came_back_without_its_end_is_led_on_by_a_snapshot(make_writer, log):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        for number in range(5):
            reply.delta(f"{number} ")
            assert await reply.flush(5)
        log.away = True
        reply.delta("5 ")
        await log.appends(6)
        log.lose_after(A, 3)
        log.away = False
        assert await reply.flush(5)
    assert [(seq, name) for seq, name, _ in logged(log)][3:] == [(7, "snapshot")]
    assert text_in(log) == "0 1 2 3 4 5 "


async def test_text_that_comes_while_the_log_is_lost_is_in_the_snapshot(make_writer, log):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("one ")
        assert await reply.flush(5)
        log.lose_everything()
        log.away = True
        reply.delta("two ")
        await log.appends(2)
        reply.delta("three")
        log.away = False
        assert await reply.flush(5)
    assert text_in(log) == reply.text == "one two three"


async def test_a_log_that_is_lost_a_second_time_is_begun_anew_a_second_time(make_writer, log):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        for word in ("one ", "two ", "three "):
            log.lose_everything()
            reply.delta(word)
            assert await reply.flush(5)
            assert text_in(log) == reply.text
    assert [name for _, name, _ in logged(log)] == ["snapshot"]


async def test_events_that_were_not_in_the_log_yet_survive_its_loss(make_writer, log):
    writer = make_writer(batch_ms=1)
    call = ToolCall(id="1", tool="clock", arguments="{}")
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("one ")
        assert await reply.flush(5)
        log.away = True
        reply.event(call)
        await log.appends(2)
        log.lose_everything()
        log.away = False
        assert await reply.flush(5)
    assert [(seq, name) for seq, name, _ in logged(log)] == [(3, "snapshot"), (4, "tool_call")]


async def test_who_lost_the_lease_does_not_begin_a_lost_log_anew(make_writer, log, leases, audience):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("one")
        assert await reply.flush(5)
        log.lose_everything()
        leases.held = False
        reply.delta("two")
        assert not await reply.flush(5)
        assert reply.fenced
    assert leases.asked == [(A, 1)]
    assert A not in log._logs
    assert audience.held == []


async def test_a_store_that_cannot_say_who_holds_the_lease_is_asked_again(make_writer, log, leases):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply, other = await writer.open(A, 1), await writer.open(B, 1)
        reply.delta("one ")
        assert await reply.flush(5)
        log._logs.pop(A)
        leases.away = True
        reply.delta("two")
        await until(lambda: len(leases.asked) >= 2)
        other.delta("meanwhile others go on")
        assert await other.flush(5)
        assert A not in log._logs
        leases.away = False
        assert await reply.flush(5)
    assert text_in(log) == "one two"


async def test_after_the_seal_a_lost_log_gets_what_is_missing_and_no_snapshot(make_writer, log, leases):
    """The store has promised the terminal event's number already."""
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("one ")
        assert await reply.flush(5)
        log.lose_everything()
        reply.delta("two")
        promised = reply.seal()
        reply.event(DONE)
        await reply.close(600)
    assert [(seq, name) for seq, name, _ in logged(log)] == [(2, "delta"), (promised, "done")]


# All of it at once ----------------------------------------------------------------------------------------------------

HURTS = st.sampled_from(["none", "none", "away", "swallow", "lose", "lose_end", "wait"])


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(HURTS, st.text(max_size=8)), min_size=1, max_size=25))
def test_whatever_happens_to_the_log_a_reader_of_all_that_was_acknowledged_ends_with_the_whole_text(steps):
    async def story():
        log, audience, leases = FragileLog(), Audience(), Leases()
        writer = LogWriter(log, audience, batch_ms=1, batch_tokens=4, holds=leases.holds)
        entries, said = [], ""
        audience.deliver = lambda _, told: entries.extend(told)
        async with running(writer.run()):
            reply = await writer.open(A, 1)
            for hurt, text in steps:
                if hurt == "away":
                    log.away = not log.away
                elif hurt == "swallow":
                    log.swallow_answers = 1
                elif hurt == "lose":
                    log.lose_everything()
                    log.away = True
                elif hurt == "lose_end" and A in log._logs and (there := log._logs[A].entries):
                    log.lose_after(A, there[-1].seq - 1)
                    log.away = True
                elif hurt == "wait":
                    await asyncio.sleep(0.003)
                reply.delta(text)
                said += clean_text(text)
                await asyncio.sleep(0)
            log.away = False
            promised = reply.seal()
            reply.event(DONE)
            assert await reply.flush(5)
        seqs = [entry.seq for entry in entries]
        assert seqs == sorted(set(seqs)), "a number came twice"
        assert seqs[-1] == promised == reply.last_seq
        # As after a real break every append failed first, so whatever was lost was noticed before the end was sealed,
        # or the sealed rest leads on from what readers had.
        assert text_through(entries)[1] == reply.text == said

    asyncio.run(story())
