"""What several suites arrange: a log writer on a log that can be hurt, and logging that is put back as it was."""

import logging

import pytest
import structlog
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


@pytest.fixture
def restored_logging():
    """For tests that configure the logs of the whole process: those after them hear all that is logged, as before."""
    root = logging.getLogger()
    named = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in (root, *named)]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
