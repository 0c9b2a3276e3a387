"""A later day in another time zone, for code that must not mind."""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_LATER = dt.timedelta(days=400, hours=13, minutes=1)


class _Later(dt.datetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
        return dt.datetime.now(tz) + _LATER

    @classmethod
    def today(cls) -> dt.datetime:
        return dt.datetime.now() + _LATER  # noqa: DTZ005 - as the one it stands for


class _LaterDay(dt.date):
    @classmethod
    def today(cls) -> dt.date:
        return _Later.today().date()


@contextmanager
def another_day() -> Iterator[None]:
    """While it holds, every module of the service that asks for the time is told one more than a year from now."""
    stand_ins = {dt.datetime: _Later, dt.date: _LaterDay}
    now, zone = time.time, os.environ.get("TZ")
    patches = [
        mock.patch.object(module, name, stand_ins[value])
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("chatsvc.")
        for name, value in list(vars(module).items())
        if isinstance(value, type) and value in stand_ins
    ]
    patches.append(mock.patch.object(time, "time", side_effect=lambda: now() + _LATER.total_seconds()))
    for patch in patches:
        patch.start()
    os.environ["TZ"] = "Pacific/Kiritimati"
    time.tzset()
    try:
        yield
    finally:
        if zone is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = zone
        time.tzset()
        for patch in reversed(patches):
            patch.stop()
