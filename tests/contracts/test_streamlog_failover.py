"""Writer, hub and readers while real servers fail over: under Sentinel, and in a Cluster that loses nodes."""

import asyncio
import contextlib
from contextlib import asynccontextmanager

import pytest
from redis_groups import NOT_KEPT, Cluster, Node, SentinelGroup, until
from streaming import DONE, delta, running, soon
from streaming import append as appended
from two_processes import TwoProcesses, said, say

from chatsvc.errors import LogUnavailable
from chatsvc.streamlog.base import AppendResult, Position
from chatsvc.streamlog.factory import create_log
from chatsvc.streamlog.redis import PARTITIONS, RedisLog, partition
from chatsvc.streamlog.redis_wire import Address

A = "resp_local_a"
FLUSH_S = 40
"""A fail-over takes 2 to 4 seconds here, and longer on a busy machine."""


@asynccontextmanager
async def two_on(url):
    two = TwoProcesses(url)
    try:
        async with running(*two.loops()):
            yield two
    finally:
        await two.aclose()


async def to_thread(call):
    """Servers are waited for without holding up the readers."""
    return await asyncio.to_thread(call)


async def lose_master(sentinel):
    """Kill the one that Sentinel names, and wait until it names another."""
    gone = sentinel.master
    gone.kill()
    await to_thread(lambda: sentinel.fail_over(gone))


def same_for_all(clients, text):
    for client in clients:
        assert client.text == text
        assert client.ids == sorted(set(client.ids)), "an id came twice, or out of order"
        assert client.events[-1][1] == "done"


async def answered(call):
    """What is answered by whoever is master once all know."""
    while True:
        try:
            return await call()
        except LogUnavailable:
            await asyncio.sleep(0.01)


def snapshots(client):
    return [name for _, name, _ in client.events].count("snapshot")


# Sentinel -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sentinel(tmp_path):
    with SentinelGroup(tmp_path) as group:
        yield group


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_l3_a_master_that_is_gone_costs_a_pause_and_nothing_of_what_its_replica_has(sentinel, how):
    async with two_on(sentinel.url) as two:
        reply = await two.begin(A)
        here, there = two.read(0, A), two.read(1, A)
        await say(reply, 0, 20)
        await there.until(lambda client: client.text == said(20))
        await to_thread(lambda: until("the replica is in step", sentinel.in_step))
        getattr(sentinel.master, how)()
        for number in range(20, 30):
            reply.delta(f"{number} ")
        assert await reply.flush(FLUSH_S)
        late = two.read(1, A)
        for client in (here, there, late):
            await client.until(lambda client: client.text == said(30))
        seq = await two.end(reply)
        await two.all_served()
        same_for_all((here, there, late), said(30))
        for client in (here, there, late):
            assert client.ids == list(range(1, seq + 1))
            assert snapshots(client) == 0


async def test_l7_what_a_replica_never_got_is_made_good_by_a_snapshot(sentinel):
    """Replication is asynchronous: entries that were acknowledged, and read, can be lost with a master."""
    async with two_on(sentinel.url) as two:
        reply = await two.begin(A)
        here, there = two.read(0, A), two.read(1, A)
        await say(reply, 0, 10)
        await to_thread(lambda: until("the replica is in step", sentinel.in_step))
        sentinel.master.cut_off_replicas()
        await say(reply, 10, 20)
        for client in (here, there):
            await client.until(lambda client: client.text == said(20))
        await lose_master(sentinel)
        await say(reply, 20, 30, flush_s=FLUSH_S)
        fresh, late = two.read(1, A), two.read(1, A, cursor=here.ids[1])
        await two.end(reply)
        await two.all_served()
        same_for_all((here, there, fresh), said(30))
        assert late.text == said(30)
        assert [snapshots(client) for client in (here, there, fresh)] == [1, 1, 1]


async def test_s12_a_replica_that_took_over_does_not_know_what_its_master_had(sentinel):
    log = create_log(sentinel.url, timeout_s=5)
    await log.open(A, 1)
    assert await log.unbroken_s(A) < 60
    await to_thread(lambda: until("the replica is in step", sentinel.in_step))
    await lose_master(sentinel)
    assert await soon(answered(lambda: log.unbroken_s(A))) == 0
    await log.aclose()


async def test_l7_a_log_that_the_replica_never_heard_of_is_begun_anew(sentinel):
    async with two_on(sentinel.url) as two:
        sentinel.master.cut_off_replicas()
        reply = await two.begin(A)
        here, there = two.read(0, A), two.read(1, A)
        await say(reply, 0, 10)
        await there.until(lambda client: client.text == said(10))
        await lose_master(sentinel)
        await say(reply, 10, 20, flush_s=FLUSH_S)
        await two.end(reply)
        await two.all_served()
        same_for_all((here, there), said(20))


