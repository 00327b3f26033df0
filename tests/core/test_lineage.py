"""Where a version comes from and where a group went: from reports, the log, pending groups and events on the real broker."""

import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import RecordsToDelete
from aiokafka.structs import TopicPartition
from tests.core.ledgers import digest, record, store_report, write

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.lineage import Lineage, influenced
from headrace.core.payloads import claim
from headrace.core.settings import KafkaSettings, Settings, StoreSettings, TopicSettings
from headrace.core.store.files import FileStore
from headrace.core.topic_admin import apply, open_admin
from headrace.schemas.codec import SAFETENSORS_TYPE, encode_safetensors, sampled
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState, Pending, Rebased, ReportedGroup, ReportedTrajectory, StepRecord, StepReport
from headrace.schemas.training import ModelSettings
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

LANES = 2


@pytest.fixture(scope="module")
def prefix() -> str:
    return f"t{uuid.uuid4().hex[:10]}."


@pytest.fixture
async def settings(kafka: str, prefix: str, tmp_path: Path) -> Settings:
    """One set of topics for this module: each test has a model of its own."""
    made = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=prefix, partitions=LANES),
        store=StoreSettings(url=f"file://{tmp_path}/store"),
    )
    await apply(made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def model() -> str:
    return str(uuid.uuid4())


def group(group_id: str | None, job_id: str | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[], reward=1.0)], group_id=group_id, job_id=job_id)


def reported(group_id: str, offset: int = 0) -> ReportedGroup:
    trajectories = tuple(ReportedTrajectory(index=i, reward=float(i), advantage=0.5, tokens=10, trainable_tokens=4) for i in range(2))
    return ReportedGroup(group_id=group_id, offset=offset, producer="agent-1", trajectories=trajectories)


def refused(model: str, group_id: str, offset: int, reason: RejectionReason = RejectionReason.STALE) -> GroupRejected:
    return GroupRejected(model_id=model, group_id=group_id, reason=reason, detail="sampled 9 versions ago", partition=0, offset=offset)


def lost(model: str, group_id: str, trajectory: int) -> TrajectoryRejected:
    return TrajectoryRejected(
        model_id=model, group_id=group_id, reason=RejectionReason.TOO_LONG, detail="too long", trajectory=trajectory, partition=0, offset=0
    )


def state(model: str, *, scanned: int = 10**9, pending: Sequence[Pending] = (), version: int = 0) -> ModelState:
    return ModelState(
        model_id=model,
        incarnation="i",
        account="default",
        project="default",
        name="m",
        worker_group="default",
        settings=ModelSettings(base_model="tiny"),
        scanned=scanned,
        pending=tuple(pending),
        policy_version=version,
    )


def step_with_report(store: FileStore, scratch: Path, step: int, model: str, groups: Sequence[ReportedGroup], **more: object) -> StepRecord:
    report = StepReport(
        model_id=model, incarnation="i", step=step, attempt=f"attempt-{step}", lane=0, groups=tuple(groups), timings={}
    ).model_copy(update=more)
    lane = lane_of(model, LANES)
    offsets = [each.offset for each in groups]
    return record(step, model_id=model, lane=lane, offsets=offsets, report=store_report(store, report, scratch))


async def test_a_version_comes_from_the_groups_of_its_steps_report(settings: Settings, store: FileStore, model: str, tmp_path: Path):
    groups = (reported("a", 4), reported("b", 5))
    made = step_with_report(store, tmp_path, 3, model, groups)
    found = await Lineage(settings, store, model, state(model), [made]).version(made)
    assert (found.groups, found.source, found.problem) == (groups, "report", None)


async def test_without_a_report_the_log_still_has_ids_and_producers(settings: Settings, store: FileStore, model: str):
    options = client_options(settings.kafka, "test")
    first = await write(settings, [group("a"), group(None)], key=model, source="agent-7")
    body = encode_safetensors(sampled(group("tensors")))
    claims = [claim(store, body, SAFETENSORS_TYPE, named) for named in ("named", None)]
    claimed = await write(settings, claims, key=model, source="agent-7")
    lane = lane_of(model, LANES)
    made = record(1, model_id=model, lane=lane, offsets=first + claimed)
    found = await Lineage(settings, store, model, state(model), [made]).version(made)
    assert found.source == "log"
    assert found.problem == "no report was kept: the ledger names none for this step"
    assert [(each.group_id, each.offset, each.producer) for each in found.groups] == [
        ("a", first[0], "agent-7"),
        (f"{lane}-{first[1]}", first[1], "agent-7"),
        ("named", claimed[0], "agent-7"),
        ("tensors", claimed[1], "agent-7"),
    ]
    async with open_admin(options) as admin:
        await admin.delete_records({TopicPartition(settings.topic_names.trajectory_groups, lane): RecordsToDelete(claimed[0])})
    gone = await Lineage(settings, store, model, state(model), [made]).version(made)
    assert (gone.groups, gone.source) == ((), "nothing")
    assert gone.problem is not None
    assert f"offsets {first[0]}, {first[1]} are needed and are not there" in gone.problem


