"""Claiming a lane: the committed states, read after fencing, and the pending groups that they list.

Call `read_states` after the lane's producer has started, never before: of 60 reads before fencing, 50 were stale (the fence-then-read
invariant). Guarantees: only records that the lane's owner could have committed count. The partition counts of all lane topics are equal,
and are those of the lane's first claim. Pending groups return to their buckets in log order, fetched by their offsets, without reading the
records between them. A group that retention deleted stops its model, and no other, with an error that names it.
Limitations: if a newer release wrote a state, the lane is not claimed, because an older state of the same key would be used instead.
"""

import asyncio
import logging
from dataclasses import dataclass

from headrace.consumers.worker.base_models import base_problem, resume_with_base, wait_for_base
from headrace.consumers.worker.intake import LaneIntake
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.lane_models import LaneModels
from headrace.consumers.worker.storage.stored_snapshots import unknown_versions, window_of
from headrace.core.errors import HeadraceError
from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import ClientOptions
from headrace.core.kept import NotOursError
from headrace.core.model_views import latest_states
from headrace.core.reading import OffsetLostError, end_offsets, read_to_end
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore
from headrace.core.topic_admin import lane_count
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import Topics
from headrace.trainer.plan import BaseUnusableError
from headrace.trainer.rank_main import nodes_of_launcher

logger = logging.getLogger(__name__)


class GroupsTopicChangedError(HeadraceError):
    """The lane was claimed with another groups topic: its offsets would mean other records."""


class UnreadableStateError(HeadraceError):
    """A state can't be read; says where it is and what to do."""


class PartitionCountError(HeadraceError):
    """The partition count of the lane topics changed: keys would hash to other lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLane:
    """States as committed."""

    lane: LaneState
    models: dict[str, ModelState]
    ledger_end: int
    """The end of the lane's `steps` after fencing: the next record of this owner has this offset or a higher one."""


async def read_states(options: ClientOptions, topics: Topics, lane: int, groups_topic: str) -> RecoveredLane:
    """Read the states of a lane.

    Raises:
        PartitionCountError, GroupsTopicChangedError: see there.
        TopicsDifferError: the lane topics are missing, or do not have one partition count.
        UnreadableStateError: a record in `models` has a type of Headrace, and this release can't read it.
    """
    partitions = await lane_count(options, topics, groups_topic)
    try:
        latest = latest_states(await read_to_end(options, topics.models, [lane]), strict=True)
    except NotOursError as error:
        raise UnreadableStateError(
            f"lane {lane} can't be claimed: {error}. Its type is one of Headrace's: run the release that wrote it. If Headrace did not "
            "write it, write the record before it under this key again"
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
    return RecoveredLane(lane=state, models=models, ledger_end=ends[lane])


async def load_models(settings: Settings, store: ObjectStore, recovered: RecoveredLane) -> LaneModels:
    """The models of a lane in memory, each with its duplicate window; a model whose snapshot can't be used has diverged."""
    lane = recovered.lane.model_copy(update={"nodes": nodes_of_launcher()})
    models = LaneModels(state=lane, position=lane.scanned, ledger_end=recovered.ledger_end, unclean=not lane.clean)
    for model_id, state in recovered.models.items():
        window, problem = await window_of(settings, store, state)
        unknown = await asyncio.to_thread(unknown_versions, store, state, lost=problem is not None)
        model = models.models[model_id] = LaneModel.from_state(state, window, lane.lane)
        if unknown != state.unknown_versions:
            message = "%s: the ledger ends at version %d, but later ones were published; Kafka has lost their records: %s"
            logger.error(message, state.name, state.policy_version, ", ".join(unknown))
            model.change(unknown_versions=unknown)
            model.touch(urgent=True)
        if model.status == "active" and state.rebasing is None and problem is not None:
            logger.error("%s: the model has diverged: %s", state.name, problem)
            model.set_status("diverged", problem)
        if model.status == "active" and (missing := base_problem(state.settings, settings.base_models)) is not None:
            wait_for_base(model, missing)
    return models


def stop_for_lost_records(models: LaneModels, topic: str, first: int) -> None:
    """Retention deleted records before they were read. Their models are not known, so every model of the lane stops."""
    count = first - models.position
    these = "this 1 record" if count == 1 else f"these {count} records"
    detail = (
        f"{topic} partition {models.state.lane}: offsets {models.position} to {first - 1} were deleted by retention before they were read; "
        f"groups of this model may be among them. `headrace models resume` continues without {these}, and trains on every group of this "
        f"model from offset {first} on, which wait until then"
    )
    models.position = first
    for model in models.models.values():
        if model.status == "active":
            logger.error("%s stops: %s", model.state.name, detail)
            model.set_status("stopped", detail)
        elif model.status != "deleted":
            model.set_status(model.status, f"{model.draft.status_detail}; and {detail}")
    models.note_change()


async def recover_pending(settings: Settings, options: ClientOptions, models: LaneModels, intake: LaneIntake) -> None:
    """Put pending groups that are not in memory into their buckets. A model that waits for its base model tries it when that is due.

    Raises:
        HeadraceError: the broker or the store is away.
    """
    for model in list(models.models.values()):
        waits = model.draft.waiting_for is not None
        if model.status != "active" or not (model.retry.due if waits else model.unread):
            continue
        ranks = model.retry.ranks
        try:
            if (problem := base_problem(model.state.settings, settings.base_models)) is not None:
                raise BaseUnusableError(problem)
            if model.unread:
                await _fetch_pending(options, settings.groups_topic, model, intake)
        except BaseUnusableError as error:
            wait_for_base(model, str(error))
        else:
            if model.draft.waiting_for is not None and ranks:
                model.retry.step = True
            elif model.draft.waiting_for is not None:
                resume_with_base(model)
        models.note_change()


async def _fetch_pending(options: ClientOptions, topic: str, model: LaneModel, intake: LaneIntake) -> None:
    try:
        records = await fetch_offsets(options, topic, model.lane, {*model.recovering, *model.held})
    except OffsetLostError as error:
        if not model.drop_lost:
            logger.error("%s stops: %s", model.state.name, error)  # noqa: TRY400 - the message says all, a traceback nothing more
            groups = "this 1 group" if len(error.missing) == 1 else f"these {len(error.missing)} groups"
            left = len(model.recovering) + len(model.held) - len(error.missing)
            what = f"refuses {groups} as expired and trains on what waits: {left} groups, and all that comes behind them"
            model.set_status("stopped", f"{error}. `headrace models resume` {what}")
            return
        for offset in error.missing:
            known = offset in model.held and model.held[offset].group_id is not None
            detail = f"retention deleted the record at offset {offset} while the group waited"
            model.reject_unread(RejectionReason.EXPIRED, detail if known else f"{detail}; its id is not known any more", [offset])
        records = await fetch_offsets(options, topic, model.lane, {*model.recovering, *model.held})
    model.drop_lost = False
    await intake.recover(model, [records[offset] for offset in sorted(records)])
