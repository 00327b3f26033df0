"""Folders in the store: manifest last, checked file by file, resumable."""

import hashlib
import os
from pathlib import Path

import pytest

from headrace.core.settings import S3Settings
from headrace.core.store import (
    DigestMismatchError,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    StoreError,
    fetch_folder,
    open_store,
    read_manifest,
    store_folder,
)
from headrace.core.store.keys import TEMPORARY_PREFIX
from headrace.schemas.weights import Manifest, WeightsRef

FILES = {"a.safetensors": b"A" * 5000, "sub/b.json": b"{}", "empty": b""}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(f"file://{tmp_path}/store", S3Settings())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "out", FILES)


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(store: ObjectStore, folder: Path, prefix: str = "models/m/weights/1") -> tuple[Manifest, WeightsRef]:
    return store_folder(store, prefix, folder, kind="weights", model_id="m", incarnation="i", step=3, attempt="x")


def replace(store: ObjectStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.put_bytes_if_absent(key, data)


def test_a_folder_comes_back_with_exactly_its_files(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    manifest, ref = put(store, folder)
    assert ref == WeightsRef(uri=store.uri("models/m/weights/1"), digest=manifest.digest)
    assert {file.path: file.size for file in manifest.files} == {name: len(data) for name, data in FILES.items()}
    assert (manifest.kind, manifest.model_id, manifest.incarnation, manifest.step, manifest.attempt) == ("weights", "m", "i", 3, "x")
    assert fetch_folder(store, ref.uri, ref.digest, tmp_path / "new" / "dest") == manifest
    assert content(tmp_path / "new" / "dest") == FILES
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["dest"]


def test_the_digest_is_that_of_sorted_sha256sum_lines(store: ObjectStore, folder: Path) -> None:
    lines = sorted(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in FILES.items())
    assert put(store, folder)[0].digest == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_storing_again_is_harmless_and_other_content_is_refused(store: ObjectStore, folder: Path) -> None:
    assert put(store, folder) == put(store, folder)
    (folder / "empty").write_bytes(b"not any more")
    with pytest.raises(ObjectExistsError, match="empty exists with other content"):
        put(store, folder)


def test_every_file_and_each_folder_above_them_is_synced_once_before_the_folder_is_stored(
    store: ObjectStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further sync costs a step milliseconds on a disk; one that lacks costs the step on a power cut."""
    (tmp_path / "store").mkdir()
    synced: list[str] = []
    real = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path / "store")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    put(store, folder)
    folders = [".", "models", "models/m", "models/m/weights", "models/m/weights/1", "models/m/weights/1/sub"]
    assert sorted(name for name in synced if ".headrace-" not in name) == folders
    assert len(synced) == len(folders) + len(FILES) + 1, "the manifest"


def test_without_all_files_there_is_no_manifest(store: ObjectStore, folder: Path) -> None:
    store.put_bytes_if_absent("models/m/weights/1/sub/b.json", b"foreign")
    with pytest.raises(ObjectExistsError):
        put(store, folder)
    with pytest.raises(ObjectNotFoundError, match=r"manifest\.json does not exist"):
        read_manifest(store, store.uri("models/m/weights/1"), "0" * 64)


@pytest.mark.parametrize("data", [b"A" * 4999, b"B" * 5000, b""], ids=["truncated", "changed", "emptied"])
def test_a_changed_file_is_named_and_the_folder_does_not_appear(store: ObjectStore, folder: Path, tmp_path: Path, data: bytes) -> None:
    _, ref = put(store, folder)
    replace(store, "models/m/weights/1/a.safetensors", data)
    with pytest.raises(DigestMismatchError, match=r"a\.safetensors has SHA-256"):
        fetch_folder(store, ref.uri, ref.digest, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


def test_a_changed_manifest_is_refused(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    manifest, ref = put(store, folder)
    key = "models/m/weights/1/manifest.json"
    replace(store, key, b'{"kind": "weights"')
    with pytest.raises(DigestMismatchError, match=r"manifest\.json is no manifest"):
        fetch_folder(store, ref.uri, ref.digest, tmp_path / "dest")
    replace(store, key, manifest.model_copy(update={"files": manifest.files[:1]}).model_dump_json().encode())
    with pytest.raises(DigestMismatchError, match=r"list of files in .*manifest\.json"):
        fetch_folder(store, ref.uri, ref.digest, tmp_path / "dest")
    files = (manifest.files[0].model_copy(update={"path": "../../outside"}),)
    replace(store, key, manifest.model_copy(update={"files": files}).model_dump_json().encode())
    with pytest.raises(InvalidKeyError):
        fetch_folder(store, ref.uri, ref.digest, tmp_path / "dest")


def test_an_interrupted_fetch_keeps_what_is_right_and_fetches_only_the_rest(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    _, ref = put(store, folder)
    store.delete("models/m/weights/1/sub/b.json")
    dest = tmp_path / "dest"
    with pytest.raises(ObjectNotFoundError, match=r"sub/b\.json does not exist"):
        fetch_folder(store, ref.uri, ref.digest, dest)
    store.put_bytes_if_absent("models/m/weights/1/sub/b.json", FILES["sub/b.json"])
    store.delete("models/m/weights/1/a.safetensors")  # is there already: not asked for again
    fill(tmp_path / f"{TEMPORARY_PREFIX}dest", {"leftover": b"of another version", "empty": b"wrong"})
    fetch_folder(store, ref.uri, ref.digest, dest)
    assert content(dest) == FILES


def test_a_whole_folder_is_kept_and_any_other_is_replaced(store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    _, ref = put(store, folder)
    dest = tmp_path / "dest"
    fetch_folder(store, ref.uri, ref.digest, dest)
    inode = (dest / "a.safetensors").stat().st_ino
    fetch_folder(store, ref.uri, ref.digest, dest)
    assert (dest / "a.safetensors").stat().st_ino == inode
    (dest / "more").write_bytes(b"x")
    fetch_folder(store, ref.uri, ref.digest, dest)
    assert content(dest) == FILES


def test_what_is_no_plain_folder_of_files_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(StoreError, match="no files"):
        put(store, tmp_path / "none")
    with pytest.raises(StoreError, match=r"manifest\.json of its own"):
        put(store, fill(tmp_path / "own", {"manifest.json": b"{}"}))
    fill(tmp_path / "link", {"a": b""})
    (tmp_path / "link" / "b").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="b is no ordinary file"):
        put(store, tmp_path / "link")
    assert list(store.list()) == []
