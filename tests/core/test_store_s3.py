"""What only a store in S3 can get wrong, against the real server."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.s3_proxy import S3Proxy

from headrace.core.local import LocalS3
from headrace.core.outages import outage_of
from headrace.core.payloads import claim, redeem
from headrace.core.settings import S3Settings
from headrace.core.store import ObjectExistsError, ObjectNotFoundError, ObjectStore, StoreUnavailableError, open_store
from headrace.core.store.s3 import S3Store


def settings(s3: LocalS3, **changed: Any) -> S3Settings:
    known = {"endpoint_url": s3.endpoint_url, "access_key_id": s3.access_key, "secret_access_key": s3.secret_key}
    return S3Settings.model_validate(known | changed)


@pytest.fixture
def store(s3: LocalS3, topic_prefix: str) -> ObjectStore:
    return open_store(f"s3://{s3.bucket}/{topic_prefix}", settings(s3))


def test_a_missing_bucket_is_not_a_missing_object(s3: LocalS3, tmp_path: Path) -> None:
    store = open_store("s3://no-such-bucket/p", settings(s3))
    for attempt in (
        lambda: store.head("k"),
        lambda: store.get_bytes("k"),
        lambda: store.get_file("k", tmp_path / "k"),
        lambda: list(store.list()),
        lambda: store.put_bytes_if_absent("k", b""),
    ):
        with pytest.raises(StoreUnavailableError, match=r"bucket 'no-such-bucket' .*does not exist.*create it"):
            attempt()


def test_wrong_credentials_are_said_and_not_shown(s3: LocalS3) -> None:
    store = open_store(f"s3://{s3.bucket}/p", settings(s3, secret_access_key="wrong-secret"))  # noqa: S106 - wrong on purpose
    with pytest.raises(StoreUnavailableError, match=r"refuses the credentials.*s3\.secret_access_key") as caught:
        store.get_bytes("k")
    assert "wrong-secret" not in str(caught.value)


def test_nobody_listening_is_unavailable_and_not_a_missing_object(s3: LocalS3) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    store = open_store(f"s3://{s3.bucket}/p", settings(s3, endpoint_url=url))
    with pytest.raises(StoreUnavailableError, match=url) as caught:
        store.head("k")
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_without_a_prefix_keys_are_names_in_the_bucket(s3: LocalS3, topic_prefix: str) -> None:
    whole, part = open_store(f"s3://{s3.bucket}", settings(s3)), open_store(f"s3://{s3.bucket}/{topic_prefix}/", settings(s3))
    part.put_bytes_if_absent("a/b", b"x")
    assert whole.get_bytes(f"{topic_prefix}/a/b") == b"x"
    assert whole.resolve(part.uri("a/b")) == f"{topic_prefix}/a/b"


def test_sha256_is_known_without_reading_and_read_where_a_foreign_put_left_none(store: ObjectStore, topic_prefix: str) -> None:
    stored = store.put_bytes_if_absent("ours", b"x")
    assert store.head("ours").sha256 == stored.sha256
    assert isinstance(store, S3Store)
    store._client.put_object(Bucket=store._bucket, Key=store._name("foreign"), Body=b"x")
    assert store.head("foreign").sha256 is None
    assert store.put_bytes_if_absent("foreign", b"x").size == 1
    with pytest.raises(ObjectExistsError):
        store.put_bytes_if_absent("foreign", b"y")


def test_of_two_multipart_uploads_of_one_name_the_second_is_refused_at_its_completion(store: ObjectStore, tmp_path: Path) -> None:
    assert isinstance(store, S3Store)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(os.urandom(17 * 1024 * 1024))
    second.write_bytes(os.urandom(17 * 1024 * 1024))
    calls: list[str] = []

    def overtaken(model: Any, **_: Any) -> None:
        calls.append(model.name)
        if model.name == "CompleteMultipartUpload":
            store._client.upload_file(str(first), store._bucket, store._name("large"))

    store._if_absent.meta.events.register("before-call.s3", overtaken)
    with pytest.raises(ObjectExistsError):
        store.put_file_if_absent("large", second)
    assert calls == ["CreateMultipartUpload", "UploadPart", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"]
    assert store.get_bytes("large") == first.read_bytes()


def test_a_body_that_breaks_off_is_unavailable(store: ObjectStore, tmp_path: Path) -> None:
    """The server sends fewer bytes than it announced: not a short object, and no file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        broken = open_store(
            "s3://bucket/p", S3Settings.model_validate({"endpoint_url": url, "access_key_id": "a", "secret_access_key": "b"})
        )
        chunks = broken.get_chunks("k")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreUnavailableError):
            list(chunks)
        thread.join()


