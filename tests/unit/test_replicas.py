"""Replicas that hear of each other through what they share: each run starts once, and none waits for ever."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replica_processes import MODEL, Process, processes, run, until
from streaming import soon

from chatsvc.scheduler import fleet as fleet_module
from chatsvc.scheduler import replicas as replicas_module
from chatsvc.scheduler.news import End, Held, News, Places, encode
from chatsvc.scheduler.routing import Why
from chatsvc.scheduler.shared_state import Board, Home


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The same in a tenth of the time."""
    monkeypatch.setattr(replicas_module, "TICK_S", 0.02)
    monkeypatch.setattr(replicas_module, "ALONE_TICK_S", 0.04)
    monkeypatch.setattr(replicas_module, "WHOLE_S", 0.1)
    monkeypatch.setattr(replicas_module, "OVERHEARD_S", 0.05)


async def test_a_run_is_served_by_the_home_it_was_posted_to_from_elsewhere():
    async with processes("a", "b") as (a, b):
        for number in range(5):
            assert a.post(run(number), Home("b", 90)).why is Why.HOME
            await until(lambda number=number: b.postgres.ended[f"run{number:05}"])
        assert len(b.served) == 5
        assert b.replicas.came == {"home": 5}


async def test_a_replica_alone_chooses_nothing_asks_nobody_and_says_only_that_it_lives():
    board = Board()
    heard = asyncio.Queue()
    async with processes("a", board=board) as (a,):
        board.listeners.append(heard)
        board.homes["m:conv1"] = Home("z", 1)
        assert await a.replicas.home(MODEL, "conv1") is None
        assert a.post(run(1)) is None
        await until(lambda: a.postgres.ended["run00001"])
        news = replicas_module.decode(await heard.get())
        assert (news.held, news.posted) == ([], [])
        await until(lambda: not a.lines.line(MODEL).flights._moved)  # nobody is told, and nothing piles up


async def test_where_a_turn_was_served_is_noted_for_the_next_one():
    async with processes("a", "b") as (a, b):
        a.post(run(1, conversation="c"), Home("b"))
        await until(lambda: b.postgres.ended["run00001"])

        async def noted():
            while await a.replicas.home(MODEL, "c") != Home("b", 120):
                await asyncio.sleep(0.01)

        await soon(noted())
        assert await a.replicas.home("another model", "c") is None  # which has a prefix of its own


async def test_a_newcomer_finds_the_homes_of_what_was_served_before_it_came():
    board = Board()
    async with processes("a", board=board) as (a,):
        a.post(run(1, conversation="c"))
        await until(lambda: a.postgres.ended["run00001"])
        b = Process("b", board, a.postgres)
        await until(lambda: board.homes.get("m:c") == Home("a", 120))
        await b.close()


async def test_an_idle_replica_takes_a_cold_turn_and_leaves_a_warm_one_while_reading_anew_would_take_longer():
    async with processes("a", "b") as (a, b):
        b.holds = True  # as if all its places were taken
        a.lines.line(MODEL)._read_s, a.lines.line(MODEL)._read_tokens = 10.0, 1.0  # ten seconds a token
        a.post(run(1, conversation="warm"), Home("b", 90))
        a.post(run(2, user="bob", conversation="cold"), Home("b", 0))
        await until(lambda: a.postgres.ended["run00002"])
        assert a.served == ["run00002"]
        assert a.replicas.came == {"stolen": 1}
        b.holds = False
        await until(lambda: a.postgres.ended["run00001"])
        assert b.served == ["run00001"]


@pytest.fixture
def patient(monkeypatch):
    """No replica is taken for silent until it is: this process may be held up, and so all replicas in it."""
    monkeypatch.setattr(fleet_module, "SILENT_S", 3600.0)


async def falls_silent(process, monkeypatch):
    await process.close()
    monkeypatch.setattr(fleet_module, "SILENT_S", 0.3)


