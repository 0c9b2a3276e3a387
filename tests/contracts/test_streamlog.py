"""The contract of a stream log, S1-S13, over every backend; S10 is of servers only, and has a suite of its own."""

import asyncio
import time

import pytest
from redis_groups import Cluster, SentinelGroup
from streaming import append, delta, running, soon

from chatsvc.events import MAX_SEQ, Entry
from chatsvc.streamlog.base import AppendResult, Fenced, Position
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.memory import MemoryLog

OK, FENCED, LOST = AppendResult.OK, AppendResult.FENCED, AppendResult.LOST
A, B, C = "resp_local_a", "resp_local_b", "resp_local_c"


@pytest.fixture(scope="module")
def sentinel(tmp_path_factory):
    with SentinelGroup(tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as group:
        yield group


@pytest.fixture
def sentinel_url(sentinel):
    sentinel.master.admin.flushall()
    return sentinel.url


@pytest.fixture
def cluster_url(cluster):
    cluster.flush()
    return cluster.url


@pytest.fixture(params=["memory", "redis", "sentinel", "cluster"])
def make_log(request):
    """A function that gives one more door to the same logs, as another process would have."""
    if request.param == "memory":
        log = MemoryLog()
        return lambda: log
    url = request.getfixturevalue(f"{request.param}_url")
    return lambda: create_log(url, timeout_s=5)


@pytest.fixture
async def log(make_log):
    log = make_log()
    yield log
    await log.aclose()


async def gone(log, response_id):
    """Wait until there is no such log."""
    while await log.position(response_id) is not None:
        await asyncio.sleep(0.01)


async def test_s1_an_older_attempt_is_refused_for_good_once_a_newer_one_has_opened(log):
    await log.open(A, 1)
    assert await log.append([append(A, delta(1))]) == [OK]
    assert await log.open(A, 2) == 1
    assert await log.append([append(A, delta(2))]) == [FENCED]
    assert await log.append([append(A, delta(2), delta(3))]) == [FENCED]
    assert await log.append([append(A, delta(2), recreate=True)]) == [FENCED]
    assert await log.append([append(A, delta(2, attempt=2))]) == [OK]
    assert await log.append([append(A, delta(99))]) == [FENCED]
    with pytest.raises(Fenced):
        await log.open(A, 1)
    assert [(entry.attempt, entry.seq) for entry in (await log.read(A, 0)).entries] == [(1, 1), (2, 2)]


async def test_s1_the_same_attempt_may_open_again_and_learns_what_is_there(log):
    assert await log.open(A, 1) == 0
    assert await log.open(A, 1) == 0
    await log.append([append(A, delta(1), delta(2))])
    assert await log.open(A, 1) == 2
    assert await log.append([append(A, delta(3))]) == [OK]


async def test_s1_the_last_event_is_found_behind_many_attempts_that_wrote_nothing(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1), delta(2), delta(3))])
    for attempt in range(2, 30):
        assert await log.open(A, attempt) == 3
    page = await log.read(A, 0)
    assert (page.first, page.last, len(page.entries)) == (1, 3, 3)
    assert (await log.read(A, 3)).position == Position(29, 0)


async def test_s1_the_first_event_is_found_behind_many_attempts_that_wrote_nothing(log):
    for attempt in range(1, 30):
        await log.open(A, attempt)
    await log.append([append(A, delta(1, attempt=29))])
    page = await log.read(A, 0)
    assert (page.first, page.last) == (1, 1)
    assert [entry.seq for entry in (await log.read(A, 0, 1)).entries] == [1]


async def test_s2_an_append_that_does_not_rise_changes_nothing(log):
    await log.open(A, 1)
    await log.append([append(A, delta(5))])
    assert await log.append([append(A, delta(5, "other"))]) == [FENCED]
    assert await log.append([append(A, delta(4))]) == [FENCED]
    assert [entry.data for entry in (await log.read(A, 0)).entries] == [delta(5).data]


