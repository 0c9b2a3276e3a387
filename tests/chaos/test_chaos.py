"""A short chaos run: every kind of fault, and no law broken."""

import random

import pytest

from chaos.faults import TRACKS
from chaos.report import table, verdict
from chaos.suite import Options, clear, new_directory, run

SECONDS = 120


@pytest.fixture
def directory():
    made = new_directory()
    print(f"logs of the servers: {made}")
    return made


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_minutes_of_kills_outages_and_cuts_break_no_law(directory):
    options = Options(seed=random.randrange(2**32), seconds=SECONDS)
    print(f"seed {options.seed}")
    result = await run(options, directory)
    print(table(result.figures))
    told = verdict(result)
    clear(directory, logs_too=not result.violations)
    assert not result.violations, told
    assert result.figures["replies"] >= 100
    assert set(result.figures["faults"]) == {name for track in TRACKS for name in track.faults}
