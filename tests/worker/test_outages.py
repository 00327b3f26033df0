"""A store or a disk that fails costs no batch: its step waits, is never counted as an attempt, and comes out as it would have."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.worker.conftest import WorkerProcess
from tests.worker.following import Following
from tests.worker.groups import group
from tests.worker.stage import Commit, Stage, offsets_of, until

from headrace.consumers.worker.store_check import check_store
from headrace.core import outages
from headrace.core.kafka import client_options
from headrace.core.local import LocalS3
from headrace.core.models import ModelView
from headrace.core.settings import S3Settings, Settings, StoreSettings
from headrace.core.store import StoreMisconfiguredError, open_store
from headrace.schemas.events import GroupRejected
from headrace.schemas.state import ModelState, StepRecord

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "LONGEST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(outages, "FIRST_PAUSE_SECONDS", 0.1)


def folder_of(stage: Stage, model: ModelView) -> Path:
    """Where the model's files are stored. A file in its place takes no file, as a full disk, and for root, too."""
    return Path(stage.settings.store.url.removeprefix("file://")) / "models" / model.model_id


async def die_of_it(commit: Commit) -> dict[str, int]:
    return await (commit.die() if commit.of(StepRecord) else commit.go())


async def test_attempt_limit_a_store_that_takes_no_files_never_counts_as_an_attempt_of_the_batch(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """One attempt is allowed, and each owner begins it: none has ended by it."""
    lane = stage.free_lane()
    model = await stage.model(lane)
    sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
    async with stage.seen(model) as seen:
        async with stage.owner(lane, die_of_it) as owner:  # the batch is under suspicion from here on
            await owner.dead()
        folder_of(stage, model).rename(folder_of(stage, model).with_suffix(".aside"))
        folder_of(stage, model).write_text("no room")
        for owners in (1, 2):
            async with stage.owner(lane, max_step_attempts=1):
                await until_attempts(seen, [1, 0] * owners)
        async with stage.owner(lane, max_step_attempts=1):
            await until_attempts(seen, [1, 0, 1, 0, 1, 0])
            waits = [record.getMessage() for record in caplog.records if " waits, and " in record.getMessage()]
            assert len(waits) == 3, "once for each owner"
            assert "which is computed and stored now, waits" in waits[0]
            folder_of(stage, model).unlink()
            (step,) = await seen.until(StepRecord, 1)
    assert offsets_of(step) == sent
    assert seen.of(GroupRejected) == []
    assert "waits no longer: it works again" in caplog.text


async def until_attempts(seen: Following, counts: list[int]) -> None:
    """Wait until the model's intents counted these attempts, one after another."""

    def counted() -> list[int]:
        return [state.intent.attempts for state in seen.of(ModelState) if state.intent is not None]

    await seen._wait(lambda: len(counted()) >= len(counts), f"attempts {counts}", 60)
    assert counted() == counts


async def test_attempt_limit_a_rank_whose_disk_takes_no_files_has_not_failed_the_step(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    disk = tmp_path / "work"
    disk.symlink_to(disk)  # "too many levels of symbolic links", as from a network file system that is away, and for root, too
    async with stage.seen(model) as seen, stage.owner(lane, work_dir=disk, max_step_attempts=1):
        sent = await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        await until(lambda: f"step 1 of {model.name} waits, and is tried again until it works" in caplog.text)
        disk.unlink()
        disk.mkdir()
        (step,) = await seen.until(StepRecord, 1)
    assert offsets_of(step) == sent
    assert seen.of(GroupRejected) == []


async def test_a_worker_takes_no_lane_with_a_store_that_is_not_its_groups(stage: Stage, tmp_path: Path) -> None:
    lane = stage.free_lane()
    model = await stage.model(lane)
    async with stage.seen(model) as seen, stage.owner(lane):
        await stage.send(model, *(group(f"g{i}", seed=i, version=None) for i in range(2)))
        await seen.until(StepRecord, 1)
    options = client_options(stage.settings.kafka, "test-store-check")
    await check_store(stage.settings, stage.store, options)

    other = stage.settings.model_copy(update={"store": StoreSettings(url=f"file://{tmp_path}/other")})
    with pytest.raises(
        StoreMisconfiguredError, match=r"store\.url is .*/other, but model .* is stored at file://.*set the store\.url of the"
    ):
        await check_store(other, open_store(other.store.url, other.s3), options)
    assert not (tmp_path / "other").exists(), "nothing is written into a store that is another's"

    empty = pytest.raises(StoreMisconfiguredError, match=r"has no file of any of the \d+ models .*mount it")
    with unmounted(Path(stage.settings.store.url.removeprefix("file://"))), empty:
        await check_store(stage.settings, open_store(stage.settings.store.url, stage.settings.s3), options)


@contextmanager
def unmounted(store: Path) -> Iterator[None]:
    """The folder is there, and empty."""
    store.rename(store.with_suffix(".unmounted"))
    store.mkdir()
    yield
    store.rmdir()
    store.with_suffix(".unmounted").rename(store)


async def test_a_worker_with_a_missing_bucket_ends_with_one_sentence(
    settings: Settings, s3: LocalS3, start_worker: Callable[[Settings], WorkerProcess], tmp_path: Path
) -> None:
    known = {"endpoint_url": s3.endpoint_url, "access_key_id": s3.access_key, "secret_access_key": s3.secret_key}
    store = {"store": StoreSettings(url="s3://no-such-bucket/p"), "s3": S3Settings.model_validate(known)}
    worker = start_worker(settings.model_copy(update=store))
    assert await asyncio.to_thread(worker.process.wait, 90) == 1
    said = (tmp_path / "worker.log").read_text()
    assert "the bucket 'no-such-bucket' of s3://no-such-bucket/p" in said
    assert "create it, or correct store.url" in said
    assert "Traceback" not in said
    assert "the group gave lanes" not in said
