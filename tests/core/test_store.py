"""The contract of the object store, run against both implementations: files, and a real S3 server."""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.core.settings import S3Settings
from headrace.core.store import (
    DigestMismatchError,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    StoredObject,
    open_store,
)

LARGE = 17 * 1024 * 1024 + 5
"""Above the size from which S3 puts are multipart uploads."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_was_put_comes_back(store: ObjectStore) -> None:
    data = b"weights" * 1000
    stored = store.put_bytes_if_absent("a/b.bin", data)
    assert stored == StoredObject(key="a/b.bin", size=7000, sha256=digest(data))
    assert store.get_bytes("a/b.bin", sha256=digest(data)) == data
    assert b"".join(store.get_chunks("a/b.bin", sha256=digest(data))) == data
    head = store.head("a/b.bin")
    assert (head.key, head.size) == ("a/b.bin", 7000)
    assert head.sha256 in {None, digest(data)}


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    assert store.put_bytes_if_absent("empty", b"").size == 0
    assert store.get_bytes("empty") == b""
    assert list(store.get_chunks("empty", sha256=digest(b""))) == []
    assert store.get_range("empty", 0, 10) == b""


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_taken_name_keeps_its_content_and_equal_content_is_success(store: ObjectStore, tmp_path: Path, size: int) -> None:
    """Rule 14: a 412 or 409 is success if what is stored has our digest."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.write_bytes(os.urandom(size))
    other.write_bytes(os.urandom(size))
    stored = store.put_file_if_absent("name", first)
    assert store.put_file_if_absent("name", first) == stored
    with pytest.raises(ObjectExistsError, match="exists with other content"):
        store.put_file_if_absent("name", other)
    with pytest.raises(ObjectExistsError):
        store.put_bytes_if_absent("name", b"short")
    assert store.put_bytes_if_absent("name", first.read_bytes()) == stored
    assert store.get_bytes("name") == first.read_bytes()


def test_of_many_writers_of_one_name_one_wins_and_all_others_are_told(store: ObjectStore) -> None:
    start = threading.Barrier(8)

    def put(i: int) -> bytes | None:
        start.wait()
        try:
            store.put_bytes_if_absent("raced/name", b"%d" % i)
        except ObjectExistsError:
            return None
        return b"%d" % i

    with ThreadPoolExecutor(8) as pool:
        winners = [won for won in pool.map(put, range(8)) if won is not None]
    assert winners == [store.get_bytes("raced/name")]


