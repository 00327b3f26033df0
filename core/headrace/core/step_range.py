"""A range of steps as people write it: `3..7`, `3..`, `..7` or `3`; both ends belong to it, and the first step is 1.

Guarantees: what is no range is refused with the text and what is possible; nothing is guessed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from headrace.core.errors import HeadraceError
from headrace.schemas.state import offset_ranges

_ALLOWED = "allowed are A..B, A.., ..B and A, where the first step is 1 and both ends belong to the range"
_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)


class StepRangeError(HeadraceError):
    """A text that is no range of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Steps `first` to `last`. Example: `5 in StepRange.parse("3..")`."""

    first: int | None = None
    """None: from the first step there is."""
    last: int | None = None
    """Included; None: to the last step there is."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `A..B`, `A..`, `..B` or `A`.

        Raises:
            StepRangeError: the text is none of them, a step is below 1, or the last comes before the first.
        """
        before, dots, after = text.strip().partition("..")
        first, last = before.strip(), after.strip() if dots else before.strip()
        if not (first or last) or any(part and not _STEP.fullmatch(part) for part in (first, last)):
            raise StepRangeError(f"{text!r} is no range of steps: {_ALLOWED}")
        found = cls(first=int(first) if first else None, last=int(last) if last else None)
        if 0 in {found.first, found.last}:
            raise StepRangeError(f"{text!r}: there is no step 0; {_ALLOWED}")
        if found.first is not None and found.last is not None and found.last < found.first:
            raise StepRangeError(f"{text!r} is empty: it ends before it begins; {_ALLOWED}")
        return found

    def __contains__(self, step: int) -> bool:
        """Whether a step is in it."""
        return (self.first is None or step >= self.first) and (self.last is None or step <= self.last)

    def __str__(self) -> str:
        """As `parse` reads it; of all steps: `all`."""
        if self.first is None and self.last is None:
            return "all"
        if self.first == self.last:
            return str(self.first)
        return f"{'' if self.first is None else self.first}..{'' if self.last is None else self.last}"


def ranges_text(numbers: Iterable[int]) -> str:
    """Steps or offsets in few words: [1, 2, 3, 7] is `1..3, 7`."""
    ranges = offset_ranges(list(numbers))
    return ", ".join(str(found.first) if found.first == found.last else f"{found.first}..{found.last}" for found in ranges)
