"""Room for the large: a run that does not fit is passed by lighter ones, by so many and no more; then room is kept."""

from __future__ import annotations

from typing import Final


class KeptRoom:
    """The one run that did not fit when its turn came, and what has gone before it since.

    At most ``most_passes`` runs pass it, and their service together is at most its own: so it falls behind by no more
    than one run of its own size, and waits for no more than what was under way when the last of them had passed.
    """

    def __init__(self, most_passes: int) -> None:
        self._most_passes: Final = most_passes
        self.run_id: str | None = None
        self._service = 0.0
        self._passes = 0
        self._passed = 0.0

    def keep(self, run_id: str, service: float) -> None:
        """It is this run's turn and it does not fit. Room is kept for one run at a time."""
        if self.run_id is not None:
            return
        self.run_id = run_id
        self._service = service
        self._passes = 0
        self._passed = 0.0

    @property
    def closed(self) -> bool:
        """Whether nothing may pass any more."""
        return self.run_id is not None and self._passes >= self._most_passes

    def lets_pass(self, service: float) -> bool:
        """Whether a run of so much service may go first."""
        return self.run_id is None or (not self.closed and self._passed + service <= self._service)

    def note(self, run_id: str, service: float) -> None:
        """This run goes now."""
        if run_id == self.run_id:
            self.run_id = None
        elif self.run_id is not None:
            self._passes += 1
            self._passed += service
