"""Writing commands to the owner of a lane, and what is known of whether they were read.

Guarantees: a command stands in the lane of its model; it is taken up when the lane's own record says so, in the transaction that holds
what came of it. Limitations: to know whether a worker is alive; a command waits in the log for the next one.
"""

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing

from aiokafka import AIOKafkaProducer, ConsumerRecord

from headrace.core.kafka import ClientOptions, client_options, plain_errors
from headrace.core.lanes import lane_of
from headrace.core.model_views import State, kept_states, latest_states
from headrace.core.reading import OffsetLostError, follow, read_to_end
from headrace.core.settings import Settings
from headrace.core.topic_admin import lane_count
from headrace.schemas.commands import Command
from headrace.schemas.envelope import seal
from headrace.schemas.state import LaneState
from headrace.schemas.topics import Topics

Sent = tuple[int, int]
"""(lane, offset) of a command."""


async def send_command(settings: Settings, command: Command, *, source: str, shadow_of: str | None = None) -> Sent:
    """Write a command.

    Args:
        settings: Of this process.
        command: What is asked for.
        source: `ce_source` of the record.
        shadow_of: Of a shadow, the model that it shadows: they share a lane.

    Raises:
        TopicsDifferError: the lane topics are missing, or do not have one partition count.
        KafkaUnavailableError: no broker; nothing was sent, or it is not known: repeating a command is harmless.
    """
    options: ClientOptions = client_options(settings.kafka, "headrace-commands")
    lane = lane_of(shadow_of or command.model_id, await lane_count(options, settings.topic_names))
    value, headers = seal(command, source=source)
    with plain_errors(options):
        producer = AIOKafkaProducer(**options, enable_idempotence=True, acks="all")
        try:
            await producer.start()
            sent = await producer.send_and_wait(
                settings.topic_names.commands, value, key=command.model_id.encode(), partition=lane, headers=headers
            )
        finally:
            await producer.stop()
    return lane, int(sent.offset)


async def read_lanes(
    options: ClientOptions, topics: Topics, lanes: Collection[int] | None
) -> tuple[list[ConsumerRecord], list[ConsumerRecord]]:
    """All of `models`, and the commands that no owner has read, of these lanes (None: of all); each partition in offset order."""
    states = await read_to_end(options, topics.models, lanes)
    of_lanes = latest_states(record for record in states if record.key is not None and record.key.startswith(b"lane:"))
    start = {lane: through for lane, through in commands_through(of_lanes).items() if lanes is None or lane in lanes}
    try:
        commands = await read_to_end(options, topics.commands, lanes, start=start)
    except OffsetLostError:  # no owner for longer than commands are kept: what is left is all there is
        commands = await read_to_end(options, topics.commands, lanes)
    return states, commands


def commands_through(states: Iterable[State]) -> dict[int, int]:
    """By lane the offset below which its owner has read the commands."""
    return {state.lane: state.commands_through for state in states if isinstance(state, LaneState)}


async def lane_states(settings: Settings, lane: int) -> AsyncGenerator[list[State]]:
    """The latest states of a lane, again after each batch that comes; does not end. Close it (`aclosing`)."""
    records: list[ConsumerRecord] = []
    options = client_options(settings.kafka, "headrace-commands")
    async with aclosing(follow(options, settings.topic_names.models, lane)) as batches:
        async for batch in batches:
            kept = kept_states(records + batch)
            records = [record for record, _ in kept]
            yield [state for _, state in kept]
