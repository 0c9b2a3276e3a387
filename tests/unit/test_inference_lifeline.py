"""What a killed parent leaves behind, and what a proper end leaves alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

PARENT = """
import asyncio, signal, subprocess, sys
from chatsvc.inference.lifeline import Lifeline

async def main():
    ward = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[int(sys.argv[2])])
    lifeline = Lifeline()
    await lifeline.start()
    lifeline.hold(ward.pid)
    if sys.argv[1] == "let go":
        await lifeline.aclose()
    print(ward.pid, flush=True)
    signal.pause()

asyncio.run(main())
"""


@pytest.mark.parametrize(("ending", "ward_dies"), [("killed", True), ("let go", False)])
def test_a_held_process_dies_with_a_killed_parent_unless_the_lifeline_let_go(ending: str, ward_dies: bool):
    # Parent and ward alone hold the writing end of this pipe; when both are dead, the reading end says so.
    reading, writing = os.pipe()
    arguments = [sys.executable, "-c", PARENT, ending, str(writing)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, pass_fds=[writing]) as parent:
        os.close(writing)
        assert parent.stdout is not None
        ward = int(parent.stdout.readline())
        parent.kill()
    try:
        ready, _, _ = select.select([reading], [], [], 10 if ward_dies else 1)
        assert bool(ready) is ward_dies
    finally:
        os.close(reading)
        if not ward_dies:
            os.kill(ward, signal.SIGKILL)
