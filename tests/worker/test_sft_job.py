"""Supervised fine-tuning as a job: examples in, several updates in one committed step, and nothing of it in the stream."""

import pytest
from tests.worker.conftest import following, learner
from tests.worker.groups import group

from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.schemas.chat import Message
from headrace.schemas.events import GroupRejected, JobStateChanged, TrajectoryRejected
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord
from headrace.schemas.training import SftConfig
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup


def examples(name: str, *answers: str) -> TrajectoryGroup:
    """One example for each answer."""
    trajectories = [
        Trajectory(messages_and_choices=[Message(role="user", content="a b"), Message(role="assistant", content=answer)])
        for answer in answers
    ]
    return TrajectoryGroup(trajectories=trajectories, group_id=name)


async def test_examples_train_for_some_epochs_inside_one_step(shared: Settings) -> None:
    model = await learner(shared, "imitates", zero_variance="refuse", incomplete_groups="complete", max_policy_lag=0)
    sft = SftConfig(epochs=3, batch_size=2, learning_rate=1e-2)
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        job_id = await producer.submit_job([examples("alone", "c d"), examples("three", "c d", "e " * 500, "c")], sft=sft)
        (step,) = await seen.until(StepRecord, 1)
        states = [event.state for event in await seen.until(JobStateChanged, 3)]
        (lost,) = await seen.until(TrajectoryRejected, 1)
        document = seen.of(JobDocument)[-1]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]
    assert (step.job_id, step.groups, step.policy_version_after) == (job_id, 2, 1)
    assert step.updates == 6, "three examples are two batches, three times"
    assert (lost.group_id, lost.trajectory, lost.reason) == ("three", 1, RejectionReason.TOO_LONG)
    assert (document.kind, document.sft, document.step) == ("sft", sft, 1)
    assert seen.of(GroupRejected) == []


async def test_a_job_whose_examples_are_all_unfit_ends_well_without_an_update(shared: Settings) -> None:
    model = await learner(shared, "nothing to imitate")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.submit_job([examples("long", "e " * 500)], kind="sft")
        (step,) = await seen.until(StepRecord, 1)
        events = await seen.until(JobStateChanged, 3)
        (refused,) = await seen.until(GroupRejected, 1)
    assert (step.updates, step.loss, step.groups) == (0, None, 0)
    assert events[-1].state is JobState.COMPLETED
    assert refused.reason is RejectionReason.TOO_LONG


@pytest.mark.parametrize("kind", ["rl", "sft"])
async def test_a_job_of_another_kind_than_its_groups_fails_with_a_message_and_the_stream_goes_on(shared: Settings, kind: str) -> None:
    """A producer of ours can't send such a job; another one can."""
    model = await learner(shared, f"mixed up {kind}")
    mixed = examples("g", "c d") if kind == "rl" else group("g")
    mixed.purpose = "sft" if kind == "rl" else None
    mixed.job_id = "j"
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.send(mixed)
        again = group("g")
        await producer.submit_job([again], job_id="j", kind="sft" if kind == "sft" else "rl")
        events = await seen.until(JobStateChanged, 2)
        refused = await seen.until(GroupRejected, 2)
        await producer.send(group("b"))
        await producer.send(group("c", seed=1))
        (step,) = await seen.until(StepRecord, 1)
    assert [event.state for event in events] == [JobState.PENDING, JobState.FAILED]
    assert f"the job is of kind {kind!r}, but 1 of its 1 groups are of purpose" in (events[-1].message or "")
    assert sorted(event.reason for event in refused) == [RejectionReason.DUPLICATE, RejectionReason.JOB_KIND_MISMATCH]
    assert (step.job_id, step.groups) == (None, 2)
