"""Started as root, Postgres gets an account of its own, and what that changes on the machine is said."""

import os

import pytest

from chatsvc.embedded import embedded_postgres

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runs servers under other accounts as root only")


async def test_a_directory_that_was_closed_to_others_is_opened_with_one_plain_line_and_our_own_without_a_word(data_dir):
    closed = data_dir / "home" / "mine"
    ours = closed / "chatsvc"
    for directory in (closed.parent, closed, ours):
        directory.mkdir(mode=0o700)
    said = []
    async with embedded_postgres(ours, said.append):
        pass
    [line] = [line for line in said if "o+x" in line]
    assert str(closed) in line
    assert str(ours) not in line
    assert "root" in line
    assert [path.stat().st_mode & 0o777 for path in (closed.parent, closed, ours)] == [0o701] * 3

    said.clear()
    async with embedded_postgres(ours, said.append):
        pass
    assert said == ["Starting Postgres"]
