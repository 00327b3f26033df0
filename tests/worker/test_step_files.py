"""What a step stores: its report, and what else it wrote; against files and a real S3 server."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from unittest import mock

import pytest
from tests.worker.test_selection import members, run_of

from headrace.consumers.worker.pending import PendingGroup
from headrace.consumers.worker.selection import Batch
from headrace.consumers.worker.storage import step_files
from headrace.consumers.worker.storage.step_files import read_duplicates, store_step
from headrace.consumers.worker.storage.step_report import build_report
from headrace.core.reports import read_report, read_rows
from headrace.core.store import ObjectStore, StoreError, StoreUnavailableError, fetch_folder
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Fingerprint, StepReport, TrainingScalars
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.weights import WeightsRef
from headrace.trainer.groups import RejectedTrajectory
from headrace.trainer.plan import BaseSource, StateKey, StepPlan, StepResult

FINGERPRINT = Fingerprint(headrace="0", torch="0", transformers="0", deepspeed="0", python="3", device="CPU", world_size=1, threads=1)
KEY = StateKey(model_id="m", incarnation="i", step=3, attempt="attempt")
RESULT = StepResult(
    key=KEY,
    scalars=TrainingScalars(),
    updates=1,
    loss=0.5,
    grad_norm=1.0,
    num_sequences=4,
    tokens=40,
    metrics={"seconds_pack": 0.25, "seconds_update": 0.5, "loss": 0.5},
    plan_digest="p",
    seed=1,
    weights_format="full",
    seconds=1.5,
    fingerprint=FINGERPRINT,
)
GONE = RejectedTrajectory(index=1, reason=RejectionReason.TOO_LONG, detail="trajectories[1]: long")
REFUSED = GroupRejected(model_id="m", group_id="x", reason=RejectionReason.DUPLICATE, detail="twice", partition=1, offset=4)
REFUSED_MEMBER = TrajectoryRejected(
    model_id="m", group_id="some", reason=RejectionReason.TOO_LONG, detail="long", trajectory=1, partition=1, offset=6
)


def batch() -> Batch:
    """Three members, of which one was refused; a group without variance; rewards 0 and 1 in the first."""
    some = replace(members("some", 0, 2), rejected=(GONE,))
    return Batch(
        groups=(
            PendingGroup(offset=6, group=some, job_id="j", producer="agent/1"),
            PendingGroup(offset=7, group=members("same", None), job_id="j"),
        ),
        job_id="j",
        cut="job",
        completed_at=8,
    )


def report_of(batch: Batch, result: StepResult = RESULT, *, sft: SftConfig | None = None, config: TrainConfig | None = None) -> StepReport:
    plan = StepPlan(
        state=StateKey(model_id="m", incarnation="i", step=2, attempt="before"),
        attempt="attempt",
        base=BaseSource(path="nowhere"),
        settings=run_of().state.settings,
        config=config or TrainConfig(),
        groups=tuple(waiting.group for waiting in batch.groups),
        sft=sft,
        out_dir="nowhere",
    )
    return build_report(
        plan=plan,
        batch=batch,
        result=result,
        lane=1,
        refused=[REFUSED],
        refused_trajectories=[REFUSED_MEMBER],
        unlisted=7,
        timings={"queue": 2.0},
        rows="sample",
    )


def test_a_report_says_what_was_trained_on_and_what_was_not() -> None:
    report = report_of(batch())
    assert (report.model_id, report.incarnation, report.step, report.attempt) == ("m", "i", 3, "attempt")
    assert (report.lane, report.job_id) == (1, "j")
    assert [(g.group_id, g.offset, g.producer) for g in report.groups] == [("some", 6, "agent/1"), ("same", 7, None)]
    first, second = report.groups[0].trajectories
    assert (first.index, second.index) == (0, 2), "as they were sent: the second of three was refused"
    assert (first.reward, first.tokens, first.trainable_tokens, first.initial_policy_version) == (0.0, 4, 3, 0)
    assert first.advantage == pytest.approx(-1, abs=1e-5)
    assert second.advantage == pytest.approx(1, abs=1e-5)
    assert report.groups[1].trajectories[0].advantage == 0.0, "without variance"
    assert (report.refused, report.refused_trajectories, report.refused_unlisted) == ((REFUSED,), (REFUSED_MEMBER,), 7)
    assert report.timings == {"pack": 0.25, "update": 0.5, "step": 1.5, "queue": 2.0}
    assert report.rows == "sample"


def test_advantages_are_those_of_the_steps_options() -> None:
    plain = report_of(batch(), config=TrainConfig(scale_rewards=False, rescale_advantages=False))
    assert [member.advantage for member in plain.groups[0].trajectories] == [-0.5, 0.5]
    supervised = report_of(batch(), sft=SftConfig())
    assert {member.advantage for member in supervised.groups[0].trajectories} == {None}


def test_a_step_that_trained_nothing_has_no_rows_and_says_so() -> None:
    assert report_of(batch(), replace(RESULT, updates=0, num_sequences=0)).rows == "none"


def out_dir(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "out"
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    return folder


async def test_a_step_stores_all_that_it_wrote_and_its_report(store: ObjectStore, tmp_path: Path) -> None:
    out = out_dir(tmp_path, "weights/w", "snapshot/s", "plots/p.png", "rows/rows.safetensors")
    report = report_of(batch())
    stored = await store_step(store, out, RESULT, b"window", report)
    assert await store_step(store, out, RESULT, b"window", report) == stored, "a call that failed may be repeated"
    assert sorted({found.key.rpartition("/")[0] for found in store.list()}) == [
        f"models/m/i/{folder}/00000003-attempt" for folder in ("plots", "reports", "snapshots", "weights")
    ]
    assert stored.weights_manifest.kind == "weights"
    assert stored.weights.uri == store.uri("models/m/i/weights/00000003-attempt")
    assert stored.plots is not None
    assert stored.snapshot is not None
    assert read_duplicates(store, stored.snapshot) == b"window"
    assert read_report(store, stored.report) == report
    assert read_rows(store, stored.report) == b"rows/rows.safetensors"


def flipped(store: ObjectStore, key: str) -> None:
    content = bytearray(store.get_bytes(key))
    content[-1] ^= 1
    store.delete(key)
    store.put_bytes_if_absent(key, bytes(content))


def truncated(store: ObjectStore, key: str) -> None:
    content = store.get_bytes(key)
    store.delete(key)
    store.put_bytes_if_absent(key, content[:-1])


def gone(store: ObjectStore, key: str) -> None:
    store.delete(key)


@pytest.mark.parametrize("damage", [flipped, truncated, gone])
@pytest.mark.parametrize("file", ["weights/00000003-attempt/w", "weights/00000003-attempt/manifest.json", "snapshots/00000003-attempt/s"])
async def test_attempt_names_what_is_damaged_between_its_upload_and_the_commit_is_found_and_stored_once_more(
    store: ObjectStore, tmp_path: Path, damage: Callable[[ObjectStore, str], None], file: str
) -> None:
    out, report = out_dir(tmp_path, "weights/w", "snapshot/s"), report_of(batch())
    damages = [f"models/m/i/{file}"]
    really, first = step_files._read_back, Lock()

    def read_back(one: ObjectStore, ref: WeightsRef) -> None:
        with first:
            while damages:
                damage(store, damages.pop())
        really(one, ref)

    with mock.patch.object(step_files, "_read_back", read_back):
        with pytest.raises(StoreUnavailableError, match="was damaged before its commit, and is stored once more"):
            await store_step(store, out, RESULT, b"window", report)
        stored = await store_step(store, out, RESULT, b"window", report)
    assert fetch_folder(store, stored.weights.uri, stored.weights.digest, tmp_path / "fetched").files[0].path == "w"
    assert (tmp_path / "fetched" / "w").read_bytes() == b"weights/w"
    assert stored.snapshot is not None
    fetch_folder(store, stored.snapshot.uri, stored.snapshot.digest, tmp_path / "snapshot")


async def test_a_step_without_snapshot_rows_and_plots_stores_weights_and_report_alone(store: ObjectStore, tmp_path: Path) -> None:
    stored = await store_step(store, out_dir(tmp_path, "weights/w"), RESULT, b"window", report_of(batch()))
    assert (stored.snapshot, stored.plots) == (None, None)
    assert read_rows(store, stored.report) is None
    assert {found.key.split("/")[3] for found in store.list()} == {"weights", "reports"}


async def test_a_step_without_weights_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="weights has no files"):
        await store_step(store, out_dir(tmp_path, "snapshot/s"), RESULT, b"", report_of(batch()))
