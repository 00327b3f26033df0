"""What a lane's owner knows after fencing: the states of the lane and of its models, read to the end that was written (rule 1).

Call it after the lane's producer has started, never before: measured, 50 of 60 reads before fencing are stale. Guarantees: only
records that the lane's owner could have committed; the partition counts of all lane topics are equal and are those the lane was
first claimed with (rule 6). Gives up: unknown records in `models` are refused, since skipping one could lose a model's state.
"""

from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.reading import end_offsets, latest_by_key, read_to_end
from headrace.core.topic_admin import lane_count
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import Topics


class GroupsTopicChangedError(HeadraceError):
    """The lane was claimed with another groups topic: its offsets would mean other records."""


class PartitionCountError(HeadraceError):
    """The partition count of the lane topics changed: keys would hash to other lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneMemory:
    """States as committed."""

    lane: LaneState
    models: dict[str, ModelState]
    ledger_end: int
    """The end of the lane's `steps` as it was after fencing: the next record of ours stands there or later."""


async def read_states(options: ClientOptions, topics: Topics, lane: int, groups_topic: str) -> LaneMemory:
    """Read the states of a lane.

    Args:
        options: From `client_options`.
        topics: Topic names.
        lane: Partition number.
        groups_topic: That the lane's groups are in: a shadow's is under another prefix.

    Raises:
        PartitionCountError, GroupsTopicChangedError: see there.
        TopicsDifferError: the lane topics are missing, or do not have one partition count.
        CodecError: a record in `models` that this release can't read.
    """
    partitions = await lane_count(options, topics, groups_topic)
    latest = latest_by_key(await read_to_end(options, topics.models, [lane]))
    state = LaneState(lane=lane, partitions=partitions, groups_topic=groups_topic)
    models: dict[str, ModelState] = {}
    for record in latest.values():
        match open_record(record.value, header_text(record.headers), (ModelState, LaneState)):
            case LaneState() as found:
                state = found
            case ModelState() as model:
                models[model.model_id] = model
    if state.partitions != partitions:
        raise PartitionCountError(
            f"the lane topics have {partitions} partitions, but lane {lane} was first claimed with {state.partitions}: keys hash to other "
            "lanes now. Partition counts are fixed at creation: restore the topics, or start a new topic prefix"
        )
    if state.groups_topic not in {None, groups_topic}:
        raise GroupsTopicChangedError(
            f"lane {lane} trained on {state.groups_topic}, and worker.shadow_prefix says {groups_topic} now: the offsets that it keeps "
            "would mean other records. Restore worker.shadow_prefix, or start a new topic prefix"
        )
    state = state.model_copy(update={"groups_topic": groups_topic})
    ends = await end_offsets(options, topics.steps, [lane])
    return LaneMemory(lane=state, models=models, ledger_end=ends[lane])
