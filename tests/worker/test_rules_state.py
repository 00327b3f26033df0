"""Rules 7 to 11: what a model waits for, and what an owner must not decide again. Each interleaving is made to happen on a lane."""

import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from tests.worker.groups import group
from tests.worker.stage import Commit, Stage, offsets_of, until

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import client_options
from headrace.core.models import resume_model, wait_for_model
from headrace.core.topic_admin import apply, open_admin
from headrace.schemas.events import GroupRejected, JobStateChanged
from headrace.schemas.jobs import JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Intent, ModelState, StepRecord
from headrace.schemas.topics import TOPICS, TRAJECTORY_GROUPS

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def die_with_a_step(commit: Commit) -> dict[str, int]:
    return await (commit.die() if commit.of(StepRecord) else commit.go())


async def test_scanned_and_pending_job_a_waits_while_the_stream_and_job_b_train_and_its_first_group_is_fetched_by_the_next_owner(
    stage: Stage,
) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen:
        async with stage.owner(lane):
            a1, s1 = await stage.send(model, group("a1", version=None, job_id="A"), group("s1", seed=1, version=None))
            b = await stage.send(model, *(group(f"b{i}", seed=i, version=None, job_id="B") for i in (2, 3)))
            await stage.send_job(model, "B", "b2", "b3")
            (s2,) = await stage.send(model, group("s2", seed=4, version=None))
            steps = await seen.until(StepRecord, 2)
            state = await seen.until_state(lambda found: found.policy_version == 2)
            assert [(step.job_id, offsets_of(step)) for step in steps] == [("B", b), (None, [s1, s2])]
            assert [(pending.offset, pending.job_id) for pending in state.pending] == [(a1, "A")]
        async with stage.owner(lane):
            (a2,) = await stage.send(model, group("a2", seed=5, version=None, job_id="A"))
            await stage.send_job(model, "A", "a1", "a2")
            steps = await seen.until(StepRecord, 3)
    assert (steps[2].job_id, offsets_of(steps[2])) == ("A", [a1, a2])


async def test_scanned_and_pending_a_lost_pending_group_stops_its_model_alone_and_a_resumed_one_refuses_it_as_expired(stage: Stage) -> None:
    lane = stage.free_lane()
    model, other = await stage.model(lane), await stage.model(lane)
    async with stage.seen(model) as seen, stage.seen(other) as beside:
        async with stage.owner(lane):
            (lost,) = await stage.send(model, group("lost", version=None))
            await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(2)))
            await beside.until(StepRecord, 1)
            await seen.until_state(lambda state: [pending.offset for pending in state.pending] == [lost])
        await stage.lose(model, before=lost + 1)
        async with stage.owner(lane):
            stopped = await seen.until_state(lambda state: state.status == "stopped")
            assert f"offsets {lost} are needed and are not there" in (stopped.status_detail or "")
            assert "`headrace models resume`" in (stopped.status_detail or "")
            await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(2, 4)))
            await beside.until(StepRecord, 2)
            await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
            (refused,) = await seen.until(GroupRejected, 1)
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
            (step,) = await seen.until(StepRecord, 1)
    assert (refused.offset, refused.reason) == (lost, RejectionReason.EXPIRED)
    assert offsets_of(step) == sent
    assert step.refusals == {RejectionReason.EXPIRED: 1}


async def test_scanned_and_pending_records_that_were_lost_before_anybody_read_them_stop_the_lanes_models_and_name_the_offsets(
    stage: Stage,
) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen:
        async with stage.owner(lane):
            await seen.until_state(lambda state: state.status == "active")
        lost, left = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        await stage.lose(model, before=left)
        async with stage.owner(lane):
            stopped = await seen.until_state(lambda state: state.status == "stopped")
            assert f"offsets {lost} to {lost} were deleted by retention before they were read" in (stopped.status_detail or "")
            assert (
                f"continues without this 1 record, and trains on every group of this model from offset {left} on" in stopped.status_detail
            )
            held = await stage.send(model, group("g1", seed=1, version=None), group("held", seed=2, version=None, job_id="j"))
            record = await stage.send_job(model, "j", "held")
        async with stage.owner(lane) as owner:
            await until(lambda: owner.lane.models is not None and owner.models.position > record)
            assert seen.of(GroupRejected) == [], "what is still readable waits"
            await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
            (refused,) = await seen.until(GroupRejected, 1)
            (job,) = await seen.until(StepRecord, 1)
            (last,) = await stage.send(model, group("last", seed=3, version=None))
            step = (await seen.until(StepRecord, 2))[1]
    assert (refused.offset, refused.reason) == (held[0], RejectionReason.DUPLICATE), "judged as it would have been"
    assert (job.job_id, offsets_of(job)) == ("j", [held[1]])
    assert offsets_of(step) == [left, last]
    assert [event.state for event in seen.of(JobStateChanged)] == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]


