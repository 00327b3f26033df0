"""The ledger records behind a model's snapshot, found by the bounds that its state lists: what recovery runs again.

Guarantees: one record for each bound, in step order, `read_committed`; nothing else of the ledger is read, however long it is. Gives up:
nothing; a bound whose record is not there raises.
"""

from contextlib import aclosing

from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace.core.fetching import records_in, single_reader
from headrace.core.kafka import ClientOptions, plain_errors
from headrace.core.kept import kept_or_none
from headrace.core.polling import UnreadableRecord
from headrace.core.reading import OffsetLostError, end_offsets
from headrace.schemas.state import ModelState, StepRecord


async def records_since_snapshot(options: ClientOptions, topic: str, lane: int, state: ModelState) -> list[StepRecord]:
    """The records of the steps after the snapshot, up to the committed one.

    Args:
        options: From `client_options`.
        topic: The ledger.
        lane: Partition number.
        state: As committed.

    Raises:
        OffsetLostError: the ledger does not have one of them.
        HeadraceError: Kafka can't be reached.
    """
    steps = range(state.snapshot_step + 1, state.policy_version + 1)
    if len(steps) != len(state.steps_since):
        raise RuntimeError(f"{state.model_id}: {len(state.steps_since)} bounds for the steps {steps}; a defect of ours")
    if not steps:
        return []
    where = TopicPartition(topic, lane)
    found: list[StepRecord] = []
    with plain_errors(options):
        end = (await end_offsets(options, topic, [lane]))[lane]
        async with single_reader(options, where) as consumer:
            for step, bound in zip(steps, state.steps_since, strict=True):
                found.append(await _first_of(consumer, state, step, range(bound, end)))
    return found


async def _first_of(consumer: AIOKafkaConsumer, state: ModelState, step: int, span: range) -> StepRecord:
    async with aclosing(records_in(consumer, span)) as records:
        async for record in records:
            if isinstance(record, UnreadableRecord) or record.key != state.model_id.encode():
                continue
            opened = kept_or_none(record, (StepRecord,))
            if isinstance(opened, StepRecord) and (opened.incarnation, opened.step) == (state.incarnation, step):
                return opened
    (where,) = consumer.assignment()
    raise OffsetLostError(
        f"{where.topic} partition {where.partition} has no record of step {step} of {state.model_id} from offset {span.start} on"
    )
