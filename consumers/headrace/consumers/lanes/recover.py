"""What a lane's owner knows after fencing: the states of the lane and of its models, read to the end that was written (rule 1).

Call it after the lane's producer has started, never before: measured, 50 of 60 reads before fencing are stale. Guarantees: only
records that the lane's owner could have committed; the partition counts of all lane topics are equal and are those the lane was
first claimed with (rule 6); what is none of ours is left out. Gives up: a record that a newer release may have written refuses the lane,
since what stood before it would be an older state.
"""

from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.kept import NotOursError
from headrace.core.model_views import latest_states
from headrace.core.reading import end_offsets, read_to_end
from headrace.core.topic_admin import lane_count
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import Topics


class GroupsTopicChangedError(HeadraceError):
    """The lane was claimed with another groups topic: its offsets would mean other records."""


class UnreadableStateError(HeadraceError):
    """A state can't be read; says where it stands and what to do."""


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
        UnreadableStateError: a record in `models` has a type of ours, and this release can't read it.
    """
    partitions = await lane_count(options, topics, groups_topic)
    try:
        latest = latest_states(await read_to_end(options, topics.models, [lane]), strict=True)
    except NotOursError as error:
        raise UnreadableStateError(
            f"lane {lane} can't be claimed: {error}. Its type is one of ours: run the release that wrote it. If none of ours did, write "
            "the record that stood before it under this key once more"
        ) from error
    state = LaneState(lane=lane, partitions=partitions, groups_topic=groups_topic)
    models: dict[str, ModelState] = {}
    for known in latest:
        match known:
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
