"""How long a reply is likely to be."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_NOTHING: Final = (0.0, 0.0)


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
        return min(self.mean(user_id, self.usual), float(max_tokens))

    def mean(self, user_id: str, usual: float) -> float:
        """Expected output tokens of this user's next reply, without a limit, where so many are usual."""
        total, count = self._users.get(user_id, _NOTHING)
        return (total + self.GUESS_COUNTS * usual) / (count + self.GUESS_COUNTS)

    def observe(self, user_id: str, output_tokens: int) -> None:
        """Learn from a reply that came to its own end; one cut short says nothing about lengths."""
        self._total = self._total * self.MODEL_FADE + output_tokens
        self._count = self._count * self.MODEL_FADE + 1.0
        total, count = self._users.get(user_id, _NOTHING)
        self._users[user_id] = (total * self.FADE + output_tokens, count * self.FADE + 1.0)
        self._users.move_to_end(user_id)
        while len(self._users) > self._most_users:
            self._users.popitem(last=False)

    def __len__(self) -> int:
        """How many users are remembered."""
        return len(self._users)
