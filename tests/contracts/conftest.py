"""Time enough, for suites in which the service would rather go on without something than wait for it."""

import pytest

from chatsvc.scheduler import recall


@pytest.fixture
def recall_has_time(monkeypatch):
    """What was said long ago is looked for until it is found, however busy the machine is."""
    monkeypatch.setattr(recall, "DEADLINE_S", 60.0)
    monkeypatch.setattr(recall, "VECTOR_S", 60.0)
