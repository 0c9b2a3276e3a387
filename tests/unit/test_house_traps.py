"""The table of traps in tests/README.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"`([a-z]+/test_\w+\.py)::(test_\w+)`")


def rows():
    lines = (TESTS / "README.md").read_text().partition("## Traps")[2].splitlines()
    return [line for line in lines if line.startswith("| ") and "its test" not in line]


def test_every_row_of_the_table_of_traps_names_a_test():
    assert len(rows()) > 30
    assert [row for row in rows() if not NAMED.search(row)] == []


def test_every_test_named_in_the_table_of_traps_exists():
    named = [found for row in rows() for found in NAMED.findall(row)]
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).exists()
        or not re.search(rf"^(?:async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
    ]
    assert missing == []
