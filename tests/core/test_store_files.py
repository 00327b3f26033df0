"""What only a store in a folder can get wrong."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.settings import S3Settings
from headrace.core.store import InvalidKeyError, ObjectNotFoundError, StoreFullError, StoreUnavailableError, open_store


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
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
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


def test_a_root_that_is_a_file_is_unavailable_for_writing_and_empty_for_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_store(f"file://{tmp_path}/file", S3Settings())
    with pytest.raises(StoreUnavailableError, match="file"):
        store.put_bytes_if_absent("k", b"x")
    with pytest.raises(ObjectNotFoundError):
        store.get_bytes("k")


@pytest.mark.parametrize("url", ["http://x/y", "file://", "s3://", "s3:///key", "folder"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidKeyError, match=r"store\.url is"):
        open_store(url, S3Settings())