def test_a_large_file_and_a_stream_come_back_as_files(store: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(LARGE)
    source = tmp_path / "source"
    source.write_bytes(data)
    assert store.put_file_if_absent("file", source, sha256=digest(data)) == StoredObject(key="file", size=LARGE, sha256=digest(data))
    chunks = (data[i : i + 1_000_003] for i in range(0, LARGE, 1_000_003))
    assert store.put_stream_if_absent("stream", chunks).sha256 == digest(data)
    for key in ("file", "stream"):
        target = tmp_path / "new" / "folder" / key
        assert store.get_file(key, target, sha256=digest(data)) == StoredObject(key=key, size=LARGE, sha256=digest(data))
        assert target.read_bytes() == data
    assert store.get_range("file", LARGE - 5, LARGE + 100) == data[-5:]


def test_a_source_that_differs_from_its_digest_is_not_stored(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"changed")
    with pytest.raises(DigestMismatchError, match="it must be"):
        store.put_file_if_absent("k", source, sha256=digest(b"original"))
    with pytest.raises(DigestMismatchError):
        store.put_stream_if_absent("k", iter([b"chan", b"ged"]), sha256=digest(b"original"))
    with pytest.raises(ObjectNotFoundError):
        store.head("k")


def test_a_stream_that_fails_leaves_nothing(store: ObjectStore) -> None:
    def failing() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("source gone")

    with pytest.raises(RuntimeError, match="source gone"):
        store.put_stream_if_absent("k", failing())
    assert list(store.list()) == []


def test_a_wrong_digest_raises_and_leaves_no_file(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes_if_absent("k", b"stored")
    wrong = digest(b"expected")
    with pytest.raises(DigestMismatchError, match=r"/k has SHA-256"):
        store.get_file("k", tmp_path / "out" / "k", sha256=wrong)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(DigestMismatchError):
        store.get_bytes("k", sha256=wrong)
    with pytest.raises(DigestMismatchError):
        list(store.get_chunks("k", sha256=wrong))


def test_an_older_file_stays_when_the_new_one_is_wrong(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes_if_absent("k", b"stored")
    (tmp_path / "k").write_bytes(b"older")
    with pytest.raises(DigestMismatchError):
        store.get_file("k", tmp_path / "k", sha256=digest(b"expected"))
    assert (tmp_path / "k").read_bytes() == b"older"
    store.get_file("k", tmp_path / "k")
    assert (tmp_path / "k").read_bytes() == b"stored"


def test_ranges_are_half_open_and_end_with_the_object(store: ObjectStore) -> None:
    store.put_bytes_if_absent("k", b"0123456789")
    assert store.get_range("k", 2, 5) == b"234"
    assert store.get_range("k", 0, 1) == b"0"
    assert store.get_range("k", 8, 50) == b"89"
    assert store.get_range("k", 4, 4) == b""
    assert store.get_range("k", 10, 20) == b""
    assert store.get_range("k", 30, 40) == b""
    with pytest.raises(ValueError, match="no range"):
        store.get_range("k", 5, 4)


def test_a_missing_object_is_not_found_by_every_way(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes_if_absent("folder/k", b"x")
    for key in ("nothing", "folder", "folder/k/below", "folder/nothing"):
        with pytest.raises(ObjectNotFoundError, match=f"{key} does not exist"):
            store.head(key)
        with pytest.raises(ObjectNotFoundError):
            store.get_bytes(key)
        with pytest.raises(ObjectNotFoundError):
            list(store.get_chunks(key))
        with pytest.raises(ObjectNotFoundError):
            store.get_range(key, 0, 1)
        with pytest.raises(ObjectNotFoundError):
            store.get_file(key, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_deleting_frees_the_name_and_a_missing_object_is_no_error(store: ObjectStore) -> None:
    store.put_bytes_if_absent("a/b/c", b"1")
    store.put_bytes_if_absent("a/d", b"1")
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("never/was")
    store.delete("a")
    assert [o.key for o in store.list()] == ["a/d"]
    assert store.put_bytes_if_absent("a/b/c", b"2").sha256 == digest(b"2")


def test_lists_by_prefix_in_the_order_of_keys(store: ObjectStore) -> None:
    keys = ["m/1/a", "m/1/b", "m/10/a", "m-x/a", "m/2", "n", "m/1-z", "m/ü"]
    for key in keys:
        store.put_bytes_if_absent(key, key.encode())
    listed = list(store.list())
    assert [o.key for o in listed] == sorted(keys, key=str.encode)
    assert [o.size for o in listed] == [len(o.key.encode()) for o in listed]
    assert [o.key for o in store.list("m/1")] == ["m/1-z", "m/1/a", "m/1/b", "m/10/a"]
    assert [o.key for o in store.list("m/1/")] == ["m/1/a", "m/1/b"]
    assert [o.key for o in store.list("m/1/a")] == ["m/1/a"]
    assert list(store.list("q/r/s")) == []


def test_lists_more_than_a_page(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.put_bytes_if_absent(f"p/{i:04d}", b"x"), range(1010)))
    assert [o.key for o in store.list("p/")] == [f"p/{i:04d}" for i in range(1010)]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "a//b",
        "a/",
        "../x",
        "a/../../x",
        "a/./b",
        "..",
        "a\0b",
        "a\nb",
        "a\\b",
        "x" * 256,
        "a/" * 500 + "a",
        "\ud800",
        ".headrace-partial-x",
    ],
)
def test_keys_that_could_leave_the_store_are_refused(store: ObjectStore, key: str, tmp_path: Path) -> None:
    for attempt in (
        lambda: store.put_bytes_if_absent(key, b""),
        lambda: store.get_bytes(key),
        lambda: list(store.get_chunks(key)),
        lambda: store.get_file(key, tmp_path / "out"),
        lambda: store.get_range(key, 0, 1),
        lambda: store.head(key),
        lambda: store.delete(key),
        lambda: store.uri(key),
    ):
        with pytest.raises(InvalidKeyError, match="is no object key"):
            attempt()


def test_uris_lead_back_to_keys_in_every_process_with_the_same_store(store: ObjectStore, store_url: tuple[str, S3Settings]) -> None:
    uri = store.uri("a/b c#1?x=%20")
    assert uri.startswith(store_url[0])
    assert open_store(*store_url).resolve(uri) == "a/b c#1?x=%20"


def test_uris_of_other_places_are_refused(store: ObjectStore, store_url: tuple[str, S3Settings]) -> None:
    url = store_url[0]
    for uri in ("s3://other/a", "file:///etc/passwd", url, url + "x/a", "a", "https://host/a"):
        with pytest.raises(InvalidKeyError, match=r"not in this object store .* same store\.url"):
            store.resolve(uri)
    for uri in (url + "/", url + "/../x", url + "/a/../../x", url + "//etc"):
        with pytest.raises(InvalidKeyError, match="is no object key"):
            store.resolve(uri)


def test_list_and_head_say_when_an_object_was_stored(store: ObjectStore) -> None:
    before = datetime.now(UTC)
    store.put_bytes_if_absent("a/k", b"x")
    after = datetime.now(UTC)
    second = timedelta(seconds=1)  # S3 tells whole seconds
    (listed,) = store.list("a/")
    for found in (listed, store.head("a/k")):
        assert found.modified is not None
        assert before - second <= found.modified <= after + second


def test_sweeping_touches_no_object(store: ObjectStore) -> None:
    store.put_bytes_if_absent("a/k", b"x")
    later = datetime.now(UTC) + timedelta(days=1)
    assert store.sweep("", later) == 0
    assert store.sweep("never/was/", later) == 0
    assert [found.key for found in store.list()] == ["a/k"]