async def test_s3_a_log_that_is_not_there_is_lost_unless_it_may_be_started_anew(log):
    assert await log.append([append(A, delta(7))]) == [LOST]
    assert await log.append([append(A, delta(7), delta(8))]) == [LOST]
    assert await log.position(A) is None
    assert await log.append([append(A, delta(7), recreate=True)]) == [OK]
    assert await log.append([append(B, delta(7), delta(8), recreate=True)]) == [OK]
    assert (await log.read(A, 0)).first == 7
    assert await log.position(B) == Position(1, 8)


async def test_s4_a_batch_holds_the_entries_of_many_logs_with_a_result_for_each(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
    await log.open(B, 2)
    batch = [append(A, delta(1)), append(B, delta(1)), append(C, delta(1)), append(A, delta(2), delta(3))]
    assert await log.append(batch) == [OK, FENCED, LOST, OK]


async def test_s5_an_append_of_several_entries_is_taken_whole_or_not_at_all(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1), delta(2))])
    assert await log.append([append(A, delta(2), delta(3), delta(4))]) == [FENCED]
    assert await log.position(A) == Position(1, 2)
    assert await log.append([append(A, delta(3), delta(4))]) == [OK]
    assert await log.append([append(A, delta(4), delta(5), recreate=True)]) == [FENCED]
    assert await log.position(A) == Position(1, 4)


async def test_s6_entries_come_back_byte_for_byte_and_in_order(log):
    await log.open(A, 1)
    awkward = [b"", b"\r\n$5\r\n", bytes(range(256)), "data: x\n\nid: 9\n\n\u2028\U0001f469\u200d\U0001f469".encode()]
    entries = [Entry(1, seq, "delta", data) for seq, data in enumerate(awkward, 1)]
    for entry in entries:
        assert await log.append([append(A, entry)]) == [OK]
    assert list((await log.read(A, 0)).entries) == entries
    assert list((await log.tail({A: Position(0, 0)}, 1))[A]) == entries


async def test_s6_fence_marks_are_never_returned(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    await log.open(A, 2)
    await log.append([append(A, delta(2, attempt=2))])
    assert [entry.seq for entry in (await log.read(A, 0)).entries] == [1, 2]
    assert [entry.seq for entry in (await log.tail({A: Position(1, 1)}, 1))[A]] == [2]


async def test_s6_a_page_ends_where_the_next_one_goes_on(log):
    await log.open(A, 1)
    await log.append([append(A, *(delta(seq) for seq in range(1, 11)))])
    await log.open(A, 2)
    await log.append([append(A, *(delta(seq, attempt=2) for seq in range(11, 21)))])
    seen, after = [], 0
    while page := (await log.read(A, after, 3)).entries:
        assert len(page) <= 3
        seen += [entry.seq for entry in page]
        after = seen[-1]
    assert seen == list(range(1, 21))
    page = await log.read(A, 4, 3)
    assert (page.position, page.first, page.last) == (Position(1, 7), 1, 20)


async def test_s6_the_last_event_is_the_newest_attempts_though_an_older_one_counted_further(log):
    await log.open(A, 1)
    await log.append([append(A, delta(8), delta(9))])
    await log.open(A, 2)
    await log.append([append(A, delta(1, attempt=2), delta(2, attempt=2), recreate=True)])
    for after, limit in ((8, 1), (8, 9), (0, 9), (0, 1)):
        assert (await log.read(A, after, limit)).last == 2


async def test_s6_a_cursor_beyond_everything_is_answered_with_what_there_is(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1), delta(2))])
    for cursor in (2, 3, MAX_SEQ, 10**30):
        page = await log.read(A, cursor)
        assert (page.entries, page.first, page.last, page.position) == ((), 1, 2, Position(1, 2))
    missing = await log.read(B, 0)
    assert (missing.entries, missing.first, missing.last, missing.position) == ((), 0, 0, Position(0, 0))


