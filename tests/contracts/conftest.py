"""What several suites arrange: time enough for recall, and logs of either kind that are new."""

import pytest
from running_scheduler import FickleLog

from chatsvc.scheduler import recall
from chatsvc.streamlog.factory import create_log


@pytest.fixture
def recall_has_time(monkeypatch):
    """What was said long ago is looked for until it is found, however busy the machine is."""
    monkeypatch.setattr(recall, "DEADLINE_S", 60.0)
    monkeypatch.setattr(recall, "VECTOR_S", 60.0)


@pytest.fixture(params=["memory", "redis"])
def make_new_log(request):
    """Makes a log in which there was never anything: its count begins with the first reply."""
    if request.param == "memory":
        return FickleLog
    url = request.getfixturevalue("redis_url")
    return lambda: create_log(url, timeout_s=5)
