"""Snapshots are kept by policy, whatever was restarted in between; against files and a real S3 server."""

from tests.worker.stored_steps import folders, put_folder, state_of

from headrace.consumers.worker.storage.stored_snapshots import SnapshotKeeper
from headrace.core.store import ObjectStore


async def test_the_last_snapshots_stay_and_all_older_ones_go_also_those_of_an_owner_before(store: ObjectStore) -> None:
    """Rule 14: only what is older than the one that the commit names."""
    keys = {step: put_folder(store, "snapshot", step, f"a{step}") for step in (4, 8, 12, 16, 20)}
    crashed = put_folder(store, "snapshot", 8, "never-committed")
    others = [
        put_folder(store, "weights", 4, "a4"),
        put_folder(store, "snapshot", 4, "a4", incarnation="j"),
        put_folder(store, "snapshot", 4, "a4", model_id="m2"),
    ]
    await SnapshotKeeper(store, 2).committed(state_of(snapshot=keys[16], store=store))
    assert set(folders(store)) == {keys[12], keys[16], keys[20], *others}
    assert crashed not in folders(store), "a step counts once, however often it was tried"
    await SnapshotKeeper(store, 1).committed(state_of(snapshot=keys[16], store=store))
    assert set(folders(store)) == {keys[16], keys[20], *others}, "what is newer than the committed one is not judged here"


async def test_fewer_than_are_kept_all_stay(store: ObjectStore) -> None:
    keys = {put_folder(store, "snapshot", step, "a") for step in (4, 8)}
    await SnapshotKeeper(store, 2).committed(state_of(snapshot=max(keys), store=store))
    await SnapshotKeeper(store, 1).committed(state_of())
    assert set(folders(store)) == keys


async def test_an_owner_that_was_frozen_deletes_nothing_that_a_later_one_needs(store: ObjectStore) -> None:
    """It continues with the state that it committed itself, long ago."""
    keys = [put_folder(store, "snapshot", step, f"a{step}") for step in range(1, 9)]
    await SnapshotKeeper(store, 1).committed(state_of(snapshot=keys[2], store=store))
    assert list(folders(store)) == keys[2:]
