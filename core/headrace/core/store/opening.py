"""From `store.url` to a store. Nothing is touched: whether it can be reached shows at the first use (`headrace doctor` tries)."""

from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.settings import S3Settings
from headrace.core.store.files import FileStore
from headrace.core.store.interface import InvalidKeyError, ObjectStore


def open_store(url: str, s3: S3Settings) -> ObjectStore:
    """The store of a URL: `file:///folder`, `file://folder` (relative to the current folder) or `s3://bucket/prefix`.

    Raises:
        InvalidKeyError: another scheme, or no folder or bucket.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file" and rest:
        return FileStore(Path(rest))
    if scheme == "s3" and (bucket := urlsplit(url).netloc):
        # boto3 takes 0.2 s to import; a producer with a file store never needs it.
        from headrace.core.store.s3 import S3Store  # noqa: PLC0415

        return S3Store(bucket, rest[len(bucket) :].strip("/"), s3)
    raise InvalidKeyError(f"store.url is {url!r}: file:///folder, file://folder or s3://bucket/prefix is needed")
