"""What only a store in S3 can get wrong, against the real server."""

import os
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest

from headrace.core.local import LocalS3
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
