"""Datasets that lie in somebody's S3: read with the credentials that the job brings, when a step needs them.

`s3://bucket/folder/` is every `.jsonl` below it, in the order of their names; `s3://bucket/file.jsonl` is one file. Guarantees: line by
line, in bounded memory, never with the gateway's own credentials, and only from the endpoint that the gateway's settings name. Gives up:
validation before a step needs it; roles; what changes while it is read.
"""

import re
from collections.abc import Generator, Iterator
from contextlib import closing
from urllib.parse import urlsplit

import orjson

from headrace.core.settings import S3Settings
from headrace.core.store import ObjectStore, StoreError, open_store
from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.dataset_lines import DatasetFaultError, lines_in

S3_SECRET = "awsS3Config.credentialsSecret"  # noqa: S105 - a field's name
_SUFFIX = ".jsonl"
_REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


def credentials(secret: str, own: S3Settings) -> S3Settings:
    """Settings with the credentials of a job: JSON with `aws_access_key_id` and `aws_secret_access_key`, as the hosted service keeps them.

    Raises:
        ProblemError: 400; the secret is not in it.
    """
    try:
        said = orjson.loads(secret)
    except orjson.JSONDecodeError:
        said = None
    names = ("aws_access_key_id", "aws_secret_access_key")
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) and said[name] for name in names):
        raise ProblemError(
            400,
            f'{S3_SECRET}: the secret itself is needed, as JSON {{"aws_access_key_id": …, "aws_secret_access_key": …}}; this gateway '
            "keeps no secrets by name",
        )
    region = said.get("region") or own.region
    if region is not None and (not isinstance(region, str) or _REGION.fullmatch(region) is None):
        raise ProblemError(400, f"{S3_SECRET}: region: the name of a region, such as eu-central-1, is needed")
    if any(not said[name].isascii() or not said[name].isprintable() for name in names):
        raise ProblemError(400, f"{S3_SECRET}: keys of S3 are printable ASCII")
    found = {"access_key_id": said[names[0]], "secret_access_key": said[names[1]]}
    return S3Settings.model_validate({"endpoint_url": own.endpoint_url, "region": region, **found})


def check_url(url: str) -> None:
    """Raise `ProblemError` unless a URL names something in S3: 501 for other places, 400 for none."""
    scheme, _, rest = url.partition("://")
    if scheme != "s3":
        raise ProblemError(501, f"dataset.externalUrl: {scheme[:20]}:// is not read here, only s3://: or upload the files")
    bucket, _, path = rest.partition("/")
    if _BUCKET.fullmatch(bucket) is None or not path.strip("/") or ".." in path.split("/") or len(url) > 1024 or not url.isprintable():
        raise ProblemError(400, "dataset.externalUrl: s3://bucket/folder/ or s3://bucket/file.jsonl is needed")


def s3_lines(url: str, access: S3Settings) -> Iterator[bytes]:
    """The lines of a dataset, without empty ones.

    Raises:
        ProblemError: 400: nothing is there, or it can't be read; says what the storage said.
    """
    place = urlsplit(url)
    folder, _, name = place.path.strip("/").rpartition("/") if place.path.endswith(_SUFFIX) else (place.path.strip("/"), "", "")
    try:
        store = open_store(f"s3://{place.netloc}/{folder}", access)
        keys = [name] if name else [item.key for item in store.list("") if item.key.endswith(_SUFFIX)]
        if not keys:
            raise ProblemError(400, f"dataset: {url} has no file that ends with {_SUFFIX}", code=9)
        for key in keys:
            yield from _lines(store, key)
    except (StoreError, DatasetFaultError) as error:
        raise ProblemError(400, f"dataset: {url} can't be read with the job's awsS3Config: {error}", code=9) from None


def _lines(store: ObjectStore, key: str) -> Iterator[bytes]:
    def chunks() -> Generator[bytes]:
        yield from store.get_chunks(key)

    with closing(chunks()) as pieces:
        for line in lines_in(pieces):
            yield line.text