async def test_l1_a_stale_worker_writes_nothing_though_the_mark_that_fenced_it_was_lost(sentinel):
    async with two_on(sentinel.url) as two:
        stale = await two.begin(A)
        await say(stale, 0, 10)
        await to_thread(lambda: until("the replica is in step", sentinel.in_step))
        sentinel.master.cut_off_replicas()
        other = create_log(sentinel.url, timeout_s=5)
        assert await other.open(A, 2) == stale.last_seq
        before = await other.position(A)
        assert before == Position(2, 0)
        two.lost_leases.add((A, 1))
        await lose_master(sentinel)
        stale.delta("too late")
        assert not await stale.flush(FLUSH_S)
        assert stale.fenced
        await other.aclose()
        after = create_log(sentinel.url, timeout_s=5)
        assert await after.position(A) == Position(1, stale.acknowledged)
        await after.aclose()


async def test_a_master_that_steps_down_alive_is_left(sentinel):
    """A fail-over by hand: the old master lives on as a replica, answers, and refuses to write."""
    async with two_on(sentinel.url) as two:
        reply = await two.begin(A)
        here, there = two.read(0, A), two.read(1, A)
        await say(reply, 0, 10)
        old = sentinel.master
        sentinel.sentinels[0].admin.execute_command("SENTINEL", "FAILOVER", sentinel.name)

        async def go_on():
            number = 10
            while sentinel.master is old or number < 30:
                reply.delta(f"{number} ")
                number += 1
                await asyncio.sleep(0.02)
            return number

        last = await go_on()
        await say(reply, last, last + 10, flush_s=FLUSH_S)
        await two.end(reply)
        await two.all_served()
        same_for_all((here, there), said(last + 10))
        assert len(sentinel.master.admin.keys("resp:*")) == 1


