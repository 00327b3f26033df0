"""A store in S3, or in anything that speaks its API, through boto3.

Guarantees: puts are conditional (`If-None-Match: *`), also at the completion of a multipart upload; an object's SHA-256 is its metadata
`sha256`. Multipart, parallel ranges and retries are boto3's transfer manager's. An answer that was cut off, or that boto3 does not
understand, is `StoreUnavailableError`: an object is missing only if the server says so and its bucket exists, and differs only if it was
read whole. Limitations: on a server that ignores the condition (AWS and S3Proxy heed it), two writers of one new name at the same moment
are not told apart. A stream goes through a temporary file, since its digest is sent ahead of it.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from typing_extensions import override

from headrace.core.outages import said
from headrace.core.settings import S3Settings
from headrace.core.store.folders import Tally, check, sha256_of_bytes, sha256_of_file, verified, write_verified
from headrace.core.store.interface import (
    DigestMismatchError,
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectStore,
    StoredObject,
    StoreError,
    StoreFullError,
    StoreMisconfiguredError,
    StoreUnavailableError,
    plain_os_error,
)
from headrace.core.store.keys import check_key, check_prefix, key_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CHUNK_BYTES = 1024 * 1024
TRANSFER = TransferConfig(multipart_threshold=16 * 1024 * 1024, multipart_chunksize=16 * 1024 * 1024, max_concurrency=4)
_MISSING = {"NoSuchKey", "NotFound", "404"}
_TAKEN = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_FULL = {"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "507"}
_REFUSED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_CONFLICT_ATTEMPTS = 5


class S3Store(ObjectStore):
    """Objects below a prefix of a bucket, which must exist.

    Args:
        bucket: Bucket.
        prefix: Before every key, without slashes around it; may be empty.
        settings: Endpoint and credentials; what is not set comes from boto3's own chain.
    """

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self._bucket = bucket
        self._prefix = check_key(prefix) + "/" if prefix else ""
        self._base = f"s3://{bucket}/{prefix}".rstrip("/")
        self._endpoint = settings.endpoint_url or "AWS"
        try:
            self._client = _client(settings)
            # boto3's transfer manager passes no condition on; the events of a client of its own add it.
            self._if_absent = _client(settings)
        except (BotoCoreError, ValueError) as error:
            raise StoreMisconfiguredError(f"{self._base}: {error}: correct the settings under s3") from error
        for operation in ("PutObject", "CompleteMultipartUpload"):
            self._if_absent.meta.events.register(f"provide-client-params.s3.{operation}", _only_if_absent)

    def __repr__(self) -> str:
        return f"S3Store({self._base})"

    @override
    def uri(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    @override
    def resolve(self, uri: str) -> str:
        return key_of(uri, self._base)

    @override
    def put_bytes_if_absent(self, key: str, data: bytes) -> StoredObject:
        name, digest = self._name(key), sha256_of_bytes(data)

        def put() -> None:
            self._if_absent.put_object(Bucket=self._bucket, Key=name, Body=data, Metadata={"sha256": digest})

        return self._put(key, put, StoredObject(key=key, size=len(data), sha256=digest))

    @override
    def put_file_if_absent(self, key: str, path: Path, *, sha256: str | None = None) -> StoredObject:
        name = self._name(key)
        try:
            before = path.stat()
            digest = sha256_of_file(path)
        except OSError as error:
            raise plain_os_error(error, f"{path}, to be stored as {self.uri(key)}") from error
        check(f"{path}, to be stored as {self.uri(key)},", digest, sha256)
        wanted = StoredObject(key=key, size=before.st_size, sha256=digest)
        if before.st_size >= TRANSFER.multipart_threshold and self._is_there(wanted):
            return wanted  # the condition would be told only after all parts were sent

        def put() -> None:
            with path.open("rb") as file:
                self._if_absent.upload_fileobj(file, self._bucket, name, ExtraArgs={"Metadata": {"sha256": digest}}, Config=TRANSFER)

        stored = self._put(key, put, wanted)
        after = path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StoreError(f"{path} changed while it was stored as {self.uri(key)}: that object can't be trusted")
        return stored

    @override
    def put_stream_if_absent(self, key: str, chunks: Iterable[bytes], *, sha256: str | None = None) -> StoredObject:
        with tempfile.NamedTemporaryFile(prefix="headrace-") as spool:
            tally = Tally()
            try:
                spool.writelines(tally.passing(chunks))
                spool.flush()
            except OSError as error:
                raise plain_os_error(error, f"the temporary copy of {self.uri(key)} in {tempfile.gettempdir()}") from error
            return self.put_file_if_absent(key, Path(spool.name), sha256=sha256)

    @override
    def get_bytes(self, key: str, *, sha256: str | None = None) -> bytes:
        return b"".join(self.get_chunks(key, sha256=sha256))

    @override
    def get_chunks(self, key: str, *, sha256: str | None = None) -> Iterator[bytes]:
        name = self._name(key)
        with self._plain_errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            with contextlib.closing(answer["Body"]) as body:
                _check_whole(answer)
                yield from verified(body.iter_chunks(CHUNK_BYTES), self.uri(key), sha256)

    @override
    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> StoredObject:
        name = self._name(key)

        def fill(partial: Path) -> None:
            with self._plain_errors(key), partial.open("wb") as out:
                self._client.download_fileobj(self._bucket, name, out, Config=TRANSFER)

        try:
            size, found = write_verified(path, fill, self.uri(key), sha256)
        except DigestMismatchError:
            # The transfer manager believes the size that a first answer names, and that answer may have been cut off within a number.
            for _ in self.get_chunks(key, sha256=sha256):
                pass
            raise StoreUnavailableError(
                f"{self.uri(key)} was not read whole: what {self._endpoint} sends differs from time to time"
            ) from None
        return StoredObject(key=key, size=size, sha256=found)

    @override
    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop:
            raise ValueError(f"no range: [{start}, {stop})")
        if start == stop:
            self.head(key)
            return b""
        name = self._name(key)
        with self._plain_errors(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{stop - 1}")
                with contextlib.closing(answer["Body"]) as body:
                    _check_whole(answer)
                    return body.read()
            except ClientError as error:
                if _code(error) in {"InvalidRange", "416"}:  # starts behind the end
                    return b""
                raise

    @override
    def head(self, key: str) -> StoredObject:
        name = self._name(key)
        with self._plain_errors(key):
            answer = self._client.head_object(Bucket=self._bucket, Key=name)
            digest, modified = answer["Metadata"].get("sha256"), answer["LastModified"]
            return StoredObject(key=key, size=answer["ContentLength"], sha256=digest, modified=modified)

    @override
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        pages = self._client.get_paginator("list_objects_v2")
        with self._plain_errors(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + check_prefix(prefix)):
                _check_page(page)
                for entry in page.get("Contents", []):
                    key = entry["Key"].removeprefix(self._prefix)
                    yield StoredObject(key=key, size=entry["Size"], sha256=None, modified=entry["LastModified"])

    @override
    def delete(self, key: str) -> None:
        name = self._name(key)
        with contextlib.suppress(ObjectNotFoundError), self._plain_errors(key):
            self._client.delete_object(Bucket=self._bucket, Key=name)

    @override
    def sweep(self, prefix: str, before: datetime) -> int:
        pages = self._client.get_paginator("list_multipart_uploads")
        found = 0
        with self._plain_errors(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + check_prefix(prefix)):
                _check_page(page)
                for upload in page.get("Uploads", []):
                    if upload["Initiated"] < before:
                        with contextlib.suppress(self._client.exceptions.NoSuchUpload):  # its writer lives, and is done
                            self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                            found += 1
        return found

    def _name(self, key: str) -> str:
        name = self._prefix + check_key(key)
        if (size := len(name.encode())) > 1024:
            raise InvalidKeyError(f"{name[:200]!r} has {size} bytes with the store's prefix, S3 allows 1024")
        return name

    def _is_there(self, wanted: StoredObject) -> bool:
        """Whether this content is stored already.

        Raises:
            ObjectExistsError: other content is.
        """
        try:
            found = self.head(wanted.key)
        except ObjectNotFoundError:
            return False
        expected = (wanted.size, wanted.sha256)
        # Another client's put left no digest, and an answer that was cut off names another size: only reading tells.
        if (found.size, found.sha256) != expected and self._read(wanted.key) != expected:
            raise ObjectExistsError(f"{self.uri(wanted.key)} exists with other content; it was left as it is")
        return True

    def _read(self, key: str) -> tuple[int, str]:
        """Size and digest of an object that is read whole."""
        tally = Tally()
        for _ in tally.passing(self.get_chunks(key)):
            pass
        return tally.size, tally.sha256

    def _put(self, key: str, put: Callable[[], None], wanted: StoredObject) -> StoredObject:
        for attempt in range(1, _CONFLICT_ATTEMPTS + 1):
            with self._plain_errors(key):
                try:
                    put()
                except ClientError as error:
                    # 412: the name is taken, perhaps by this very put, whose answer was lost. 409: another put of it runs, and may fail.
                    if _code(error) not in _TAKEN or (attempt == _CONFLICT_ATTEMPTS and not self._is_there(wanted)):
                        raise
                    if not self._is_there(wanted):
                        continue
                return wanted
        raise AssertionError("the last attempt returned or raised")

    @contextlib.contextmanager
    def _plain_errors(self, key: str) -> Iterator[None]:
        where = f"{self._base}/{key}"
        try:
            yield
        except StoreError:
            raise
        except ClientError as error:
            raise self._plain(error, where) from error
        except OSError as error:  # a local file's
            raise plain_os_error(error, where) from error
        except Exception as error:
            # A KeyError for a header that was cut off, a number that is none, XML that ends too early: whatever boto3 raises for an answer
            # that it does not understand. It says nothing of the object.
            detail = f"{where}: {said(error)} (endpoint: {self._endpoint}); check the settings under s3"
            raise StoreUnavailableError(detail) from error

    def _plain(self, error: ClientError, where: str) -> StoreError:
        code = _code(error)
        if code == "NoSuchBucket" or (code in _MISSING and self._bucket_is_missing(where)):
            return StoreMisconfiguredError(
                f"the bucket {self._bucket!r} of {where} does not exist at {self._endpoint}: create it, or correct store.url"
            )
        if code in _MISSING:
            return ObjectNotFoundError(f"{where} does not exist")
        if code in _FULL:
            return StoreFullError(f"no space for {where} at {self._endpoint}: {error}")
        if code in _CLOCK:
            return StoreUnavailableError(f"{where}: the clock of this machine and that of {self._endpoint} differ ({code}): set the clock")
        if code in _REFUSED:
            return StoreMisconfiguredError(
                f"{where}: {self._endpoint} refuses the credentials ({code}): "
                "check s3.access_key_id, s3.secret_access_key and the bucket's policy"
            )
        return StoreUnavailableError(f"{where}: {error} (endpoint: {self._endpoint})")

    def _bucket_is_missing(self, where: str) -> bool:
        """Whether a 404 means the bucket. A HEAD request's 404 has no body that would tell an object from a bucket.

        Raises:
            StoreUnavailableError: the server does not say.
        """
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            if _code(error) in {"NoSuchBucket", *_MISSING}:
                return True
            if _code(error) in _REFUSED:  # credentials of objects only: the object's own answer counts
                return False
            raise StoreUnavailableError(f"{where}: whether its bucket exists is not known: {error} (endpoint: {self._endpoint})") from error
        return False


def _check_whole(answer: Mapping[str, Any]) -> None:
    """Refuse an answer whose headers were cut off: its body would end at once, and look like an empty object.

    With a length, or in chunks, a body that is cut off raises by itself.
    """
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    if "ContentLength" not in answer and headers.get("transfer-encoding", "").lower() != "chunked":
        raise StoreUnavailableError("the answer was cut off: its headers name no length")


def _check_page(page: Mapping[str, Any]) -> None:
    """Refuse a list without a body, which boto3 takes for an empty one."""
    if "IsTruncated" not in page:
        raise StoreUnavailableError("the answer was cut off: it is no list")


def _client(settings: S3Settings) -> "S3Client":
    secret = settings.secret_access_key
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.region or ("us-east-1" if settings.endpoint_url else None),
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 5},
            connect_timeout=5,
            read_timeout=60,
            # Servers of one's own rarely answer to bucket.host.
            s3={"addressing_style": "path" if settings.endpoint_url else "auto"},
        ),
    )


def _only_if_absent(params: dict[str, Any], **_event: object) -> None:
    params["IfNoneMatch"] = "*"


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
