"""A log writer on a log that can be hurt, for the suites that watch it write; the rest is in ``writer_world``."""

import pytest
from streaming import FragileLog
from writer_world import Audience, Leases

from chatsvc.streamlog.writer import LogWriter


@pytest.fixture
def log():
    return FragileLog()


@pytest.fixture
def audience():
    return Audience()


@pytest.fixture
def leases():
    return Leases()


@pytest.fixture
def make_writer(log, audience, leases):
    def make(*, batch_ms=50, batch_tokens=16):
        return LogWriter(log, audience, batch_ms=batch_ms, batch_tokens=batch_tokens, holds=leases.holds)

    return make
