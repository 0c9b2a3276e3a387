import resource
import socket

import pytest

from chatsvc.api.listener import SPARE_DESCRIPTORS, UNSENT_BYTES, bound, most_connections
from chatsvc.errors import ConfigError


@pytest.mark.parametrize(("heartbeat_s", "user_timeout_ms", "idle_s"), [(15.0, 11_250, 15), (0.4, 300, 1)])
def test_accepted_sockets_notice_peers_that_are_gone_or_read_nothing(heartbeat_s, user_timeout_ms, idle_s):
    with bound("127.0.0.1", 0, heartbeat_s=heartbeat_s) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            accepted, _ = listener.accept()
            with accepted:

                def option(name):
                    return accepted.getsockopt(socket.IPPROTO_TCP, name)

                assert option(socket.TCP_USER_TIMEOUT) == user_timeout_ms
                # A heartbeat is due 9/8 heartbeats after the last event at the latest.
                assert user_timeout_ms / 1000 + heartbeat_s * 9 / 8 < 2 * heartbeat_s
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert (option(socket.TCP_KEEPIDLE), option(socket.TCP_KEEPINTVL)) == (idle_s, idle_s)
                assert option(socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES


def test_an_address_that_is_taken_is_said_with_what_to_do():
    with bound("127.0.0.1", 0, heartbeat_s=15) as listener:
        listener.listen()
        again = bound("127.0.0.1", listener.getsockname()[1], heartbeat_s=15)
        with pytest.raises(ConfigError) as caught:
            again.__enter__()
    assert "choose another CHATSVC_PORT" in caught.value.problems[0]


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        assert most_connections() == hard - SPARE_DESCRIPTORS
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