async def test_a_trained_group_influenced_its_version_and_all_later_ones(settings: Settings, store: FileStore, model: str, tmp_path: Path):
    of_two = {"refused_trajectories": (lost(model, "b", 7), lost(model, "x", 1))}
    records = [
        step_with_report(store, tmp_path, 1, model, [reported("a", 1)]),
        step_with_report(store, tmp_path, 2, model, [reported("b", 2)], **of_two),
        step_with_report(store, tmp_path, 3, model, [reported("c", 3)], refused=(refused(model, "b", 3, RejectionReason.DUPLICATE),)),
    ]
    found = await Lineage(settings, store, model, state(model), records).group("b")
    assert (found.status, found.trained, found.group, found.versions) == ("trained", records[1], reported("b", 2), (2, 3))
    # Sent once more, and refused then: both are told.
    assert [each.reason for each in found.refusals] == [RejectionReason.DUPLICATE]
    assert [each.trajectory for each in found.trajectories_refused] == [7]


async def test_a_group_of_a_step_whose_report_is_gone_is_found_in_the_log(settings: Settings, store: FileStore, model: str, tmp_path: Path):
    offsets = await write(settings, [group("a"), group("b"), group("c")], key=model)
    lane = lane_of(model, LANES)
    records = [
        record(1, model_id=model, lane=lane, offsets=offsets[:2]),
        step_with_report(store, tmp_path, 2, model, [reported("c", offsets[2])]),
    ]
    found = await Lineage(settings, store, model, state(model), records).group("b")
    assert (found.status, found.trained, found.versions) == ("trained", records[0], (1, 2))
    assert found.group == ReportedGroup(group_id="b", offset=offsets[1], producer="test/worker", trajectories=())


async def test_steps_of_which_nothing_is_left_are_named_when_a_group_is_not_found(settings: Settings, store: FileStore, model: str):
    offsets = await write(settings, [group("a"), group("b"), group("c")], key=model)
    lane = lane_of(model, LANES)
    async with open_admin(client_options(settings.kafka, "test")) as admin:
        await admin.delete_records({TopicPartition(settings.topic_names.trajectory_groups, lane): RecordsToDelete(offsets[2])})
    records = [record(step, model_id=model, lane=lane, offsets=[offset]) for step, offset in enumerate(offsets, 1)]
    found = await Lineage(settings, store, model, state(model), records).group("a")
    assert (found.status, found.unsearched) == ("unknown", (1, 2))
    assert (await Lineage(settings, store, model, state(model), records).group("c")).trained == records[2]


async def test_a_pending_group_waits_in_its_bucket(settings: Settings, store: FileStore, model: str):
    first, second = await write(settings, [group("a"), group("b", "job-1")], key=model)
    pending = [Pending(offset=first), Pending(offset=second, job_id="job-1")]
    found = await Lineage(settings, store, model, state(model, pending=pending), []).group("b")
    assert (found.status, found.waiting, found.trained, found.versions) == ("waiting", pending[1], None, ())


async def test_a_group_that_no_owner_has_committed_anything_about_is_told_from_one_that_was_never_sent(
    settings: Settings, store: FileStore, model: str
):
    read, sent = await write(settings, [group("read"), group("sent", "job-1")], key=model)
    lineage = Lineage(settings, store, model, state(model, scanned=read + 1), [])
    found = await lineage.group("sent")
    assert (found.status, found.waiting) == ("sent", Pending(offset=sent, job_id="job-1"))
    # Below `scanned`, not pending, not trained, not refused: it was a dead letter, or another model's.
    assert (await lineage.group("read")).status == "unknown"


async def test_a_refusal_comes_from_a_report_and_else_from_events(settings: Settings, store: FileStore, model: str, tmp_path: Path):
    made = step_with_report(store, tmp_path, 1, model, [reported("t", 1)], refused=(refused(model, "reported", 8),))
    awkward = 'quoted "ü" \\ id'
    events = [refused(model, awkward, 9), lost(model, awkward, 3), refused(model, awkward + "x", 10)]
    await write(settings, events, key=model)
    lineage = Lineage(settings, store, model, state(model), [made])
    of_report, of_events = await lineage.group("reported"), await lineage.group(awkward)
    assert (of_report.status, [each.offset for each in of_report.refusals]) == ("refused", [8])
    assert (of_events.status, [each.offset for each in of_events.refusals]) == ("refused", [9])
    assert [each.trajectory for each in of_events.trajectories_refused] == [3]
    assert (await lineage.group("nobody")).status == "unknown"


async def test_a_record_that_is_no_group_is_passed_by(settings: Settings, store: FileStore, model: str):
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers)
    await producer.start()
    try:
        topic, lane = settings.topic_names.trajectory_groups, lane_of(model, LANES)
        await producer.send_and_wait(topic, b"not a group", key=model.encode(), partition=lane)
    finally:
        await producer.stop()
    assert (await Lineage(settings, store, model, state(model, scanned=0), []).group("a")).status == "unknown"


def test_versions_rest_on_a_step_until_a_rebase_goes_back_to_before_it():
    def rebased(step: int, resumed_from: int | None) -> StepRecord:
        why = Rebased(step=4, reason="torch", expected_digest=digest("a"), found_digest=digest("b"), resumed_from=resumed_from)
        return record(step, cut="rebased", updates=0, rebased=why)

    before = [record(1), record(2, updates=0), record(3), record(4)]
    records = [*before, rebased(5, 3), record(6)]
    assert influenced(records, records[0]) == (1, 2, 3, 4, 5, 6)
    assert influenced(records, records[1]) == ()
    assert influenced(records, records[2]) == (3, 4, 5, 6)
    assert influenced(records, records[3]) == (4,)
    assert influenced(records, records[5]) == (6,)
    # Run again to other bits, and continued with: it is in there.
    assert influenced([*before, rebased(5, 4)], records[3]) == (4, 5)
    assert influenced([*before, rebased(5, None)], records[3]) == (4,)