async def test_s7_the_tail_returns_what_is_already_there(log):
    await log.open(A, 1)
    await log.open(B, 1)
    await log.append([append(A, delta(1), delta(2)), append(B, delta(1))])
    heard = await log.tail({A: Position(1, 1), B: Position(1, 1), C: Position(0, 0)}, 5)
    assert {key: [entry.seq for entry in entries] for key, entries in heard.items()} == {A: [2]}


async def test_s7_the_tail_returns_as_soon_as_something_is_appended(log, make_log):
    writer = make_log()
    tail = asyncio.create_task(log.tail({A: Position(0, 0), B: Position(0, 0)}, 30))
    await writer.open(B, 1)
    await writer.append([append(B, delta(1))])
    assert [entry.seq for entry in (await soon(tail))[B]] == [1]
    await writer.aclose()


async def test_s7_a_fence_mark_alone_does_not_end_the_wait(log, make_log):
    writer = make_log()
    await writer.open(A, 1)
    await writer.append([append(A, delta(1))])
    tail = asyncio.create_task(log.tail({A: Position(1, 1)}, 30))
    await writer.open(A, 2)
    await writer.append([append(A, delta(2, attempt=2))])
    assert [entry.seq for entry in (await soon(tail))[A]] == [2]
    await writer.aclose()


async def test_s7_wake_ends_the_wait_and_only_that(log):
    await log.open(A, 1)
    for _ in range(200):
        tail = asyncio.create_task(log.tail({A: Position(1, 0)}, 30))
        await asyncio.sleep(0)
        log.wake()
        assert await soon(tail) == {}
    await log.append([append(A, delta(1))])
    assert [entry.seq for entry in (await log.tail({A: Position(1, 0)}, 30))[A]] == [1]


async def test_s7_the_tail_returns_empty_handed_after_its_time(log):
    began = time.monotonic()
    assert await log.tail({A: Position(0, 0)}, 0.2) == {}
    assert await log.tail({}, 0.1) == {}
    assert time.monotonic() - began >= 0.28


async def test_s7_following_every_position_the_tail_gives_misses_nothing(log, make_log):
    writer, seen = make_log(), []
    await writer.open(A, 1)

    async def write():
        for seq in range(1, 301):
            assert await writer.append([append(A, delta(seq))]) == [OK]

    async def follow():
        position = Position(0, 0)
        while len(seen) < 300:
            for entry in (await log.tail({A: position}, 5)).get(A, ()):
                seen.append(entry.seq)
                position = Position(entry.attempt, entry.seq)

    await soon(asyncio.gather(write(), follow()))
    assert seen == list(range(1, 301))
    await writer.aclose()


async def test_s8_after_thousands_of_cancellations_everybody_still_gets_their_own(log):
    ids = [f"resp_local_{number}" for number in range(20)]
    for number, response_id in enumerate(ids):
        await log.open(response_id, 1)
        await log.append([append(response_id, delta(1, f"text of {number}"))])

    async def read(number):
        page = await log.read(ids[number], 0)
        assert page.entries[0].data == delta(1, f"text of {number}").data
        return 1

    tasks = []
    for turn in range(3000):
        task = asyncio.create_task(read(turn % 20))
        tasks.append(task)
        if turn % 3:
            # Cancelled at once, after it has been sent, or whenever the answer is half there.
            asyncio.get_running_loop().call_later((turn % 7) * 0.0003, task.cancel)
        if turn % 50 == 0:
            await asyncio.sleep(0)
    outcomes = await soon(asyncio.gather(*tasks, return_exceptions=True))
    assert {type(outcome) for outcome in outcomes} <= {int, asyncio.CancelledError}
    assert outcomes.count(1) >= 1000


