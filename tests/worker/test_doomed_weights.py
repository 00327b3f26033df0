"""Checkpoints that a client deleted: when their weights go, and what they may not be used for until then."""

from pathlib import Path

import pytest
from tests.worker.learners import learner_settings

from headrace.consumers.worker.duplicates import DuplicateWindow
from headrace.consumers.worker.kl_references import KlReferences, ReferencedStep, ReferenceMissingError
from headrace.consumers.worker.lane_model import LaneModel
from headrace.consumers.worker.storage.deleted_weights import WeightsDeleter, doom, due, is_doomed
from headrace.core.settings import S3Settings
from headrace.core.store import ObjectStore, open_store, store_folder
from headrace.schemas.state import ModelState
from headrace.trainer.options import KlOptions


def run_of(*, version: int, snapshot_step: int) -> LaneModel:
    """A model that has made so many steps, with a snapshot of one of them."""
    state = ModelState(
        model_id="m",
        incarnation="i",
        account="a",
        project="p",
        name="n",
        worker_group="g",
        settings=learner_settings(),
        policy_version=version,
        snapshot_step=snapshot_step,
        scanned=0,
    )
    return LaneModel.from_state(state, DuplicateWindow(10), lane=0)


def committed(run: LaneModel, **update: object) -> None:
    """What a transaction does."""
    run.apply(run.next_change(0, **update))


def test_weights_go_when_it_is_committed_that_they_are_doomed_and_a_snapshot_covers_all_steps_that_may_have_read_them() -> None:
    run = run_of(version=6, snapshot_step=4)
    doom(run, [(1, 2), (5, 6)], running=False)
    assert due(run) == [], "not committed"
    committed(run)
    assert due(run) == [], "steps 5 and 6 may have to be run again, with step 1 as their reference"
    committed(run, policy_version=8, snapshot_step=8)
    assert due(run) == [1, 2, 5, 6]


def test_a_running_step_may_have_read_them_and_is_waited_for() -> None:
    run = run_of(version=4, snapshot_step=4)
    doom(run, [(1, 1)], running=True)
    committed(run)
    assert due(run) == []
    committed(run, policy_version=5, snapshot_step=5)
    assert due(run) == [1]


def test_the_newest_version_stays_until_there_is_a_newer_one_and_what_is_no_version_is_not_noted() -> None:
    run = run_of(version=4, snapshot_step=4)
    doom(run, [(0, 10**15)], running=False)
    committed(run)
    assert [batch.steps for batch in run.doomed] == [((1, 4),)]
    assert due(run) == [1, 2, 3]
    committed(run, policy_version=5, snapshot_step=4)
    assert due(run) == [1, 2, 3, 4]
    doom(run, [(2, 5)], running=False)
    assert run.doomed[-1].steps == ((5, 5),), "the others are known"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """With the weights of four steps, of step 2 by two attempts."""
    found = open_store(f"file://{tmp_path}/store", S3Settings())
    for name in ("weights/00000001-a", "weights/00000002-a", "weights/00000002-b", "weights/00000003-a", "snapshots/00000002-a"):
        found.put_bytes_if_absent(f"models/m/i/{name}/manifest.json", b"{}")
        found.put_bytes_if_absent(f"models/m/i/{name}/x", b"x")
    return found


async def test_only_what_is_due_goes_and_is_forgotten(store: ObjectStore) -> None:
    run = run_of(version=3, snapshot_step=3)
    doom(run, [(2, 3)], running=False)
    committed(run)
    await WeightsDeleter(store).collect(run)
    left = sorted({found.key.rsplit("/", 1)[0].removeprefix("models/m/i/") for found in store.list("models/")})
    assert left == ["snapshots/00000002-a", "weights/00000001-a", "weights/00000003-a"]
    assert [batch.steps for batch in run.doomed] == [((3, 3),)]
    committed(run)
    assert due(run) == []


async def test_the_reference_of_the_step_that_runs_stays_while_the_next_one_fetches_its_own(store: ObjectStore, tmp_path: Path) -> None:
    references = KlReferences({}, "steps", 0, store, tmp_path / "references")
    for step in (1, 2, 3):
        folder = tmp_path / f"weights-{step}"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(bytes([step]))
        key = f"models/other/i/weights/{step:08}-x"
        _, ref = store_folder(store, key, folder, kind="weights", model_id="other", incarnation="i", step=step, attempt="x")
        references._weights["other", "i", step] = ref
    needed = ReferencedStep(model_id="other", incarnation="i", version=3)
    left = [[1], [1, 2], [2, 3]]
    for step in (1, 2, 3):
        await references.find(needed, KlOptions(coef=1.0, reference_step=step))
        files = sorted((tmp_path / "references").rglob("adapter_model.safetensors"))
        assert sorted(file.read_bytes()[0] for file in files) == left[step - 1]


async def test_no_step_begins_with_doomed_weights_as_its_reference(store: ObjectStore, tmp_path: Path) -> None:
    run = run_of(version=3, snapshot_step=3)
    doom(run, [(2, 2)], running=False)
    references = KlReferences({}, "steps", 0, store, tmp_path)
    needed = ReferencedStep(model_id="m", incarnation="i", version=3, is_doomed=lambda step: is_doomed(run, step))
    with pytest.raises(ReferenceMissingError, match="step 2, a checkpoint that was deleted"):
        await references.find(needed, KlOptions(coef=1.0, step_lag=1))
