"""Where turns go: to the replica that has their prefix, unless it is crowded; and little moves when replicas do."""

import math
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from chatsvc.scheduler.routing import CROWDED, HOP_S, NEVER_CROWDED, Choice, Replica, Why, choose, hashed, may_take

CONVERSATIONS = [f"conv_{number}" for number in range(2000)]
fleets = st.lists(st.integers(1, 64), min_size=2, max_size=8).map(
    lambda slots: [Replica(id=f"r{number}", slots=count) for number, count in enumerate(slots)]
)


def loaded(**loads):
    return [Replica(id=name, slots=16, load=load) for name, load in loads.items()]


def test_a_turn_goes_to_the_replica_that_served_the_last_one():
    for conversation in CONVERSATIONS[:50]:
        assert choose(conversation, loaded(a=5, b=5, c=5), "b") == Choice("b", Why.HOME)


def test_a_conversation_without_a_home_goes_where_the_hash_says_from_every_replica_alike():
    for conversation in CONVERSATIONS[:50]:
        fleet = loaded(a=0, b=0, c=0)
        chosen = choose(conversation, fleet, None)
        assert chosen == choose(conversation, fleet[::-1], "gone")
        assert chosen == Choice(hashed(conversation, fleet), Why.HASHED)


def test_a_crowded_home_is_left_for_the_least_loaded_when_the_hash_gives_it_too():
    fleet = loaded(a=30, b=10, c=9)
    conversation = next(name for name in CONVERSATIONS if hashed(name, fleet) == "a")
    assert choose(conversation, fleet, "a") == Choice("c", Why.LEAST_LOADED)


def test_a_nearly_idle_home_is_not_crowded_though_the_others_have_nothing_to_do():
    assert choose("x", loaded(a=3, b=0, c=0), "a") == Choice("a", Why.HOME)
    assert choose("x", loaded(a=4, b=0, c=0), "a").replica_id != "a"


def test_without_places_there_is_no_choice():
    assert choose("x", [Replica(id="a", slots=0)], "a") is None
    assert hashed("x", []) is None


@given(fleets, st.data())
def test_a_replica_that_goes_moves_its_own_conversations_and_no_other(fleet, data):
    gone = data.draw(st.sampled_from(fleet))
    rest = [replica for replica in fleet if replica is not gone]
    for conversation in CONVERSATIONS[:200]:
        before, after = hashed(conversation, fleet), hashed(conversation, rest)
        assert before in (after, gone.id)


@given(st.integers(0, 2**16))
def test_a_replica_that_comes_takes_its_share_by_capacity(seed):
    fleet = [Replica(id=f"{seed}-{number}", slots=slots) for number, slots in enumerate((8, 16, 32))]
    more = [*fleet, Replica(id=f"{seed}-new", slots=24)]
    moved = [name for name in CONVERSATIONS if hashed(name, fleet) != hashed(name, more)]
    share = 24 / 80
    spread = 5 * math.sqrt(share * (1 - share) / len(CONVERSATIONS))
    assert all(hashed(name, more) == f"{seed}-new" for name in moved)
    assert abs(len(moved) / len(CONVERSATIONS) - share) < spread


def test_shares_of_the_hash_are_those_of_the_capacities():
    fleet = [Replica(id=f"r{number}", slots=slots) for number, slots in enumerate((10, 20, 30, 40))]
    counts = Counter(hashed(f"c{number}", fleet) for number in range(20_000))
    for replica in fleet:
        assert abs(counts[replica.id] / 20_000 - replica.slots / 100) < 0.015


@given(fleets, st.integers(0, 2**32))
def test_no_replica_gets_more_than_its_share_and_a_quarter_when_load_is_counted_at_dispatch(fleet, seed):
    """A burst to whose every turn one home is known, as after a popular start: nobody is buried under it."""
    chance = random.Random(seed)
    loads = {replica.id: 0 for replica in fleet}
    slots = {replica.id: replica.slots for replica in fleet}
    total = sum(slots.values())
    for number in range(2 * total):
        now = [Replica(id=name, slots=slots[name], load=load) for name, load in loads.items()]
        chosen = choose(chance.choice(CONVERSATIONS), now, fleet[0].id).replica_id
        loads[chosen] += 1
        share = (number + 1) * slots[chosen] / total
        most = max(math.ceil(CROWDED * share), math.ceil(NEVER_CROWDED * slots[chosen]))
        # The least loaded is never above the mean by more than the one run that it was given.
        assert loads[chosen] <= max(most, math.ceil(share) + 1)


def test_a_cold_turn_may_be_taken_as_soon_as_its_home_had_the_time_to_and_a_warm_one_later():
    assert not may_take(waited_s=HOP_S / 2, lost_tokens=0, token_s=0.001)
    assert may_take(waited_s=HOP_S, lost_tokens=0, token_s=0.001)
    assert not may_take(waited_s=1.9, lost_tokens=2000, token_s=0.001)
    assert may_take(waited_s=2.0, lost_tokens=2000, token_s=0.001)
