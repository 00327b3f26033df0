"""Each invariant of docs/exactly-once.md has a test that is named after it."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "exactly-once.md").read_text().split("\n## Invariants and their tests\n")[1]
INVARIANTS = re.findall(r"^\| ([a-z-]+) \|", TABLE, re.MULTILINE)[1:]
SOURCES = [path.read_text() for path in TESTS.rglob("test_*.py")]


def test_the_table_has_the_invariants_of_the_design() -> None:
    assert len(INVARIANTS) == 20


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_an_invariant_has_a_test_named_after_it(invariant: str) -> None:
    name = f"def test_{invariant.replace('-', '_')}_"
    assert any(name in source for source in SOURCES)