async def test_a_server_that_becomes_a_replica_and_keeps_its_connections_is_left(tmp_path):
    """As behind a name that is given to another server, by an operator or a cloud."""
    first, second = nodes = [Node(tmp_path, *NOT_KEPT) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.callback(node.kill)
            node.start()
        named = first

        async def locate(_):
            return Address(host="127.0.0.1", port=named.port)

        log = RedisLog(locate, timeout_s=5)
        await log.open(A, 1)
        await log.note_read([A])
        assert await log.append([appended(A, delta(1))]) == [AppendResult.OK]
        first.admin.execute_command("REPLICAOF", "127.0.0.1", second.port)
        named = second
        await log.note_read([A])
        for reason in ("READONLY", "broke since"):
            with pytest.raises(LogUnavailable, match=reason):
                await log.append([appended(A, delta(2))])
        assert await log.position(A) is None
        assert await log.append([appended(A, delta(2))]) == [AppendResult.LOST]
        assert await log.append([appended(A, delta(2), recreate=True)]) == [AppendResult.OK]
        assert second.admin.exists(f"resp:{tag_of(A)}:{A}", f"read:{tag_of(A)}:{A}") == 2
        await log.aclose()


async def test_a_sentinel_that_is_gone_or_says_nothing_is_passed_over(sentinel):
    sentinel.sentinels[0].kill()
    sentinel.sentinels[1].freeze()
    log = create_log(sentinel.url, timeout_s=8)
    await log.ping()
    assert await log.open(A, 1) == 0
    await log.aclose()
    sentinel.sentinels[1].thaw()


async def test_a_master_that_no_sentinel_knows_is_said_with_its_name(sentinel):
    log = create_log(sentinel.url.replace("/main", "/other"), timeout_s=5)
    with pytest.raises(LogUnavailable, match='no master named "other"'):
        await log.ping()
    await log.aclose()


# Cluster --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def cluster_with_replicas(tmp_path):
    with Cluster(tmp_path, replicas=1) as cluster:
        yield cluster


def tag_of(response_id):
    return f"{{p{partition(response_id, PARTITIONS):02d}}}"


def ids_by_node(cluster, count=60):
    """Response ids by the node that serves them."""
    found = {node: [] for node in cluster.masters}
    for number in range(count):
        response_id = f"resp_local_{number}"
        found[cluster.holder(tag_of(response_id))].append(response_id)
    assert all(found.values()), "every node has something"
    return found


async def hurt_one_node(cluster, two, hurt):
    """Replies on all nodes, one of which is hurt. Returns those of it, with their readers, and the others'."""
    by_node = ids_by_node(cluster)
    names = [name for ids in by_node.values() for name in ids[:4]]
    replies = {name: await two.begin(name) for name in names}
    for reply in replies.values():
        await say(reply, 0, 3)
    readers = {name: [two.read(0, name), two.read(1, name)] for name in names}
    for group in readers.values():
        for client in group:
            await client.until(lambda client: client.text == said(3))
    lost = cluster.masters[1]
    hurt(lost)
    on_lost = set(by_node[lost])
    return (
        lost,
        [(replies[name], readers[name]) for name in names if name in on_lost],
        [(replies[name], readers[name]) for name in names if name not in on_lost],
    )


@pytest.mark.alone
@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_node_that_is_lost_holds_up_the_replies_on_it_and_no_other(cluster, how):
    async with two_on(cluster.url) as two:
        lost, away, well = await hurt_one_node(cluster, two, lambda node: getattr(node, how)())
        loop = asyncio.get_running_loop()
        slowest = 0.0
        for number in range(3, 103):
            for reply, _ in away + well:
                reply.delta(f"{number} ")
            began = loop.time()
            for _, readers in well:
                for client in readers:
                    await client.until(lambda client, number=number: client.text == said(number + 1))
            slowest = max(slowest, loop.time() - began)
        # With a second for each command, waiting for the lost node would show as whole seconds.
        assert slowest < 0.9, slowest
        for reply, readers in well:
            await two.end(reply)
            await soon(asyncio.gather(*(client.following for client in readers)))
            same_for_all(readers, said(103))
            assert [snapshots(client) for client in readers] == [0, 0]
        if how == "kill":
            lost.start()
            await to_thread(lambda: until("the node has its slots again", lambda: len(cluster.slots(lost)) == 3))
        else:
            lost.thaw()
        for reply, _ in away:
            await say(reply, 103, 105, flush_s=FLUSH_S)
            await two.end(reply)
        await two.all_served()
        for _, readers in away:
            same_for_all(readers, said(105))


async def test_a_cluster_can_be_used_as_long_as_one_partition_can(cluster):
    log = create_log(cluster.url, timeout_s=5)
    await log.ping(everywhere=True)
    cluster.masters[0].kill()
    for _ in range(5):
        await log.ping()
    with pytest.raises(LogUnavailable):
        await log.ping(everywhere=True)
    cluster.masters[1].kill()
    cluster.masters[2].kill()
    with pytest.raises(LogUnavailable):
        await log.ping()
    await log.aclose()


async def test_l3_a_replica_takes_over_from_a_node_that_is_killed(cluster_with_replicas):
    cluster = cluster_with_replicas
    async with two_on(cluster.url) as two:
        lost, moved, well = await hurt_one_node(cluster, two, lambda node: node.kill())
        for reply, _ in moved + well:
            await say(reply, 3, 20, flush_s=FLUSH_S)
            await two.end(reply)
        await two.all_served()
        for _, readers in moved + well:
            same_for_all(readers, said(20))
        # And the old one coming back changes nothing.
        lost.start()
        reply = await two.begin(moved[0][0].response_id, 2)
        reply.event(DONE)
        assert await reply.flush(FLUSH_S)


async def test_l7_what_the_replica_of_a_node_never_got_is_made_good_by_a_snapshot(cluster_with_replicas):
    cluster = cluster_with_replicas
    async with two_on(cluster.url) as two:
        reply = await two.begin(A)
        master = cluster.holder(tag_of(A))
        here, there = two.read(0, A), two.read(1, A)
        await say(reply, 0, 10)
        await to_thread(lambda: until("the replica is in step", lambda: master.replicas_in_step(1)))
        master.cut_off_replicas()
        await say(reply, 10, 20)
        await there.until(lambda client: client.text == said(20))
        master.kill()
        await say(reply, 20, 30, flush_s=FLUSH_S)
        fresh = two.read(1, A)
        await two.end(reply)
        await two.all_served()
        same_for_all((here, there, fresh), said(30))
        assert [snapshots(client) for client in (here, there, fresh)] == [1, 1, 1]


async def test_a_slot_that_moves_to_another_node_takes_its_logs_with_it(cluster):
    """ASK while its keys are being moved one by one, MOVED afterwards; nothing is lost at either."""
    async with two_on(cluster.url) as two:
        log = two.logs[0]
        names = [f"resp_local_{n}" for n in range(200) if tag_of(f"resp_local_{n}") == tag_of(A)][:6]
        replies = [await two.begin(name) for name in names]
        readers = [client for name in names for client in (two.read(0, name), two.read(1, name))]
        for reply in replies:
            await say(reply, 0, 10)
        move = cluster.moving(tag_of(A))
        for number in range(3):
            move.key(f"resp:{tag_of(A)}:{names[number]}")
        for reply in replies:
            await say(reply, 10, 20)
        assert await log.append([appended(names[0] + "x", delta(1))]) == [AppendResult.LOST]
        new = await two.begin(names[0] + "new")
        await say(new, 0, 10)
        late = two.read(1, names[0])
        await late.until(lambda client: client.text == said(20))
        move.rest()
        for reply in (*replies, new):
            await say(reply, 20 if reply is not new else 10, 30, flush_s=FLUSH_S)
            await two.end(reply)
        await two.all_served()
        same_for_all((*readers, late), said(30))
        for client in (*readers, late):
            assert snapshots(client) == 0
