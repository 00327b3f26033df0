"""What only a store in a folder can get wrong."""

import os
import resource
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.core.settings import S3Settings
from headrace.core.store import InvalidKeyError, ObjectNotFoundError, ObjectStore, StoreFullError, StoreUnavailableError, open_store
from headrace.core.store.files import FileStore
from headrace.core.store.keys import STORE_FILE, TEMPORARY_PREFIX


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process can grow beyond so many bytes: a full disk that needs no mount."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_and_leaves_no_partial_object(tmp_path: Path, small_files: int) -> None:
    store = open_store(f"file://{tmp_path}/store", S3Settings())
    with pytest.raises(StoreFullError, match=r"no space for file://.*/a/big .*make room"):
        store.put_bytes_if_absent("a/big", b"x" * (small_files + 1))
    assert [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()] == [STORE_FILE]
    store.put_bytes_if_absent("a/small", b"x")


def test_a_full_disk_while_fetching_leaves_no_file(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store", S3Settings())
    store.put_bytes_if_absent("big", b"x" * 200_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StoreFullError, match=r"out/big"):
            store.get_file("big", tmp_path / "out" / "big")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_partial_file_of_a_killed_writer_is_not_listed(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}", S3Settings())
    store.put_bytes_if_absent("a/k", b"x")
    (tmp_path / "a" / ".headrace-partial-0123").write_bytes(b"half")
    assert [stored.key for stored in store.list()] == ["a/k"]


def test_a_relative_url_is_taken_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("file://.headrace/store", S3Settings())
    store.put_bytes_if_absent("k", b"x")
    assert (tmp_path / ".headrace" / "store" / "k").read_bytes() == b"x"
    assert store.uri("k") == f"file://{tmp_path}/.headrace/store/k"
    monkeypatch.chdir("/")
    assert store.get_bytes("k") == b"x"


def test_a_store_that_is_not_there_is_unavailable_and_says_nothing_of_its_objects(tmp_path: Path) -> None:
    """A file system that is not mounted leaves an empty folder, or none."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "empty").mkdir()
    reads: list[Callable[[ObjectStore], object]] = [lambda s: s.get_bytes("k"), lambda s: s.head("a/k"), lambda s: list(s.get_chunks("k"))]
    for name in ("file", "empty", "none"):
        for read in reads:
            with pytest.raises(StoreUnavailableError, match=rf"the store's folder .*{name} .*mount it"):
                read(open_store(f"file://{tmp_path}/{name}", S3Settings()))
    with pytest.raises(StoreUnavailableError, match="file"):
        open_store(f"file://{tmp_path}/file", S3Settings()).put_bytes_if_absent("k", b"x")


def test_a_store_that_vanishes_is_not_made_again_beneath_its_mount(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store", S3Settings())
    store.put_bytes_if_absent("k", b"x")
    (tmp_path / "store").rename(tmp_path / "unmounted")
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreUnavailableError, match="was there and is gone"):
        store.put_bytes_if_absent("l", b"y")
    with pytest.raises(StoreUnavailableError, match="is empty"):
        store.get_bytes("k")
    (tmp_path / "store").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "store")
    store.delete("k")
    with pytest.raises(ObjectNotFoundError):
        store.get_bytes("k")


@pytest.mark.parametrize("url", ["http://x/y", "file://", "s3://", "s3:///key", "folder"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidKeyError, match=r"store\.url is"):
        open_store(url, S3Settings())


def test_what_killed_writers_left_half_written_is_swept_once_it_is_old(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_bytes_if_absent("m/1/whole", b"x")
    partials = [tmp_path / folder / f"{TEMPORARY_PREFIX}dead" for folder in ("m/1", "m/2/only", "m/3", "other")]
    for partial in partials:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"half")
    now = datetime.now(UTC)
    written_on = tmp_path / "m/3" / f"{TEMPORARY_PREFIX}dead"
    os.utime(written_on, (now.timestamp() + 60, now.timestamp() + 60))
    assert store.sweep("m/", now - timedelta(hours=1)) == 0
    assert store.sweep("m/", now + timedelta(seconds=1)) == 2
    assert [partial.exists() for partial in partials] == [False, False, True, True]
    assert not (tmp_path / "m/2").exists(), "a folder that had nothing else goes with it"
    assert store.get_bytes("m/1/whole") == b"x"


def test_only_the_owner_can_enter_the_folders_of_a_store(tmp_path: Path) -> None:
    FileStore(tmp_path / "data" / "store").put_bytes_if_absent("a/b/k", b"x")
    made = list(tmp_path.rglob("*"))
    assert {path: oct(path.stat().st_mode & 0o077) for path in made} == dict.fromkeys(made, "0o0")


def test_no_symbolic_link_leads_out_of_the_store(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (outside / f"{TEMPORARY_PREFIX}old").write_bytes(b"half")
    root = tmp_path / "store"
    store = FileStore(root)
    store.put_bytes_if_absent("kept", b"x")
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "dangling").symlink_to(outside / "new")
    calls: list[Callable[[str], object]] = [
        store.get_bytes,
        store.head,
        store.delete,
        lambda key: list(store.get_chunks(key)),
        lambda key: store.get_range(key, 0, 1),
        lambda key: store.get_file(key, tmp_path / "fetched"),
        lambda key: store.put_bytes_if_absent(key, b"secret"),
    ]
    for key in ("file", "folder/secret", "folder/new", "dangling"):
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="symbolic link"):
                call(key)
    assert [stored.key for stored in store.list()] == ["kept"]
    assert store.sweep("", datetime.now(UTC) + timedelta(days=1)) == 0
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": b"secret", f"{TEMPORARY_PREFIX}old": b"half"}


def test_a_store_may_itself_be_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    store = FileStore(tmp_path / "link" / "store")
    store.put_bytes_if_absent("a/k", b"x")
    assert store.get_bytes("a/k") == b"x"


def test_names_that_look_like_partial_files_are_kept_side_by_side(tmp_path: Path) -> None:
    files = {"A": b"1", "A.partial": b"2", "A.partial.partial": b"3"}
    store = FileStore(tmp_path / "store")
    for key, data in files.items():
        store.put_bytes_if_absent(key, data)
    for key in reversed(files):
        store.get_file(key, tmp_path / "fetched" / key)
    assert {path.name: path.read_bytes() for path in (tmp_path / "fetched").iterdir()} == files
