"""``make chaos``: run it, print the report, and say by the exit status whether a law was broken."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path

from chaos.report import table, verdict
from chaos.suite import Options, clear, new_directory, run


def main() -> int:
    """0 when no law was broken, 1 otherwise."""
    arguments = argparse.ArgumentParser(prog="chaos", description=__doc__)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument(
        "--seed", type=int, help="draws the plan of faults and the users' choices; random by default"
    )
    arguments.add_argument("--replicas", type=int, default=3)
    arguments.add_argument("--users", type=int, default=24)
    arguments.add_argument("--json", type=Path, help="write the figures there too")
    given = arguments.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed
    options = Options(seed=seed, seconds=given.minutes * 60, replicas=given.replicas, users=given.users)
    directory = new_directory()
    print(f"seed {seed}, {given.minutes:g} minutes; logs of the servers: {directory}", flush=True)
    result = asyncio.run(run(options, directory))
    print(table(result.figures))
    print(verdict(result))
    clear(directory, logs_too=not result.violations)
    if given.json:
        given.json.write_text(json.dumps(result.figures, indent=1))
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