async def test_what_waits_for_a_replica_that_fell_silent_is_served_by_the_others(patient, monkeypatch):
    async with processes("a", "b", slots=24) as (a, b):
        a.lines.line(MODEL)._read_s, a.lines.line(MODEL)._read_tokens = 10.0, 1.0
        b.holds = True
        for number in range(6):
            a.post(run(number), Home("b", 90))
        assert a.served == []
        await falls_silent(b, monkeypatch)
        await until(lambda: len(a.served) == 6)
        assert a.replicas.came == {"left": 6}


async def test_a_run_put_back_after_its_worker_died_is_served_before_that_one_is_forgotten(patient, monkeypatch):
    async with processes("a", "b", reply_s=30) as (a, b):
        one = run(1)
        a.post(one, Home("b"))
        await until(lambda: a.lines.line(MODEL).flights.holder(one.id) == "b")
        # A notification that comes late, of when it was posted, is no reason to take it from a replica that lives.
        a.replicas.overhear(one)
        assert not a.replicas._overheard
        assert not a.lines.ids()
        await falls_silent(b, monkeypatch)
        await until(lambda: a.replicas.known == 0)
        a.reply_s = 0.01
        a.postgres.queued[one.id] = one
        a.replicas.overhear(one)
        await until(lambda: a.postgres.ended[one.id], patience_s=fleet_module.GONE_S / 2)
        assert a.served == [one.id]


async def test_what_a_replica_still_writes_that_leaves_is_not_put_back_by_a_late_notification():
    async with processes("a", "b", reply_s=30) as (a, b):
        one = run(1)
        a.post(one, Home("b"))
        await until(lambda: a.lines.line(MODEL).flights.holder(one.id) == "b")
        await b.replicas.leave()
        await until(lambda: not a.fleet.others(MODEL))
        a.replicas.overhear(one)
        assert a.lines.line(MODEL).flights.holder(one.id) == "b"
        assert not a.lines.ids()


async def test_a_replica_that_leaves_is_sent_nothing_more_and_its_runs_are_served_at_once():
    async with processes("a", "b") as (a, b):
        b.holds = True
        a.post(run(1), Home("b", 90))
        await b.replicas.leave()
        await until(lambda: a.postgres.ended["run00001"])
        assert a.post(run(2), Home("b", 90)) is None  # nobody else is left
        await until(lambda: a.postgres.ended["run00002"])


async def test_with_nothing_shared_each_serves_what_postgres_tells_of(monkeypatch):
    monkeypatch.setattr(fleet_module, "SILENT_S", 0.3)
    board = Board()
    async with processes("a", "b", board=board) as (a, b):
        board.away = True
        for number in range(10):
            one = run(number)
            a.postgres.queued[one.id] = one
            for process in (a, b):
                process.replicas.overhear(one)
        await until(lambda: len(a.postgres.ended) == 10)
        await until(lambda: a.replicas.known == b.replicas.known == 0)
        board.away = False
        await a.knows(1)
        await b.knows(1)


async def test_a_run_whose_poster_died_goes_where_the_hash_says():
    async with processes("a", "b") as (a, b):
        for number in range(20):
            one = run(number)
            a.postgres.queued[one.id] = one
            for process in (a, b):
                process.replicas.overhear(one)
        await until(lambda: len(a.postgres.ended) == 20)
        assert a.served
        assert b.served


async def test_a_run_that_a_replica_is_known_to_have_is_looked_for_no_more():
    async with processes("a", "b") as (a, _):
        a.holds = True
        one, other = run(1), run(2)
        a.replicas.overhear(one)
        a.replicas.overhear(other)
        assert len(a.replicas._overheard) == 2
        ended = News(replica="b", models={MODEL: Places(slots=2)}, held=[Held(run=one, end=End.COMPLETE)])
        a.replicas._hear(encode(ended))
        await a.replicas.place([other])
        assert not a.replicas._overheard


async def test_while_nothing_can_be_said_what_waits_is_looked_after_all_the_same(monkeypatch):
    async with processes("a", "b") as (a, _):
        saying = asyncio.Event()

        async def hangs(news):
            saying.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(a.replicas._state, "publish", hangs)
        one = run(1)
        a.replicas.tell_soon()
        await soon(saying.wait())
        a.postgres.queued[one.id] = one
        a.replicas.overhear(one)
        await until(lambda: a.postgres.ended[one.id], patience_s=5)


