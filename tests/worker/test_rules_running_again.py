"""Rule 13: a step that is run again must be able to refuse; and rule 14's two attempts at one name.

What an environment would change is changed in the ledger as it is written, since the ranks of these tests are started once; what is
compared, and what follows from a difference, is the same.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.groups import group
from tests.worker.stage import Commit, Stage, offsets_of, until

from headrace.core.models import ModelView, resume_model, wait_for_model
from headrace.core.store import ObjectExistsError, ObjectStore, read_manifest, store_folder
from headrace.producers import TrajectoryProducer
from headrace.schemas.events import GroupRejected
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState, StepRecord
from headrace.schemas.weights import WeightsPublished, WeightsRef

OTHER = "0" * 64


def other_environment(commit: Commit) -> None:
    other = {"threads": 7, "world_size": 2}
    commit.alter(StepRecord, lambda record: record.model_copy(update={"fingerprint": record.fingerprint.model_copy(update=other)}))


def other_plan(commit: Commit) -> None:
    commit.alter(StepRecord, lambda record: record.model_copy(update={"plan_digest": OTHER}))


def other_weights(commit: Commit) -> None:
    def changed(ref: WeightsRef | None) -> WeightsRef | None:
        return ref and ref.model_copy(update={"digest": OTHER})

    commit.alter(StepRecord, lambda record: record.model_copy(update={"weights": changed(record.weights)}))
    commit.alter(ModelState, lambda state: state.model_copy(update={"weights": changed(state.weights)}))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_environment, "world_size: 1, the ledger has 2; threads: 1, the ledger has 7"),
        (other_plan, f"the ledger has {OTHER}"),
        (other_weights, f"the ledger has {OTHER}"),
    ],
    ids=["environment", "plan", "weights"],
)
async def test_verified_rerun_a_step_that_does_not_come_out_as_before_stops_its_model_alone_and_an_operator_rebases_it(
    stage: Stage, change: Callable[[Commit], None], said: str
) -> None:
    lane = stage.free_lane()
    model, other = await stage.model(lane), await stage.model(lane)

    async def changed(commit: Commit) -> dict[str, int]:
        if commit.of(StepRecord, lambda record: (record.model_id, record.step) == (model.model_id, 2)):
            change(commit)
        return await commit.go()

    async with stage.seen(model) as seen, stage.seen(other) as beside:
        async with stage.owner(lane, changed):
            await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4)))
            await seen.until_state(lambda state: state.policy_version == 2)
        async with stage.owner(lane):
            waiting = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(4, 6)))
            diverged = await seen.until_state(lambda state: state.status == "diverged")
            assert "step 2, run again: " in (diverged.status_detail or "")
            assert said in (diverged.status_detail or "")
            await stage.send(other, *(group(f"o{i}", seed=i, version=None) for i in range(2)))
            await beside.until(StepRecord, 1)
            assert [published.policy_version for published in seen.of(WeightsPublished)] == [1, 2], "it publishes nothing"
            await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
            steps = await seen.until(StepRecord, 4)
    rebased = steps[2].rebased
    assert rebased is not None
    assert (steps[2].cut, steps[2].updates, steps[2].policy_version_after) == ("rebased", 0, 3)
    assert rebased.expected_digest == (OTHER if change is other_weights else steps[1].weights.digest)
    assert rebased.found_digest == steps[2].weights.digest != OTHER
    assert said in rebased.reason
    assert (offsets_of(steps[3]), steps[3].policy_version_before) == (waiting, 3)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_step_that_makes_the_weights_huge_stops_its_model_which_goes_on_from_the_state_before(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen, stage.owner(lane):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        await seen.until(StepRecord, 1)
        await stage.send(model, *(group(f"w{i}", seed=i, version=None, job_id="wild") for i in range(2)))
        await stage.send_job(model, "wild", "w0", "w1", config={"learning_rate": 10})
        diverged = await seen.until_state(lambda state: state.status == "diverged")
        detail = diverged.status_detail or ""
        assert detail.startswith("step 2: update 1 of 1, at rate 10, takes the weights' norm from ")
        assert (diverged.policy_version, len(seen.of(StepRecord)), len(seen.of(WeightsPublished))) == (1, 1, 1)
        failed = [job for job in seen.of(JobDocument) if job.state is JobState.FAILED]
        assert [job.error_message for job in failed] == [f"the model has diverged: {detail}"]
        await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
        await stage.send(model, *(group(f"h{i}", seed=i, version=None) for i in range(2)))
        steps = await seen.until(StepRecord, 3)
        assert steps[1].weights.digest == steps[0].weights.digest, "resumed from the state before the update"
        assert steps[2].updates == 1
        wild = await stage.model(lane, learning_rate=10)
        async with stage.seen(wild) as other:
            await stage.send(wild, *(group(f"s{i}", seed=i, version=None) for i in range(2)))
            stopped = await other.until_state(lambda state: state.status == "diverged")
            rejected = await other.until(GroupRejected, 2)
            assert {event.reason for event in rejected} == {RejectionReason.STEP_FAILED}, "resumed, the batch would do so again"
            assert (stopped.pending, stopped.policy_version) == ((), 0)


async def trained_on_claims(stage: Stage, model: ModelView, lane: int) -> list[Path]:
    """One step on two groups whose payloads are in the store; its owner is dead, and no snapshot was stored."""
    there = {found.key for found in stage.store.list("payloads/")}
    settings = stage.settings.model_copy(update={"producer": stage.settings.producer.model_copy(update={"inline_limit_bytes": 1024})})
    async with stage.seen(model) as seen, stage.owner(lane), TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for i in range(2):
            large = group(f"large {i}", seed=i, version=None)
            large.metadata["notes"] = f"{model.model_id} {i} " * 100
            await producer.send(large)
        await seen.until(StepRecord, 1)
        await seen.until_state(lambda state: state.policy_version == 1)
    keys = {found.key for found in stage.store.list("payloads/")} - there
    assert len(keys) == 2
    return [Path(stage.settings.store.url.removeprefix("file://")) / key for key in keys]


@pytest.mark.asyncio(loop_scope="session")
async def test_verified_rerun_a_payload_that_is_gone_stops_its_model_and_what_can_be_had_is_gone_on_from(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    payloads = await trained_on_claims(stage, model, lane)
    payloads[0].unlink()
    async with stage.seen(model) as seen, stage.owner(lane):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        diverged = await seen.until_state(lambda state: state.status == "diverged")
        assert "step 1: the group at offset" in (diverged.status_detail or "")
        assert "which it trained on, can't be read any more" in (diverged.status_detail or "")
        await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
        steps = await seen.until(StepRecord, 3)
    assert steps[1].rebased is not None
    assert "resumed from step 0" in steps[1].rebased.reason
    assert seen.of(GroupRejected) == []


@pytest.mark.asyncio(loop_scope="session")
async def test_verified_rerun_a_store_that_is_away_for_a_moment_is_waited_for(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A file that the operating system can't open, as on a network file system that is not there: no answer, unlike "no such file"."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    payloads = await trained_on_claims(stage, model, lane)
    for path in payloads:
        path.rename(path.with_suffix(".away"))
        path.symlink_to(path)
    sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
    async with stage.seen(model) as seen, stage.owner(lane):
        await until(lambda: f"step 2 of {model.name} waits, and is tried again until it works" in caplog.text)
        for path in payloads:
            path.with_suffix(".away").replace(path)
        steps = await seen.until(StepRecord, 2)
        assert {state.status for state in seen.of(ModelState)} == {"active"}
    assert offsets_of(steps[1]) == sent
    assert steps[1].attempt_before == steps[0].attempt


def test_attempt_names_two_attempts_at_one_step_never_meet_and_the_same_one_again_is_success(store: ObjectStore, tmp_path: Path) -> None:
    def put(attempt: str, content: bytes) -> WeightsRef:
        folder = tmp_path / f"{attempt}-{content.decode()}"
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_bytes(content)
        key = f"models/m/i/weights/00000006-{attempt}"
        return store_folder(store, key, folder, kind="weights", model_id="m", incarnation="i", step=6, attempt=attempt)[1]

    first, second = put("a", b"one"), put("b", b"two")
    assert first.uri != second.uri
    assert put("a", b"one") == first, "a 412 or 409 is success where what is stored has our digest"
    with pytest.raises(ObjectExistsError, match="exists with other content"):
        put("a", b"three")
    for ref in (first, second):
        read_manifest(store, ref.uri, ref.digest)
