"""Reading the ledger: the records that the topic `steps` has of one model.

A model's records stand in the partition of its lane, among those of other models, in step order; a model that was deleted and created
again starts again at step 1, as another incarnation. Guarantees: `read_committed`, up to the end that was written when reading began; each
step once, in order; a step that can't be read, or two different records of one, raise with their places, and what is no step is left out.
Limitations: an index; all of the partition is read over, but only the records of this model are decoded.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiokafka import ConsumerRecord

from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kept import NotOursError, open_kept
from headrace.core.lanes import lane_of
from headrace.core.polling import leave_out
from headrace.core.reading import stream_to_end
from headrace.core.settings import Settings
from headrace.core.step_range import StepRange
from headrace.core.topic_admin import lane_count
from headrace.schemas.state import StepRecord


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
