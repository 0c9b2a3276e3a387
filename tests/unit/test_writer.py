"""The log writer: batching, order, numbers, and who is not let in any more."""

import asyncio

import pytest
from streaming import DONE, running, soon, until
from writer_world import CONTEXT, A, B, logged, text_in

from chatsvc.events import ToolCall
from chatsvc.streamlog.base import Fenced
from chatsvc.streamlog.snapshot import text_through

NEVER_MS = 3_600_000


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
    under_way, gate = asyncio.Event(), asyncio.Event()
    append_now = log.append

    async def held_up(batch):
        under_way.set()
        await gate.wait()
        return await append_now(batch)

    log.append = held_up
    writer = make_writer(batch_ms=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        reply.delta("a")
        await soon(under_way.wait())
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


async def test_a_checkpoint_is_what_a_reader_of_the_log_has_at_that_number(make_writer, log):
    writer = make_writer(batch_ms=1, batch_tokens=1)
    async with running(writer.run()):
        reply = await writer.open(A, 1)
        for number in range(10):
            reply.delta(f"{number} ")
            if number % 3 == 0:
                assert await reply.flush(5)
                assert text_through(log._logs[A].entries) == reply.checkpoint()
