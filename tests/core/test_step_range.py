"""Ranges of steps: what is read, what is in them, and what is refused."""

import pytest

from headrace.core.ledger import StepRange, StepRangeError


@pytest.mark.parametrize(
    ("text", "steps", "written"),
    [
        ("3..5", {3, 4, 5}, "3..5"),
        (" 3 .. 5 ", {3, 4, 5}, "3..5"),
        ("5..", {5, 6, 7, 8}, "5.."),
        ("..2", {1, 2}, "..2"),
        ("4", {4}, "4"),
        ("4..4", {4}, "4"),
    ],
)
def test_both_ends_belong_to_a_range_and_it_is_written_as_it_is_read(text: str, steps: set[int], written: str):
    found = StepRange.parse(text)
    assert {step for step in range(1, 9) if step in found} == steps
    assert str(found) == written
    assert StepRange.parse(str(found)) == found


def test_a_range_without_ends_has_every_step():
    assert all(step in StepRange() for step in (1, 10**9))
    assert str(StepRange()) == "all"


@pytest.mark.parametrize("text", ["", "..", "a", "1-3", "-1", "1...3", "1..2..3", "1.5", "٣", "+1", "1_0", "9" * 30])
def test_what_is_no_range_is_refused_with_what_is_possible(text: str):
    with pytest.raises(StepRangeError, match=r"is no range of steps: allowed are A\.\.B, A\.\., \.\.B and A"):
        StepRange.parse(text)


@pytest.mark.parametrize(
    ("text", "said"), [("0..3", "no step 0"), ("..0", "no step 0"), ("0", "no step 0"), ("5..3", "ends before it begins")]
)
def test_steps_that_can_not_be_are_refused(text: str, said: str):
    with pytest.raises(StepRangeError, match=said):
        StepRange.parse(text)