async def test_s8_a_cancelled_tail_leaves_nothing_to_the_next_one(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    for _ in range(20):
        tail = asyncio.create_task(log.tail({B: Position(0, 0)}, 30))
        await asyncio.sleep(0.002)
        tail.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tail
        assert list(await log.tail({A: Position(0, 0)}, 5)) == [A]


async def test_s9_an_expired_log_is_gone_when_its_time_has_come_and_not_before(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
        await log.append([append(response_id, delta(1))])
    await log.expire([A], 0.05)
    await log.expire([B], 60)
    await soon(gone(log, A))
    assert (await log.read(A, 0)).last == 0
    assert await log.append([append(A, delta(2))]) == [LOST]
    assert (await log.read(B, 0)).last == 1


async def test_s9_a_deleted_log_is_gone_at_once_and_is_not_begun_again_by_accident(log):
    await log.open(A, 1)
    await log.append([append(A, delta(1))])
    await log.delete([A, B])
    assert await log.position(A) is None
    assert await log.append([append(A, delta(2))]) == [LOST]
    await log.delete([])
    await log.expire([], 5)


async def test_s9_opening_again_takes_an_expiry_back(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
    await log.expire([A], 0.2)
    await log.open(A, 2)
    await log.expire([B], 0.2)
    await soon(gone(log, B))
    assert await log.append([append(A, delta(1, attempt=2))]) == [OK]


async def test_ping_answers(log):
    await log.ping()


async def test_a_cluster_sees_three_connections_per_partition_whatever_happens(cluster, cluster_url):
    log = create_log(cluster_url, timeout_s=5, partitions=4)
    names = [f"resp_local_{number}" for number in range(100)]
    before = sum(len(node.admin.client_list()) for node in cluster.masters)
    for _ in range(3):
        async with running(log.tail({name: Position(0, 0) for name in names}, 30)):
            await asyncio.gather(*(log.open(name, 1) for name in names))
            await log.append([append(name, delta(1)) for name in names])
            await asyncio.gather(*(log.read(name, 0) for name in names))
            assert sum(len(node.admin.client_list()) for node in cluster.masters) - before <= 3 * 4
        await log.delete(names)
    await log.aclose()


async def test_s11_a_note_of_readers_is_seen_by_every_process_and_grows_old(make_log):
    here, there = make_log(), make_log()
    assert await there.unread_s([A, B]) == [None, None]
    await here.note_read([A])
    first, never = await there.unread_s([A, B])
    assert 0 <= first < 5
    assert never is None
    async with asyncio.timeout(60):
        while (await there.unread_s([A]))[0] <= first:
            await asyncio.sleep(0.002)
    await there.delete([A])
    assert await here.unread_s([A]) == [None]
    assert (await here.unread_s([])) == []
    await here.aclose()
    await there.aclose()


async def test_s12_the_time_without_a_loss_is_the_same_for_every_process_and_grows(make_log):
    here, there = make_log(), make_log()
    await here.open(A, 1)
    first = await there.unbroken_s(A)
    assert 0 <= first < 60
    async with asyncio.timeout(60):
        while await there.unbroken_s(A) <= first:
            await asyncio.sleep(0.002)
    await there.open(A, 2)
    assert await here.unbroken_s(A) > first
    await here.aclose()
    await there.aclose()


async def test_s13_the_oldest_attempt_is_that_of_the_first_mark_or_entry_whatever_came_later(log):
    assert (await log.read(A, 0)).oldest_attempt == 0
    for attempt in range(2, 12):
        await log.open(A, attempt)
        for after in (0, 5):
            assert (await log.read(A, after)).oldest_attempt == 2
    await log.append([append(A, *(delta(seq, attempt=11) for seq in range(1, 8)))])
    await log.open(A, 12)
    for after, limit in ((0, 1), (0, 9), (5, 1), (7, 9)):
        assert (await log.read(A, after, limit)).oldest_attempt == 2


async def test_s13_a_log_that_was_lost_does_not_speak_of_the_attempts_before_that(log):
    for response_id in (A, B):
        await log.open(response_id, 1)
        await log.append([append(response_id, delta(1))])
    await log.delete([A, B])
    assert (await log.read(A, 0)).oldest_attempt == 0
    await log.open(A, 3)
    await log.append([append(B, delta(2, attempt=2), delta(3, attempt=2), recreate=True)])
    assert [(await log.read(response_id, 0)).oldest_attempt for response_id in (A, B)] == [3, 2]
