"""All that is wrong with a body, as far as one answer lists it.

Guarantees: each fault has the place of its field, one fault a place; values of the body are not repeated beyond what the schemas' own
messages say. Limitations: faults beyond `MOST`; the last item says that there are more.
"""

import re
from collections.abc import Sequence

from headrace.gateway.problems import FaultError, UnprocessableError
from headrace.schemas.errors import CodecError

MOST = 100
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class Faults:
    """Collects faults: `faults.add(["body", "model_id"], "missing")`, then `faults.check()`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str | int, ...], FaultError] = {}

    @property
    def full(self) -> bool:
        """Whether more would not be listed: who looks for them may stop."""
        return len(self._found) > MOST

    def __len__(self) -> int:
        return len(self._found)

    def add(self, loc: Sequence[str | int], msg: str, kind: str = "value_error") -> None:
        """One more; the first of a place counts."""
        if not self.full:
            self._found.setdefault(tuple(loc), FaultError(loc, msg, kind))

    def add_codec(self, loc: Sequence[str | int], error: CodecError) -> None:
        """What the codec says of a group that stands at `loc`."""
        self.add([*loc, *parts_of(error.path)], error.detail, str(error.reason))

    def check(self) -> None:
        """Refuse the body if there are any.

        Raises:
            UnprocessableError: with all of them.
        """
        if not self._found:
            return
        found = list(self._found.values())
        if self.full:
            found[MOST:] = [
                FaultError(["body"], f"there are more faults than these {MOST}: mend them and send it again", "too_many_faults")
            ]
        raise UnprocessableError(found)


def parts_of(path: str) -> list[str | int]:
    """`trajectories[0].reward` as parts. A key that holds dots or brackets comes apart; it is for people."""
    return [int(index) if index else name for index, name in _PART.findall(path)]
