"""Reading the ledger: the records that the topic `steps` has of one model.

A model's records stand in the partition of its lane, among those of other models, in step order; a model that was deleted and created
again starts again at step 1, as another incarnation. Guarantees: `read_committed`, up to the end that was written when reading began; each
step once, in order; a step that can't be read, or two different records of one, raise with their places, and what is no step is left out.
Limitations: an index; all of the partition is read over, but only the records of this model are decoded.

A range of steps as people write it: `3..7`, `3..`, `..7` or `3`; both ends belong to it, and the first step is 1.

Guarantees: what is no range is refused with the text and what is possible; nothing is guessed.
"""

import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from aiokafka import ConsumerRecord

from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kept import NotOursError, open_kept
from headrace.core.lanes import lane_of
from headrace.core.polling import leave_out
from headrace.core.reading import stream_to_end
from headrace.core.settings import Settings
from headrace.core.topic_admin import lane_count
from headrace.schemas.state import StepRecord, offset_ranges

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


class LedgerError(HeadraceError):
    """The ledger has a record that can't be there; says where."""


async def read_ledger(
    settings: Settings,
    model_id: str,
    *,
    incarnation: str | None = None,
    steps: StepRange | None = None,
    shadow_of: str | None = None,
) -> list[StepRecord]:
    """The ledger of one incarnation of a model.

    Args:
        settings: Of this process.
        model_id: Its id.
        incarnation: None: the latest that the ledger has.
        steps: Only these.
        shadow_of: Of a shadow, `ModelState.shadow_of`: its records stand on the lane of that model.

    Raises:
        LedgerError: a record that can't be there.
        KafkaUnavailableError: no broker.
    """
    found: list[StepRecord] = []
    latest: str | None = None
    # A range with an incarnation is the stream's to cut short; without one the latest is known at the end only.
    stream = stream_ledger(settings, model_id, incarnation=incarnation, steps=steps if incarnation else None, shadow_of=shadow_of)
    async with aclosing(stream):
        async for record in stream:
            if record.incarnation != latest:
                found.clear()
                latest = record.incarnation
            if steps is None or record.step in steps:
                found.append(record)
    return found


async def stream_ledger(
    settings: Settings,
    model_id: str,
    *,
    incarnation: str | None = None,
    steps: StepRange | None = None,
    shadow_of: str | None = None,
) -> AsyncGenerator[StepRecord]:
    """As `read_ledger`, record by record. Close it (`aclosing`) when leaving early.

    Without an incarnation the records of all of them come, the oldest incarnation first.
    """
    options = client_options(settings.kafka, "headrace-ledger")
    topics = settings.topic_names
    lane = lane_of(shadow_of or model_id, await lane_count(options, topics))
    order = _Order()
    batches = stream_to_end(options, topics.steps, [lane])
    async with aclosing(batches):
        async for batch in batches:
            for raw in batch:
                if raw.key != model_id.encode():
                    continue
                record = _open(raw)
                if record is None or not order.is_new(record, raw) or incarnation not in {None, record.incarnation}:
                    continue
                if steps is None or record.step in steps:
                    yield record
                if incarnation is not None and steps is not None and steps.last is not None and record.step >= steps.last:
                    return


class _Order:
    """What came before, and what may come after it."""

    def __init__(self) -> None:
        self._last: StepRecord | None = None
        self._ended: set[str] = set()

    def is_new(self, record: StepRecord, raw: ConsumerRecord) -> bool:
        """False: it is the last record once more, as a mirrored topic may have it."""
        last, self._last = self._last, record
        if last is None:
            return True
        if record.incarnation != last.incarnation:
            self._ended.add(last.incarnation)
            if record.incarnation not in self._ended:
                return True
        elif record.step > last.step:
            return True
        elif record.step == last.step and record.attempt == last.attempt:
            return False
        raise LedgerError(
            f"{_place(raw)} is of {_of(record)}, but {_of(last)} came before it: a step is committed once, in order. "
            "Was the topic written by something else than its worker group?"
        )


def _open(raw: ConsumerRecord) -> StepRecord | None:
    try:
        record = open_kept(raw, (StepRecord,))
    except NotOursError as error:
        if error.claims:
            raise LedgerError(f"{error}: was it written by a newer release?") from error
        leave_out(raw, error.detail)
        return None
    assert isinstance(record, StepRecord)  # noqa: S101 - narrows the type: nothing else was asked for
    return record


def _place(raw: ConsumerRecord) -> str:
    return f"{raw.topic} partition {raw.partition} offset {raw.offset}"


def _of(record: StepRecord) -> str:
    return f"step {record.step} (incarnation {record.incarnation}, attempt {record.attempt})"
