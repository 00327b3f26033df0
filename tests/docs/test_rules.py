"""Each rule of exactly once has a test that is named after it, and docs/exactly-once.md says which."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "exactly-once.md"
RULES = range(1, 21)
_NAME = re.compile(r"\btest_rule_(\d+)_\w+")


def rule_tests() -> dict[int, set[str]]:
    """By rule the names of its tests, as they are defined."""
    found: dict[int, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for line in path.read_text().splitlines():
            if line.lstrip().startswith(("def test_rule_", "async def test_rule_")) and (match := _NAME.search(line)):
                assert len(match[1]) == 2, f"{path.name}: {match[0]}: two digits, so that rules sort"
                found.setdefault(int(match[1]), set()).add(match[0])
    return found


def test_every_rule_has_a_test_named_after_it() -> None:
    assert sorted(rule_tests()) == list(RULES)


@pytest.mark.skipif(not PAGE.exists(), reason="docs/exactly-once.md is not written yet")
def test_the_page_lists_tests_for_every_rule_and_only_tests_that_there_are() -> None:
    there = rule_tests()
    named: dict[int, set[str]] = {}
    for match in _NAME.finditer(PAGE.read_text()):
        named.setdefault(int(match[1]), set()).add(match[0])
    assert {rule: names - there.get(rule, set()) for rule, names in named.items() if names - there.get(rule, set())} == {}
    assert [rule for rule in RULES if rule not in named] == []
