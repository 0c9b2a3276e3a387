"""Those of a process's engines that take work now: one that is away is asked for elsewhere, like one it never had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from chatsvc.inference.base import Engine


class ReadyEngines(Mapping[str, Engine]):
    """A view: what it has changes with what ``is_ready`` says of a model."""

    def __init__(self, engines: Mapping[str, Engine], is_ready: Callable[[str], bool]) -> None:
        self._engines = engines
        self._is_ready = is_ready

    def __getitem__(self, model: str) -> Engine:
        if not self._is_ready(model):
            raise KeyError(model)
        return self._engines[model]

    def __iter__(self) -> Iterator[str]:
        return filter(self._is_ready, self._engines)

    def __len__(self) -> int:
        return sum(1 for _ in self)
