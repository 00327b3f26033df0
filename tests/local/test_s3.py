"""The local S3 server: the properties that the object store relies on, and its keys."""

import io
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from headrace.core.local import LocalS3, LocalServiceError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


def client(server: LocalS3, secret_key: str | None = None) -> "S3Client":
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret_key or server.secret_key,
    )


def status(error: ClientError) -> int:
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


def test_a_wrong_secret_is_refused(s3: LocalS3) -> None:
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client(s3, "wrong").list_buckets()


def test_of_many_conditional_puts_at_once_one_wins_and_the_others_get_412(s3: LocalS3) -> None:
    def put(number: int) -> int:
        try:
            return client_.put_object(Bucket=s3.bucket, Key="contended", Body=b"%d" % number, IfNoneMatch="*")["ResponseMetadata"][
                "HTTPStatusCode"
            ]
        except ClientError as error:
            return status(error)

    client_ = client(s3)
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(put, range(8)))
    assert sorted(statuses) == [200] + [412] * 7
    assert client_.get_object(Bucket=s3.bucket, Key="contended")["Body"].read() == b"%d" % statuses.index(200)


def test_multipart_uploads_and_ranges_give_the_bytes_back(s3: LocalS3) -> None:
    data = os.urandom(20_000_000)
    config = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20)
    client(s3).upload_fileobj(io.BytesIO(data), s3.bucket, "parts/big", Config=config)
    whole = client(s3).get_object(Bucket=s3.bucket, Key="parts/big")
    assert "-" in whole["ETag"]  # it did travel in parts
    assert whole["Body"].read() == data
    part = client(s3).get_object(Bucket=s3.bucket, Key="parts/big", Range="bytes=9999990-10000009")
    assert part["Body"].read() == data[9_999_990:10_000_010]


def test_objects_keys_and_address_survive_a_restart_and_the_keys_are_private(tmp_path: Path) -> None:
    with LocalS3(tmp_path, bucket="weights") as server:
        before = (server.endpoint_url, server.access_key, server.secret_key)
        client(server).put_object(Bucket="weights", Key="a/b", Body=b"kept")
    for name in ("credentials.json", "s3proxy.properties"):
        assert stat.S_IMODE((tmp_path / "s3" / name).stat().st_mode) == 0o600
    with LocalS3(tmp_path, bucket="weights") as server:
        assert (server.endpoint_url, server.access_key, server.secret_key) == before
        assert client(server).get_object(Bucket="weights", Key="a/b")["Body"].read() == b"kept"


def test_a_second_start_on_the_folder_says_where_the_first_is(tmp_path: Path) -> None:
    with LocalS3(tmp_path) as server, pytest.raises(LocalServiceError, match=f"already runs .* at {server.endpoint_url}"):
        LocalS3(tmp_path).start()


def test_a_bucket_name_that_s3_would_refuse_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 3 characters"):
        LocalS3(tmp_path, bucket="ab")
