"""A snapshot that is damaged or gone is the fault of its model: the lane continues, and the model can be resumed or deleted."""

from pathlib import Path

import pytest
from tests.worker.groups import group
from tests.worker.stage import Stage, offsets_of

from headrace.core.model_views import ModelView
from headrace.core.models import delete_model, resume_model, wait_for_model
from headrace.schemas.events import GroupRejected
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import ModelState, Rebased, StepRecord
from headrace.schemas.weights import WeightsRef

pytestmark = pytest.mark.asyncio(loop_scope="session")


def path_of(stage: Stage, ref: WeightsRef | None, name: str) -> Path:
    assert ref is not None
    return Path(stage.settings.store.url.removeprefix("file://"), stage.store.resolve(ref.uri), name)


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[0] ^= 1
    path.chmod(0o600)
    path.write_bytes(body)


async def diverge(stage: Stage, lane: int, model: ModelView, *ill: tuple[str, str], **worker: object) -> ModelState:
    """Four steps with snapshots at 2 and 4, and an ill store for the next owner."""
    async with stage.seen(model) as seen, stage.owner(lane, snapshot_every=2, **worker):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(8)))
        await seen.until(StepRecord, 4, 30)
        state = await seen.until_state(lambda found: found.policy_version == found.snapshot_step == 4, 30)
    for kind, name in ill:
        path = path_of(stage, getattr(state, kind), name)
        path.unlink() if name == "manifest.json" else flip(path)
    return state


async def trains(stage: Stage, model: ModelView) -> None:
    async with stage.seen(model) as seen:
        await stage.send(model, *(group(f"o{i}", seed=i, version=None) for i in range(2)))
        await seen.until(StepRecord, 1, 30)


async def rebased_of(stage: Stage, lane: int, model: ModelView, **worker: object) -> tuple[Rebased, list[int], list[GroupRejected]]:
    """The model has diverged and is resumed, while another one on its lane trains."""
    async with stage.seen(model) as seen, stage.owner(lane, snapshot_every=2, **worker):
        diverged = await seen.until_state(lambda found: found.status == "diverged", 30)
        assert "the snapshot of step 4 can't be used" in (diverged.status_detail or "")
        held = await stage.send(model, group("g0", version=None), *(group(f"h{i}", seed=i, version=None) for i in range(2)))
        await trains(stage, await stage.model(lane))
        await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
        steps = await seen.until(StepRecord, 6, 30)
        assert steps[4].rebased is not None
        return steps[4].rebased, [offset for offset in held if offset in offsets_of(steps[5])], seen.of(GroupRejected)


async def test_a_damaged_window_stops_its_model_alone_and_resume_comes_to_the_same_bits_from_the_snapshot_before(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    before = await diverge(stage, lane, model, ("snapshot", "duplicates.u64"))
    rebased, trained, refused = await rebased_of(stage, lane, model)
    assert before.weights is not None
    assert rebased.found_digest == rebased.expected_digest == before.weights.digest
    assert rebased.resumed_from == 4
    assert [(event.group_id, event.reason) for event in refused] == [("g0", RejectionReason.DUPLICATE)]
    assert len(trained) == 2, "what came while it had diverged has waited"


async def test_without_any_snapshot_a_model_is_resumed_from_its_published_weights_and_the_ledger_says_so(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    await diverge(stage, lane, model, ("snapshot", "manifest.json"), keep_snapshots=1)
    rebased, trained, refused = await rebased_of(stage, lane, model, keep_snapshots=1)
    assert rebased.found_digest == rebased.expected_digest
    assert rebased.resumed_from == 4
    assert len(trained) == 2
    assert [(event.group_id, event.reason) for event in refused] == [("g0", RejectionReason.DUPLICATE)]
    assert "it continues from the weights of version 4, with a new optimizer" in rebased.reason


async def test_a_model_of_which_nothing_can_be_read_says_what_can_be_done_and_is_deleted(stage: Stage) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    ill = (("snapshot", "manifest.json"), ("weights", "model.safetensors"))
    await diverge(stage, lane, model, *ill, keep_snapshots=1)
    async with stage.seen(model) as seen, stage.owner(lane, snapshot_every=2, keep_snapshots=1):
        await seen.until_state(lambda found: found.status == "diverged", 30)
        await resume_model(stage.settings, model.model_id)
        again = await seen.until_state(lambda found: "it can't be resumed" in (found.status_detail or ""), 30)
        assert again.status == "diverged"
        assert "`headrace replay --publish-to`" in (again.status_detail or "")
        (held,) = await stage.send(model, group("held", version=None))
        deleted = await wait_for_model(stage.settings, await delete_model(stage.settings, model.model_id), 60)
        (refused,) = await seen.until(GroupRejected, 1, 30)
        await trains(stage, await stage.model(lane))
    assert deleted.status == "deleted"
    assert (refused.offset, refused.reason) == (held, RejectionReason.MODEL_DELETED)


async def test_versions_that_a_rewound_ledger_does_not_know_are_reported_by_name_and_kept(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen, stage.owner(lane, snapshot_every=2, keep_snapshots=1):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(10)))
        steps = await seen.until(StepRecord, 5, 30)
        await seen.until_state(lambda found: found.policy_version == 5, 30)
    # Kafka has lost the end of the partition: the last state that it knows is that of step 2, whose snapshot is not kept any more.
    rewound = next(found for found in seen.of(ModelState) if found.policy_version == 2)
    await stage.write_state(model, rewound)
    async with stage.seen(model) as seen, stage.owner(lane, snapshot_every=2, keep_snapshots=1):
        diverged = await seen.until_state(lambda found: found.status == "diverged" and bool(found.unknown_versions), 30)
        await wait_for_model(stage.settings, await resume_model(stage.settings, model.model_id), 60)
        again = await seen.until_state(lambda found: found.policy_version == 3 and found.unknown_versions != (), 30)
    lost = tuple(step.weights.uri for step in steps[2:])
    assert diverged.unknown_versions == again.unknown_versions == lost
    assert all(any(uri in record.message for record in caplog.records) for uri in lost)
