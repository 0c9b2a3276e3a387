"""Whole turns: each from a user message to the next, so a tool's result stays with its call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from chatsvc.conversation import Role


class _Spoken(Protocol):
    @property
    def role(self) -> Role: ...


M = TypeVar("M", bound=_Spoken)


def turns(messages: Iterable[M]) -> Iterator[list[M]]:
    """The turns, in order. What comes before the first user message belongs to the first turn."""
    turn: list[M] = []
    asked = False
    for message in messages:
        if message.role is Role.USER:
            if asked:
                yield turn
                turn = []
            asked = True
        turn.append(message)
    if turn:
        yield turn