async def test_scanned_and_pending_a_group_that_waits_is_refused_while_its_record_is_still_in_the_log(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    options, topic = client_options(stage.settings.kafka, "test-rules"), stage.settings.topic_names.trajectory_groups
    config = next(dict(spec.config) for spec in TOPICS if spec.name == TRAJECTORY_GROUPS)
    async with open_admin(options) as admin:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, config | {"retention.ms": "3000"})])
    try:
        async with stage.seen(model) as seen, stage.owner(lane):
            (waits,) = await stage.send(model, group("waits", version=None))
            (refused,) = await seen.until(GroupRejected, 1)
        assert (refused.offset, refused.reason) == (waits, RejectionReason.EXPIRED)
        assert "its topic keeps records for 3 s" in refused.detail
        assert list(await fetch_offsets(options, topic, lane, [waits])) == [waits]
    finally:
        await apply(stage.settings)


async def test_lane_record_a_model_that_no_commit_has_named_yet_gets_its_groups_though_another_is_far_ahead(stage: Stage) -> None:
    lane = stage.free_lane()
    ahead = await stage.model(lane)
    async with stage.seen(ahead) as seen, stage.owner(lane):
        await stage.send(ahead, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
        await seen.until(StepRecord, 2)
    late = await stage.model(lane)
    (first,) = await stage.send(late, group("first", version=None))
    more = await stage.send(ahead, *(group(f"g{i}", seed=i, version=None) for i in range(4, 6)))
    (second,) = await stage.send(late, group("second", seed=1, version=None))

    async def die_before_it_is_named(commit: Commit) -> dict[str, int]:
        named = commit.of(ModelState, lambda state: state.model_id == late.model_id)
        return await (commit.die() if named else commit.go())

    async with stage.owner(lane, die_before_it_is_named) as owner:
        await owner.dead()
    async with stage.seen(late) as seen, stage.seen(ahead) as beside, stage.owner(lane):
        (step,) = await seen.until(StepRecord, 1)
        steps = await beside.until(StepRecord, 3)
        assert seen.dead_letters == []
    assert offsets_of(step) == [first, second]
    assert offsets_of(steps[2]) == more


async def test_intent_first_what_a_linger_cut_is_cut_again_after_a_crash_though_more_came_meanwhile(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane, groups_per_step=100, linger_seconds=0.2)
    cut = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
    async with stage.seen(model) as seen:
        async with stage.owner(lane, die_with_a_step) as owner:
            await owner.dead()
        intent = (await seen.until_state(lambda state: state.intent is not None)).intent
        assert intent == Intent(step=1, offsets=tuple(cut), reason="linger", cut="linger", attempts=0)
        (late,) = await stage.send(model, group("late", seed=2, version=None))
        async with stage.owner(lane):
            steps = await seen.until(StepRecord, 2)
            await seen.until_state(lambda state: state.policy_version == 2 and state.intent is None)
    assert [(step.cut, offsets_of(step)) for step in steps] == [("linger", cut), ("linger", [late])]


@pytest.mark.parametrize(("job_id", "deaths"), [("j", 2), (None, 3)], ids=["job", "stream"])
async def test_attempt_limit_a_batch_that_ends_its_worker_each_time_is_refused_and_the_lane_goes_on(
    stage: Stage, job_id: str | None, deaths: int
) -> None:
    """Of a job the first attempt is noted with RUNNING; a batch of the stream is under suspicion from the first unclean end on."""
    lane = stage.free_lane()
    model, other = await stage.model(lane), await stage.model(lane)
    poison = await stage.send(model, *(group(f"p{i}", seed=i, version=None, job_id=job_id) for i in range(2)))
    if job_id is not None:
        await stage.send_job(model, job_id, "p0", "p1")

    async def die_of_it(commit: Commit) -> dict[str, int]:
        return await (commit.die() if commit.of(StepRecord, lambda record: offsets_of(record) == poison) else commit.go())

    async with stage.seen(model) as seen, stage.seen(other) as beside:
        for _ in range(deaths):
            async with stage.owner(lane, die_of_it, max_step_attempts=2) as owner:
                await owner.dead()
        async with stage.owner(lane, die_of_it, max_step_attempts=2):
            refused = await seen.until(GroupRejected, 2)
            sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
            await stage.send(other, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
            (step,) = await seen.until(StepRecord, 1)
            await beside.until(StepRecord, 1)
    why = "its step has ended the worker 2 times (worker.max_step_attempts)"
    assert [(event.offset, event.reason, event.detail) for event in refused] == [(p, RejectionReason.STEP_FAILED, why) for p in poison]
    assert (offsets_of(step), step.policy_version_before) == (sent, 0)
    if job_id is not None:
        last = seen.of(JobStateChanged)[-1]
        assert (last.state, last.message) == (JobState.FAILED, why)


async def test_attempt_limit_a_worker_that_ends_in_order_puts_no_batch_under_suspicion(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None, job_id="j") for i in range(2)))
    await stage.send_job(model, "j", "g0", "g1")

    async with stage.seen(model) as seen:
        async with stage.world.turn(), stage.owner(lane, release_seconds=0.1) as owner:  # the step waits for the device
            await seen.until_state(lambda state: state.intent is not None)
            await owner.leave()
        async with stage.owner(lane, max_step_attempts=1):
            (step,) = await seen.until(StepRecord, 1)
    assert offsets_of(step) == sent
    assert seen.of(GroupRejected) == []


