"""What a job may ask for next to its step: evaluation, log-probabilities instead of training, deployments, machines; and warm starts."""

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from tests.worker.following import Following
from tests.worker.groups import group
from tests.worker.stage import Stage

from headrace.consumers.replay.run import Task, replay
from headrace.consumers.replay.start import find_route
from headrace.consumers.worker.jobs import evaluation_of
from headrace.core.group_sets import store_groups
from headrace.core.ledger import StepRange
from headrace.core.models import ModelView
from headrace.core.store import read_manifest
from headrace.schemas.events import GroupRejected, StepCompleted
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.weights import Manifest, WeightsPublished, WeightsRef
from headrace.trainer.evaluation import NAMES
from headrace.trainer.logprobs_file import LOGPROBS_FILE, read_logprobs

KL = {"learning_rate": 1e-2, "kl_penalty_coef": 0.1}


async def ask(stage: Stage, model: ModelView, seeds: Sequence[int], **more: object) -> str:
    """A job on new groups, whose tokens are the seeds'."""
    job_id = str(uuid.uuid4())
    groups = [group(f"{job_id[:8]} {seed}", seed=seed, version=None, job_id=job_id) for seed in seeds]
    await stage.send(model, *groups)
    await stage.send_job(model, job_id, *(str(each.group_id) for each in groups), **more)
    return job_id


async def ended(seen: Following, job_id: str) -> JobDocument:
    """The document of a job that has ended."""
    return await seen.until_job(job_id, lambda document: document.completed_at is not None)


def logprobs_of(stage: Stage, ref: WeightsRef | None) -> dict[bytes, Any]:
    assert ref is not None
    (file,) = read_manifest(stage.store, ref.uri, ref.digest).files
    return read_logprobs(stage.store.get_bytes(f"{stage.store.resolve(ref.uri)}/{LOGPROBS_FILE}", sha256=file.sha256))


@pytest.mark.asyncio(loop_scope="session")
async def test_a_job_is_evaluated_and_given_to_its_deployments_and_trains_what_it_trains_without(stage: Stage) -> None:
    lane = stage.free_lane()
    plain, asked = await stage.model(lane), await stage.model(lane)
    evaluation = store_groups(stage.store, [group("e", seed=5), group("f", seed=6)])
    wanted = {"evaluation": evaluation, "rollout_deployments": ["one", "two"], "hot_load_deployment": "one"}
    async with stage.owner(lane), stage.seen(plain) as beside, stage.seen(asked) as seen:
        for seed in (0, 1):
            await ask(stage, plain, [seed])
            job_id = await ask(stage, asked, [seed], **wanted)
        alone, steps = await beside.until(StepRecord, 2), await seen.until(StepRecord, 2)
        document = await ended(seen, job_id)
        stage.store.delete(stage.store.resolve(evaluation.uri))
        failed = await ended(seen, await ask(stage, asked, [2], **wanted))
        await ask(stage, asked, [3])
        await seen.until(StepRecord, 3)
    assert [step.weights.digest for step in steps] == [step.weights.digest for step in alone]
    assert set(document.evaluation) == {*NAMES} - {"kl_reference"}
    assert {f"eval/{name}": value for name, value in document.evaluation.items()} == {
        name: value for name, value in steps[1].metrics.items() if name.startswith("eval/")
    }
    assert seen.of(StepCompleted)[1].metrics == steps[1].metrics
    assert not any(name.startswith("eval/") for name in document.metrics)
    assert document.evaluation["groups"] == 2
    assert document.accelerator_seconds["CPU"] > 0
    published = seen.of(WeightsPublished)
    assert [each.rollout_deployments for each in published] == [("one", "two"), ("one", "two"), ()]
    identity = document.hot_load_identity
    assert identity is not None
    assert identity.startswith("v2-")
    assert identity == steps[1].hot_load_identity
    manifest = Manifest.model_validate_json(stage.store.get_bytes(f"deployments/one/{identity}/manifest.json"))
    assert (manifest.uri, manifest.digest, manifest.files) == (published[1].uri, published[1].digest, published[1].files)
    assert len(list(stage.store.list("deployments/one/"))) == 2
    assert (failed.state, failed.step) == (JobState.FAILED, None)
    assert f"the evaluation set can't be used: {evaluation.uri} does not exist" in (failed.error_message or "")
    (refused,) = seen.of(GroupRejected)
    assert refused.reason is RejectionReason.STEP_FAILED