async def test_a_process_without_engines_knows_places_and_times():
    async with processes("a") as (a,):
        a.writes.clear()
        door = Process("door", Board(), a.postgres, slots=0)
        door.replicas._state._board = a.replicas._state._board
        door.running.cancel()
        door.running = asyncio.create_task(door.replicas.run())
        await door.knows(1)
        await a.knows(1)
        for number in range(5):
            door.post(run(number, user=f"u{number}"))
        await until(lambda: len(door.lines) == 3 and len(a.lines) == 3)
        places = [door.lines.standing(MODEL, f"run{number:05}") for number in range(2, 5)]
        assert [place.position for place, _ in places] == [1, 2, 3]
        a.writes.set()
        await until(lambda: len(a.postgres.ended) == 5)
        await door.close()


async def test_how_full_all_engines_are_together_is_known_to_a_process_without_one():
    board = Board()
    async with processes("a", "b", board=board) as (a, b):
        door = Process("door", board, a.postgres, slots=0)
        await door.knows(2)
        a.holds = True
        a.lines.put(run(1))
        a.lines.take()
        # One of two places at a, none of two at b.
        await until(lambda: door.replicas.fullness(MODEL) == b.replicas.fullness(MODEL) == (4, 0.25, 0.0))
        assert a.replicas.fullness(MODEL) == (4, 0.25, 0.0)
        await b.replicas.leave()
        await until(lambda: door.replicas.fullness(MODEL) == (2, 0.5, 0.0))
        assert b.replicas.fullness(MODEL) == (2, 0.5, 0.0)
        await door.close()


async def test_what_waits_for_a_replica_is_its_load_as_all_others_see_it():
    async with processes("a", "b", slots=4) as (a, b):
        a.holds = b.holds = True
        chosen = [a.post(run(number), Home("b")) for number in range(16)]
        assert Counter(choice.replica_id for choice in chosen)["b"] <= 11
        await until(lambda: len(b.lines) == 16)
        assert b.lines.line(MODEL).load("b") == a.lines.line(MODEL).load("b") > 4


async def test_loads_count_what_is_being_posted_at_the_same_time():
    async with processes("a", "b", slots=4) as (a, b):
        a.holds = b.holds = True
        with contextlib.ExitStack() as posting:
            chosen = [posting.enter_context(a.replicas.choosing(run(number), Home("b"))) for number in range(16)]
        assert Counter(choice.replica_id for choice in chosen)["b"] <= 11  # 1.25 of half, and the least loaded


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), trouble=st.sampled_from(["none", "dies", "shared state away", "leaves"]))
def test_each_run_starts_once_and_none_waits_for_ever(seed, trouble):
    asyncio.run(scenario(random.Random(seed), trouble))


async def scenario(chance, trouble):
    board = Board()
    async with processes("a", "b", "c", board=board) as made:
        postgres = made[0].postgres
        for number in range(120):
            poster = chance.choice(made[:2] if trouble in ("dies", "leaves") else made)
            home = chance.choice([None, Home(chance.choice("abc"), chance.randrange(100))])
            one = run(number, user=f"u{chance.randrange(5)}", conversation=f"conv{chance.randrange(20)}")
            poster.post(one, home)
            for process in made:
                process.replicas.overhear(one)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.01)
            if number == 60:
                if trouble == "dies":
                    await made[2].close()
                if trouble == "leaves":
                    await made[2].replicas.leave()
                board.away = trouble == "shared state away"
            if number == 100:
                board.away = False
        dead = set(made[2].served) - set(postgres.ended) if trouble == "dies" else set()
        await until(lambda: len(postgres.ended) == 120 - len(dead))
        assert set(postgres.begun.values()) == {1}
        assert set(postgres.ended.values()) == {1}
        living = made[:2] if trouble == "dies" else made
        # All copies come to the same: nobody waits, nothing is under way but what a dead one had.
        for process in living:
            await until(lambda process=process: not process.lines.ids() - dead)
            flights = process.lines.line(MODEL).flights
            await until(lambda flights=flights: not flights.own and not set(flights._theirs) - dead)
