"""The log writer: batching, order, and what it does when the log is away, breaks, or comes back with less.

Over 400 lines: one pump, and every way in which the log under it can fail.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import DONE, FragileLog, append, delta, running, soon

from chatsvc.errors import StoreUnavailable
from chatsvc.events import Context, Snapshot, ToolCall, clean_text
from chatsvc.streamlog.base import Fenced, Position
from chatsvc.streamlog.memory import MemoryLog
from chatsvc.streamlog.snapshot import text_through
from chatsvc.streamlog.writer import LogWriter

A, B = "resp_local_a", "resp_local_b"
NEVER_MS = 3_600_000
CONTEXT = Context(condensed=False, summary_through=None, retrieved=(), prompt_tokens=1, cached_tokens=0, window=100)


class Audience:
    """What the hub would hear."""

    def __init__(self):
        self.told = []
        self.held = []

    def hold(self, response_id):
        self.held.append(response_id)

    def release(self, response_id):
        self.held.remove(response_id)

    def deliver(self, response_id, entries):
        self.told.extend((response_id, entry.seq) for entry in entries)


class Leases:
    """Who holds what, as the store would say."""

    def __init__(self):
        self.held = True
        self.away = False
        self.asked = []

    async def holds(self, response_id, attempt):
        self.asked.append((response_id, attempt))
        if self.away:
            raise StoreUnavailable("away")
        return self.held


@pytest.fixture
def log():
    return FragileLog()


@pytest.fixture
def audience():
    return Audience()


@pytest.fixture
def leases():
    return Leases()


@pytest.fixture
def make_writer(log, audience, leases):
    def make(*, batch_ms=50, batch_tokens=16):
        return LogWriter(log, audience, batch_ms=batch_ms, batch_tokens=batch_tokens, holds=leases.holds)

    return make


def logged(log, response_id=A):
    """The events in the log: seq, name, event."""
    return [(entry.seq, entry.event, entry.decode()) for entry in log._logs[response_id].entries]


def text_in(log, response_id=A):
    return text_through(log._logs[response_id].entries)[1]


async def until(condition):
    async def wait():
        while not condition():
            await asyncio.sleep(0.001)

    await soon(wait())


# Batching -------------------------------------------------------------------------------------------------------------


async def test_the_first_delta_goes_out_at_once_and_the_next_waits_for_its_turn(make_writer, log):
    writer = make_writer(batch_ms=NEVER_MS)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("first")
        await log.appends(1)
        reply.delta(" second")
        reply.delta(" third")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(log.batches) == 1
        assert await reply.flush(5)
    assert [(seq, event.text) for seq, _, event in logged(log)] == [(1, "first"), (2, " second third")]


async def test_the_first_delta_goes_out_at_once_though_an_event_went_out_just_before_it(make_writer, log):
    writer = make_writer(batch_ms=NEVER_MS)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.event(CONTEXT)
        await log.appends(1)
        reply.delta("first")
        await log.appends(2)
    assert [name for _, name, _ in logged(log)] == ["context", "delta"]


async def test_what_comes_within_the_batch_time_is_one_append_not_sooner_than_that(make_writer, log):
    writer = make_writer(batch_ms=100)
    loop = asyncio.get_running_loop()
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("a")
        await log.appends(1)
        began = reply.taken_at
        for letter in "bcdefgh":
            reply.delta(letter)
        await log.appends(2)
        assert loop.time() - began >= 0.099
        assert await reply.flush(5)
    assert [event.text for _, _, event in logged(log)] == ["a", "bcdefgh"]


async def test_a_full_batch_of_tokens_does_not_wait(make_writer, log):
    writer = make_writer(batch_ms=NEVER_MS, batch_tokens=16)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("a")
        await log.appends(1)
        for _ in range(15):
            reply.delta("b")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(log.batches) == 1
        reply.delta("b")
        await log.appends(2)
        assert await reply.flush(5)
    assert [event.text for _, _, event in logged(log)] == ["a", "b" * 16]


async def test_all_replies_that_are_due_share_one_round_trip(make_writer, log):
    writer = make_writer()
    replies = [await writer.open(f"resp_local_{number}", 1) for number in range(50)]
    for reply in replies:
        reply.delta("text")
    async with running(writer.run()):
        await asyncio.gather(*(reply.flush(5) for reply in replies))
    assert [len(batch) for batch in log.batches] == [50]


async def test_a_slow_round_trip_makes_batches_larger_never_more_numerous(make_writer, log):
    """While one round trip is under way nothing else is sent; what piles up goes out in the next."""
    gate = asyncio.Event()
    append_now = log.append

    async def held_up(batch):
        await gate.wait()
        return await append_now(batch)

    log.append = held_up
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("a")
        for letter in "bcdef":
            await asyncio.sleep(0.003)
            reply.delta(letter)
        gate.set()
        assert await reply.flush(5)
    assert [event.text for _, _, event in logged(log)] == ["a", "bcdef"]


# Order and numbers ----------------------------------------------------------------------------------------------------


async def test_events_keep_their_place_between_the_text_and_numbers_have_no_gap(make_writer, log, audience):
    writer = make_writer()
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.event(CONTEXT)
        reply.delta("before ")
        reply.event(ToolCall(id="1", tool="clock", arguments="{}"))
        reply.delta("after")
        assert (reply.last_seq, reply.text) == (3, "before after")
        assert reply.checkpoint() == (3, "before ")
        assert reply.seal() == 5
        assert reply.checkpoint() == (4, "before after")
        reply.event(DONE)
        await reply.close(600)
    names = [(seq, name) for seq, name, _ in logged(log)]
    assert names == [(1, "context"), (2, "delta"), (3, "tool_call"), (4, "delta"), (5, "done")]
    assert audience.told == [(A, seq) for seq in range(1, 6)]
    assert audience.held == []


async def test_a_new_attempt_goes_on_after_the_last_event_of_the_old_one(make_writer, log):
    writer = make_writer()
    async with running(writer.run()):
        old = await writer.open(A, 1)
        old.event(CONTEXT)
        await old.close(None)
        new = await writer.open(A, 2)
        assert new.last_seq == 1
        new.delta("text")
        assert await new.flush(5)
    assert [(entry.attempt, entry.seq) for entry in log._logs[A].entries] == [(1, 1), (2, 2)]


async def test_a_caller_that_knows_of_more_than_the_log_goes_on_after_that(make_writer, log):
    writer = make_writer()
    async with running(writer.run()):
        reply = await writer.open(A, 3, after=41)
        reply.event(DONE)
        assert await reply.flush(5)
    assert [(seq, name) for seq, name, _ in logged(log)] == [(42, "done")]


async def test_a_run_nobody_has_claimed_can_be_ended(make_writer, log):
    writer = make_writer()
    async with running(writer.run()):
        reply = await writer.open(A, 0)
        reply.event(DONE)
        await reply.close(600)
    assert [entry.attempt for entry in log._logs[A].entries] == [1]


async def test_a_text_in_a_thousand_pieces_stays_whole(make_writer, log):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        for number in range(1000):
            reply.delta(f"{number} ")
            reply.event(CONTEXT)
        assert reply.checkpoint() == (2000, reply.text)
        assert await reply.flush(5)
    assert text_in(log) == reply.text == "".join(f"{number} " for number in range(1000))


async def test_nul_and_lone_surrogates_never_reach_the_log(make_writer, log):
    writer = make_writer()
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("a\x00b\ud800c")
        assert await reply.flush(5)
        assert reply.text == "a\ufffdb\ufffdc"
    assert text_in(log) == reply.text


async def test_nothing_is_taken_after_the_end(make_writer, log):
    writer = make_writer()
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("text")
        reply.seal()
        reply.delta("too late")
        reply.event(DONE)
        await reply.close(600)
        reply.delta("far too late")
        reply.event(CONTEXT)
        assert not await reply.flush(5)
        await reply.close(600)
    assert reply.text == "text"
    assert [name for _, name, _ in logged(log)] == ["delta", "done"]
    assert writer.open_replies == 0


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
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("here")
        assert await reply.flush(5)
        log.away = True
        reply.delta(" gone")
        await asyncio.sleep(0.9)
        looks = log.looks
        log.away = False
        assert await reply.flush(5)
    assert 3 <= looks <= 7


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


# Fencing --------------------------------------------------------------------------------------------------------------


async def test_a_fenced_reply_is_given_up_and_the_others_go_on(make_writer, log, audience):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply, other = await writer.open(A, 1), await writer.open(B, 1)
        await log.open(A, 2)
        reply.delta("stale")
        other.delta("fresh")
        assert await other.flush(5)
        await until(lambda: reply.fenced)
        reply.delta("never")
        reply.event(DONE)
        assert not await reply.flush(5)
        await reply.close(600)
    assert reply.text == "stale"
    assert logged(log) == []
    assert log._logs[A].expires_at is None
    assert text_in(log, B) == "fresh"
    assert audience.held == [B]


async def test_a_stale_attempt_cannot_even_begin(make_writer, log):
    writer = make_writer()
    await log.open(A, 2)
    with pytest.raises(Fenced):
        await writer.open(A, 1)
    assert writer.open_replies == 0


async def test_a_discarded_reply_writes_nothing_more_and_does_not_begin_its_log_anew(make_writer, log, leases):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("one")
        assert await reply.flush(5)
        await log.delete([A])
        reply.delta("two")
        reply.discard()
        other = await writer.open(B, 1)
        other.delta("x")
        assert await other.flush(5)
    assert A not in log._logs
    assert leases.asked == []


async def test_a_reply_that_was_given_up_does_not_let_the_log_of_its_successor_expire(make_writer, log):
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.discard()
        await log.open(A, 2)
        await reply.close(600)
    assert log._logs[A].expires_at is None


async def test_closing_the_writer_lets_everybody_go(make_writer, log, audience):
    writer = make_writer()
    reply = await writer.open(A, 1)
    reply.delta("text")
    flush = asyncio.create_task(reply.flush(30))
    await asyncio.sleep(0)
    await writer.aclose()
    assert await soon(flush) is False
    assert audience.held == []


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


async def test_a_checkpoint_is_what_a_reader_of_the_log_has_at_that_number(make_writer, log):
    writer = make_writer(batch_ms=1, batch_tokens=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        for number in range(10):
            reply.delta(f"{number} ")
            if number % 3 == 0:
                assert await reply.flush(5)
                assert text_through(log._logs[A].entries) == reply.checkpoint()