@pytest.mark.asyncio(loop_scope="session")
async def test_logprobs_of_a_forward_only_job_are_a_reference_and_an_owner_runs_both_again(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen:
        async with stage.owner(lane):
            await ask(stage, model, [0])
            forward = await ended(seen, await ask(stage, model, [1, 2], forward_only=True))
            await ask(stage, model, [3])
            await seen.until(StepRecord, 3)
            await seen.until_state(lambda state: state.policy_version == 3)
        assert forward.logprobs is not None
        config = KL | {"kl_ref_logprobs": forward.logprobs.uri}
        async with stage.owner(lane):
            # The same tokens in groups of other ids: the steps before are run again first.
            await ask(stage, model, [2, 1], config=config)
            lacking = await ended(seen, await ask(stage, model, [2, 4], config=config))
            await seen.until_state(lambda state: state.policy_version == 4)
        async with stage.owner(lane):
            own = await ended(seen, await ask(stage, model, [1, 2], config=KL | {"kl_penalty_reference_step": 2}))
        steps = seen.of(StepRecord)
    assert [(step.updates, step.options.forward_only) for step in steps] == [(1, False), (0, True), (1, False), (1, False), (1, False)]
    assert steps[1].weights.digest == steps[0].weights.digest != steps[2].weights.digest
    assert (forward.state, forward.metrics["updates"], "loss" in forward.metrics) == (JobState.COMPLETED, 0, False)
    assert len(logprobs_of(stage, forward.logprobs)) == 4
    assert steps[3].metrics["kl_reference"] > 1e-6, "two versions away"
    assert (lacking.state, lacking.step) == (JobState.FAILED, None)
    assert "lacks 2 of the step's 4 sequences, the first of group" in (lacking.error_message or "")
    assert own.step == 5
    assert seen.of(ModelState)[-1].status == "active"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_warm_start_is_version_0_and_the_reference_and_owners_and_replays_begin_from_it_again(stage: Stage) -> None:
    lane = stage.free_lane()
    source = await stage.model(lane)
    async with stage.owner(lane), stage.seen(source) as seen:
        await ask(stage, source, [0])
        (trained,) = await seen.until(StepRecord, 1)
        expected = await ended(seen, await ask(stage, source, [1, 2], forward_only=True))
    warm = await stage.model(lane, start_weights=trained.weights)
    evaluation = store_groups(stage.store, [group("e", seed=5)])
    gone = await stage.model(lane, start_weights=trained.weights.model_copy(update={"uri": f"{trained.weights.uri}-gone"}))
    async with stage.seen(warm) as seen, stage.seen(gone) as beside:
        async with stage.owner(lane):
            first = await ended(seen, await ask(stage, warm, [1, 2], forward_only=True))
            await ask(stage, warm, [0], config=KL, evaluation=evaluation)
            await seen.until_state(lambda state: state.policy_version == 2)
            held = await ask(stage, gone, [0])
            stopped = await beside.until_state(lambda state: state.status == "stopped")
            waits = await beside.until_job(held, lambda document: document.waiting_for is not None)
        async with stage.owner(lane):
            await ask(stage, warm, [0], config=KL)
            steps = await seen.until(StepRecord, 3)
            states = seen.of(ModelState)
    state = states[-1]
    route = await find_route(stage.settings, stage.store, state, StepRange.parse("1..2"))
    async with replay(stage.settings, Task(model=state.settings, route=route, start=state.start_weights)) as again:
        replayed = [step async for step in again]
    ours, theirs = logprobs_of(stage, first.logprobs), logprobs_of(stage, expected.logprobs)
    assert {key: values.tolist() for key, values in ours.items()} == {key: values.tolist() for key, values in theirs.items()}
    assert steps[0].weights.digest == trained.weights.digest
    assert steps[1].metrics["kl_reference"] == pytest.approx(0, abs=1e-12), "version 0 is the reference"
    assert steps[2].metrics["kl_reference"] > 1e-6
    assert state.start_weights == trained.weights
    assert [step.equal for step in replayed] == [True, True]
    assert replayed[1].rerun is not None
    assert evaluation_of(replayed[1].rerun.result.metrics) == evaluation_of(steps[1].metrics) != {}
    assert "the weights that it begins with can't be used" in (stopped.status_detail or "")
    assert waits.state is not JobState.FAILED, "it trains when the model is resumed"
    assert "-gone" in (waits.waiting_for or "")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_job_waits_for_as_many_machines_as_it_needs_and_says_so_and_others_go_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen:
        async with stage.owner(lane):
            large = await ask(stage, model, [0], node_count=2)
            await ask(stage, model, [1])
            (other,) = await seen.until(StepRecord, 1)
            waits = await seen.until_job(large, lambda document: document.waiting_for is not None)
        assert other.job_id != large
        assert waits.state is JobState.PENDING
        assert f"it needs 2 nodes, and the worker that owns lane {lane} has 1" in (waits.waiting_for or "")
        for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        async with stage.owner(lane):
            done = await ended(seen, large)
    assert (done.state, done.step, done.waiting_for) == (JobState.COMPLETED, 2, None)