def test_uploads_that_killed_writers_left_are_swept_once_they_are_old(s3: LocalS3, topic_prefix: str, store: ObjectStore) -> None:
    client = boto3.client("s3", endpoint_url=s3.endpoint_url, aws_access_key_id=s3.access_key, aws_secret_access_key=s3.secret_key)
    for name in ("m/1/a", "m/2/b", "other/c"):
        upload = client.create_multipart_upload(Bucket=s3.bucket, Key=f"{topic_prefix}/{name}")
        client.upload_part(Bucket=s3.bucket, Key=f"{topic_prefix}/{name}", UploadId=upload["UploadId"], PartNumber=1, Body=b"half")
    assert store.sweep("m/", datetime.now(UTC) - timedelta(hours=1)) == 0
    assert store.sweep("m/", datetime.now(UTC) + timedelta(minutes=1)) == 2
    left = client.list_multipart_uploads(Bucket=s3.bucket, Prefix=f"{topic_prefix}/").get("Uploads", [])
    assert [upload["Key"] for upload in left] == [f"{topic_prefix}/other/c"]


@pytest.fixture
def proxy(s3: LocalS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)  # between two tries of one request
    with S3Proxy(s3.endpoint_url) as found:
        yield found


def _cuts(answer: bytes) -> list[int]:
    """Within the status line, at the end and in the middle of each header, in each digit of the length, and within the body."""
    head = answer.index(b"\r\n\r\n") + 4
    ends = [at for at in range(head) if answer[at : at + 2] == b"\r\n"]
    length = answer.lower().find(b"content-length:")  # a list has none: it ends with the connection
    digits = range(length + 14, answer.index(b"\r\n", length) + 1) if length >= 0 else ()
    return sorted(
        {
            0,
            5,
            12,
            *ends,
            *(at + 2 for at in ends),
            *(at + 9 for at in ends if at + 9 < head),
            *digits,
            head,
            *range(head + 1, len(answer), 7),
        }
    )


def test_an_answer_that_is_cut_off_anywhere_says_nothing_of_the_object(
    s3: LocalS3, topic_prefix: str, store: ObjectStore, proxy: S3Proxy, tmp_path: Path
) -> None:
    body = b"a claimed group " * 7
    made = claim(store, body, "application/json", "g1")
    key, digest = store.resolve(made.uri), made.sha256
    through = open_store(f"s3://{s3.bucket}/{topic_prefix}", settings(s3, endpoint_url=proxy.endpoint_url))
    reads: dict[str, Callable[[], object]] = {
        "get": lambda: through.get_bytes(key, sha256=digest),
        "chunks": lambda: list(through.get_chunks(key)),
        "range": lambda: through.get_range(key, 0, made.size),
        "file": lambda: through.get_file(key, tmp_path / "out", sha256=digest),
        "claim": lambda: redeem(through, made).tobytes(),
        "list": lambda: list(through.list("payloads/")),
    }
    for name, read in reads.items():
        proxy.answers.clear()
        proxy.cut = None
        whole = read()
        for cut in _cuts(bytes(proxy.answers[-1])):
            proxy.cut = cut
            try:
                assert read() == whole, (name, cut)
            except StoreUnavailableError:
                continue
    proxy.cut = None
    assert reads["claim"]() == body


def test_a_missing_object_is_told_only_by_an_answer_that_says_so(s3: LocalS3, topic_prefix: str, proxy: S3Proxy) -> None:
    through = open_store(f"s3://{s3.bucket}/{topic_prefix}", settings(s3, endpoint_url=proxy.endpoint_url))
    for read in (lambda: through.head("k"), lambda: through.get_bytes("k")):
        with pytest.raises(ObjectNotFoundError):
            read()
        proxy.cut = 5
        with pytest.raises(StoreUnavailableError):
            read()
        proxy.cut = None


@pytest.mark.parametrize("refused", [(503, "SlowDown"), (507, "InsufficientStorage"), (403, "AccessDenied"), (500, "InternalError")])
def test_a_store_that_refuses_writes_and_answers_reads_is_unavailable(
    s3: LocalS3, topic_prefix: str, store: ObjectStore, proxy: S3Proxy, refused: tuple[int, str]
) -> None:
    store.put_bytes_if_absent("there", b"x")
    through = open_store(f"s3://{s3.bucket}/{topic_prefix}", settings(s3, endpoint_url=proxy.endpoint_url))
    proxy.refused = refused
    with pytest.raises(StoreUnavailableError) as raised:
        through.put_bytes_if_absent("k", b"x")
    assert outage_of(raised.value) is not None
    assert through.get_bytes("there") == b"x"
    proxy.refused = None
    through.put_bytes_if_absent("k", b"x")
