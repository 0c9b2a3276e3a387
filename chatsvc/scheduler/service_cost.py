"""What a run costs: service, the unit in which an engine is shared; and how long a reply is likely to be."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


class ServiceWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Service of one token of each kind. Only the ratios matter; one uncached prompt token is the unit.

    Reading a prompt is limited by arithmetic and done many tokens at a time; writing is limited by memory bandwidth,
    one token of a sequence a step. A cached prompt token is not computed again, but takes room, and is read at every
    step.
    """

    prompt: Positive = 1.0
    cached: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    output: Positive = 3.0

    def of_prompt(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Service of reading a prompt of which ``cached_tokens`` are served from the prefix cache."""
        cached = min(max(cached_tokens, 0), prompt_tokens)
        return self.prompt * (prompt_tokens - cached) + self.cached * cached

    def of_output(self, output_tokens: float) -> float:
        """Service of writing so many tokens."""
        return self.output * output_tokens


class OutputEstimator:
    """Expected length of replies of one model.

    ``usual`` is what counts in the order of service: the mean over all users. Lengths of replies are spread like those
    of things that end at random, so what is still to come of a reply is about as much as of a new one, however long it
    has been running. A mean, because what users are charged too much or too little then adds up to nothing. Over all
    users, because a user's own last ten replies say little about the next, and every turn of such an estimate would
    move a user with many replies under way by as many times the error.

    ``predict`` is for positions and waiting times: a user's own mean, weighted exponentially and drawn towards that of
    all. The users seen least recently are forgotten.
    """

    FIRST_GUESS: Final = 256.0
    """Tokens of a reply before any was seen. Wrong for the first replies of a new model only."""
    GUESS_COUNTS: Final = 4.0
    """How many replies of one's own what all users do is worth."""
    FADE: Final = 0.9
    """What a reply still counts after one more: about the last ten of a user count."""
    MODEL_FADE: Final = 0.99
    """The same among all users of the model: about the last hundred."""

    def __init__(self, most_users: int = 50_000) -> None:
        self._most_users = most_users
        # It counts as one reply: a few true ones are soon better.
        self._total = self.FIRST_GUESS
        self._count = 1.0
        self._users: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def usual(self) -> float:
        """Mean output tokens of a reply."""
        return self._total / self._count

    def predict(self, user_id: str, max_tokens: int) -> float:
        """Expected output tokens of this user's next reply, at most ``max_tokens``."""
        total, count = self._users.get(user_id, (0.0, 0.0))
        mean = (total + self.GUESS_COUNTS * self.usual) / (count + self.GUESS_COUNTS)
        return min(mean, float(max_tokens))

    def observe(self, user_id: str, output_tokens: int) -> None:
        """Learn from a reply that came to its own end; one cut short says nothing about lengths."""
        self._total = self._total * self.MODEL_FADE + output_tokens
        self._count = self._count * self.MODEL_FADE + 1.0
        total, count = self._users.get(user_id, (0.0, 0.0))
        self._users[user_id] = (total * self.FADE + output_tokens, count * self.FADE + 1.0)
        self._users.move_to_end(user_id)
        while len(self._users) > self._most_users:
            self._users.popitem(last=False)

    def __len__(self) -> int:
        """How many users are remembered."""
        return len(self._users)
