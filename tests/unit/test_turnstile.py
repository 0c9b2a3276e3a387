"""Messages are taken in in turn, a few abreast, and nobody who is held up holds up others for long."""

import asyncio

import pytest

from chatsvc.scheduler.turnstile import Turnstile

NEVER_S = 3600.0


class Crowd:
    """Messages that are taken in until they are let go."""

    def __init__(self, turnstile):
        self.turnstile = turnstile
        self.inside = []
        self.let_go = {}

    def come(self, name):
        self.let_go[name] = asyncio.Event()
        return asyncio.create_task(self._take_in(name))

    async def _take_in(self, name):
        async with self.turnstile.turn():
            self.inside.append(name)
            try:
                await self.let_go[name].wait()
            finally:
                self.inside.remove(name)


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_few_are_abreast_and_the_others_follow_in_the_order_they_came():
    crowd = Crowd(Turnstile(2, NEVER_S))
    tasks = [crowd.come(name) for name in "abcd"]
    await settled()
    assert crowd.inside == ["a", "b"]
    crowd.let_go["b"].set()
    await settled()
    assert crowd.inside == ["a", "c"]
    for name in "acd":
        crowd.let_go[name].set()
    await asyncio.gather(*tasks)


async def test_who_is_held_up_holds_up_others_for_a_moment_only():
    crowd = Crowd(Turnstile(1, 0.01))
    stuck, other = crowd.come("stuck"), crowd.come("other")
    crowd.let_go["other"].set()
    await other
    assert crowd.inside == ["stuck"]
    crowd.let_go["stuck"].set()
    await stuck


async def test_who_came_in_without_a_turn_gives_none_back():
    crowd = Crowd(Turnstile(1, 0.01))
    stuck, passing = crowd.come("stuck"), crowd.come("passing")
    crowd.let_go["passing"].set()
    await passing
    crowd.turnstile._patience_s = NEVER_S
    third = crowd.come("third")
    await settled()
    assert crowd.inside == ["stuck"]
    for name in ("stuck", "third"):
        crowd.let_go[name].set()
    await asyncio.gather(stuck, third)


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "inside"])
async def test_who_is_cancelled_leaves_the_turn_to_the_next(waiting):
    crowd = Crowd(Turnstile(1, NEVER_S))
    first, second, third = (crowd.come(name) for name in "abc")
    await settled()
    (second if waiting else first).cancel()
    crowd.let_go["a"].set()
    await settled()
    assert crowd.inside == (["c"] if waiting else ["b"])
    for name in "bc":
        crowd.let_go[name].set()
    await asyncio.gather(first, second, third, return_exceptions=True)