async def test_duplicate_window_the_window_after_a_crash_is_the_one_before_it(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    worker = {"duplicate_window": 3, "snapshot_every": 2}
    async with stage.seen(model) as seen:
        async with stage.owner(lane, **worker):
            await stage.send(model, group("waits", version=None, job_id="j"))
            await stage.send(model, *(group(name, seed=i, version=None) for i, name in enumerate("abcd")))
            await seen.until(StepRecord, 2)
            await stage.send(model, group("e", seed=5, version=None))
            unreadable = group("x", seed=6, version=None).model_dump_json().encode()
            await stage.put(model, unreadable, [("ce_type", b"headrace.trajectory-group.v9")])
            await seen.until_dead_letters(1)
            state = await seen.until_state(lambda found: len(found.pending) == 2)
            assert state.snapshot_step == 2, "a part of the window is in the snapshot, the rest in the state"
        async with stage.owner(lane, **worker):
            again = [*"cde", "a", "x"]
            offsets = await stage.send(model, *(group(name, seed=i, version=None) for i, name in enumerate(again)))
            refused = await seen.until(GroupRejected, 3)
            steps = await seen.until(StepRecord, 3)
    assert [(event.group_id, event.reason) for event in refused] == [(name, RejectionReason.DUPLICATE) for name in "cde"]
    assert offsets_of(steps[2])[1:] == [offsets[3]], "the stream's e, which waited, and a, which had left the window"


async def test_duplicate_window_a_group_that_is_read_again_since_it_waited_pushes_nobody_out_of_the_window(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)

    async with stage.seen(model) as seen:
        async with stage.owner(lane, duplicate_window=2) as owner:
            await stage.send(model, group("waits", version=None, job_id="j"))
            await stage.send(model, *(group(name, seed=i, version=None) for i, name in enumerate("ab")))
            await seen.until_state(lambda found: found.policy_version == 1 and len(found.pending) == 1)
            before = stage.run_of(owner, model).window.to_bytes()
        async with stage.owner(lane, duplicate_window=2) as owner:
            await stage.send(model, group("a", version=None))
            (refused,) = await seen.until(GroupRejected, 1)
            assert stage.run_of(owner, model).window.to_bytes() == before
    assert (refused.group_id, refused.reason) == ("a", RejectionReason.DUPLICATE)
