"""The files of a dataset: lines and their formats, files in the object store, and datasets that stay in the client's S3.

Files are JSONL. A byte order mark and empty lines are ignored; a line may end in CRLF. A file is checked line by line before it is stored,
unchanged, under a name with its digest. `s3://bucket/folder/` is every `.jsonl` below the folder in the order of their names,
`s3://bucket/file.jsonl` one file; a step reads them with the credentials of its job.
Guarantees: a file is in the store whole and valid, or not at all. Memory holds one line at most, of at most `MAX_LINE_BYTES`. A line that
could hold more than `MAX_LINE_VALUES` values is not parsed, so that parsing never holds the interpreter for long. A fault names the line,
counted from 1 with the empty ones. Reading checks the digest. S3 is read only at the endpoint of the gateway's settings, and never with the
gateway's own credentials.
Limitations: only the first fault is named; brackets and commas inside texts count as values too. Files in S3 are not validated before a
step reads them; roles are not supported. Blocking: not for an event loop.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self
from urllib.parse import urlsplit

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.core.errors import HeadraceError
from headrace.core.settings import S3Settings
from headrace.core.store import ObjectStore, StoreError, open_store
from headrace.core.store.folders import CHUNK_BYTES
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.resources import find_record, records_under, resource_id, resource_name
from headrace.gateway.tables import Tables
from headrace.schemas.chat import Message, Tool
from headrace.schemas.parsing import load_json, validate
from headrace.schemas.reasons import CodecError
from headrace.schemas.rlor import DatasetFact, DatasetFile, DatasetFormat, dataset_files_prefix, dataset_key

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_LINE_VALUES = 500_000
_BOM = b"\xef\xbb\xbf"


class DatasetFaultError(HeadraceError):
    """A file that cannot be part of a dataset; the message has the line and the fault."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not empty, without its end. Raises `DatasetFaultError` if it could hold more than `MAX_LINE_VALUES` values."""

    number: int
    """From 1, with the empty ones."""
    text: bytes
    ended: bool
    """Whether a line end follows; only the last line may have none."""

    def __post_init__(self) -> None:
        # Each value of an object or array has a bracket or a comma before it.
        if sum(self.text.count(mark) for mark in (b"{", b"[", b",")) > MAX_LINE_VALUES:
            raise DatasetFaultError(
                f"line {self.number} holds more than {MAX_LINE_VALUES} brackets and commas: split it into several lines"
            )


class _Example(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class ChatLine(_Example):
    """A line of format CHAT: a conversation to imitate."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None

    @model_validator(mode="after")
    def _is_trainable(self) -> Self:
        role = self.messages[-1].role
        if role != "assistant":
            raise ValueError(f"messages: the last one is of {role}: the answer to train on, of assistant, must be the last")
        return self


class RlSample(ChatLine):
    """One answer to a prompt: its conversation and its scores. Other keys are allowed."""

    evals: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_metrics(self) -> Self:
        for name, value in (self.evals or {}).items():
            if not _is_number(value):
                raise ValueError(f"evals.{name}: a metric is a JSON number, not {type(value).__name__}")
        if not self.metrics:
            raise ValueError('no metric: give numbers in `evals`, such as {"score": 0.5}, or next to `messages`')
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name: those in `evals`; if it has none, the other numbers of the sample."""
        numbers = {name: value for name, value in (self.model_extra or {}).items() if _is_number(value)}
        return {name: float(value) for name, value in (self.evals or numbers).items()}


class RlLine(_Example):
    """A line of format RL: the answers to one prompt."""

    samples: list[RlSample] = Field(min_length=2)


class CompletionLine(_Example):
    """A line of format COMPLETION."""

    prompt: str
    completion: str = Field(min_length=1)


_EXAMPLES: dict[DatasetFormat, type[RlLine | ChatLine | CompletionLine]] = {"RL": RlLine, "CHAT": ChatLine, "COMPLETION": CompletionLine}
_FORMAT_KEYS: dict[str, DatasetFormat] = {"samples": "RL", "messages": "CHAT", "prompt": "COMPLETION"}


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """The lines that are not empty. Raises DatasetFaultError (a line above `MAX_LINE_BYTES`)."""
    begun: list[bytes] = []
    number, size = 1, 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield from _line(number, b"".join((*begun, end)), ended=True)
            number, size = number + 1, 0
            begun.clear()
        begun.append(rest)
        size += len(rest)
        if size > MAX_LINE_BYTES:
            raise DatasetFaultError(f"line {number} has more than {MAX_LINE_BYTES} bytes: are there line ends (\\n) in the file?")
    yield from _line(number, b"".join(begun), ended=False)


def read_line(line: Line, format: DatasetFormat) -> RlLine | ChatLine | CompletionLine:  # noqa: A002 - the API's word
    """The example on a line. Raises DatasetFaultError (the line is not of this format)."""
    value = _parse(line)
    try:
        return validate(_EXAMPLES[format], value)
    except CodecError as error:
        raise DatasetFaultError(f"line {line.number}: {error}") from error


def infer_format(line: Line) -> DatasetFormat:
    """The format of a line. Raises DatasetFaultError (no format has such a line)."""
    found = _parse(line)
    if isinstance(found, dict):
        for key, format in _FORMAT_KEYS.items():  # noqa: A001 - as above
            if key in found:
                return format
    raise DatasetFaultError(
        f"line {line.number} is no example: an object with `samples` (RL), `messages` (CHAT) or `prompt` (COMPLETION) is needed"
    )


def _line(number: int, text: bytes, *, ended: bool) -> Iterator[Line]:
    if number == 1:
        text = text.removeprefix(_BOM)
    if text := text.strip():
        yield Line(number, text, ended)


def _parse(line: Line) -> Any:  # noqa: ANN401 - raw JSON
    try:
        return load_json(line.text)
    except CodecError as error:
        cut_off = "" if line.ended else ". It is the last line, and has no line end: was the file cut off?"
        raise DatasetFaultError(f"line {line.number}: {error}{cut_off}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


S3_SECRET = "awsS3Config.credentialsSecret"  # noqa: S105 - a field's name
_KEY_NAMES = ("aws_access_key_id", "aws_secret_access_key")
_SUFFIX = ".jsonl"
_REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset with its files."""

    record: DatasetFact
    files: Sequence[DatasetFile]
    """In the order of their names."""

    @property
    def name(self) -> str:
        """The resource name."""
        return resource_name(self.record.account, "datasets", self.record.dataset)

    @property
    def examples(self) -> int:
        """Of all files."""
        return sum(file.examples for file in self.files)

    def find_disagreement(self) -> str | None:
        """Why the files cannot be one dataset; None: they can."""
        first = self.files[0] if self.files else None
        for file in self.files[1:]:
            if first is not None and (file.format, file.samples) != (first.format, first.samples):
                return (
                    f"{file.name} has format {file.format} with {file.samples} samples a line, {first.name} has {first.format} with "
                    f"{first.samples}: all files of a dataset need the same"
                )
        return None


def find_dataset(tables: Tables, account: str, dataset: str) -> Dataset:
    """A dataset by its id. Raises ProblemError (404)."""
    return with_files(tables, find_record(tables, dataset_key(account, dataset), DatasetFact, resource_name(account, "datasets", dataset)))


def with_files(tables: Tables, record: DatasetFact) -> Dataset:
    """A dataset with its files."""
    return Dataset(record, records_under(tables, dataset_files_prefix(record.account, record.dataset, record.incarnation), DatasetFile))


def ready_dataset(tables: Tables, account: str, name: str, field: str) -> Dataset:
    """A dataset for a job, by its name or id. Raises ProblemError (404: it does not exist; 400: it is not READY)."""
    found = find_dataset(tables, account, resource_id(account, "datasets", name, field))
    if found.record.state != "READY":
        why = found.record.fault or "its files are not uploaded yet: upload them, then call :validateUpload"
        raise ProblemError(400, f"{field}: {found.name} is {found.record.state}: {why}", code=FAILED_PRECONDITION)
    return found


def store_file(store: ObjectStore, dataset: DatasetFact, name: str, spool: IO[bytes]) -> DatasetFile:
    """Check a file of a dataset and store it; `spool` is at its beginning. Raises DatasetFaultError (invalid; nothing is stored)."""
    digest = hashlib.sha256()
    format, examples, samples = _check(_read_chunks(spool, digest.update), dataset.format)  # noqa: A001 - the API's word
    size = spool.tell()
    sha256 = digest.hexdigest()
    key = f"datasets/{dataset.incarnation}/{sha256}.jsonl"
    spool.seek(0)
    store.put_stream_if_absent(key, _read_chunks(spool), sha256=sha256)
    return DatasetFile(
        account=dataset.account,
        dataset=dataset.dataset,
        incarnation=dataset.incarnation,
        name=name,
        uri=store.uri(key),
        sha256=sha256,
        size=size,
        format=format,
        examples=examples,
        samples=samples,
    )


def read_lines(store: ObjectStore, files: Sequence[DatasetFile]) -> Iterator[bytes]:
    """The lines of files one after the other, without empty ones and without line ends.

    Raises ObjectNotFoundError if the dataset was deleted, and DigestMismatchError if a file has changed. The latter comes at the end of a
    file: use nothing before the iterator has ended.
    """
    for file in files:
        yield from _stored_lines(store, store.resolve(file.uri), file.sha256)


def delete_files(store: ObjectStore, files: Sequence[DatasetFile]) -> None:
    """Delete stored files; a missing one is no error."""
    for file in files:
        store.delete(store.resolve(file.uri))


def parse_credentials(secret: str, own: S3Settings) -> S3Settings:
    """Settings with a job's credentials: JSON with the two keys, as the hosted service stores them.

    Raises ProblemError (400; the message does not contain the secret).
    """
    try:
        found = orjson.loads(secret)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) and found[name] for name in _KEY_NAMES):
        raise ProblemError(
            400,
            f'{S3_SECRET}: the secret itself is needed, as JSON {{"aws_access_key_id": …, "aws_secret_access_key": …}}; this gateway '
            "keeps no secrets by name",
        )
    region = found.get("region") or own.region
    if region is not None and (not isinstance(region, str) or _REGION.fullmatch(region) is None):
        raise ProblemError(400, f"{S3_SECRET}: region: the name of a region, such as eu-central-1, is needed")
    if any(not found[name].isascii() or not found[name].isprintable() for name in _KEY_NAMES):
        raise ProblemError(400, f"{S3_SECRET}: keys of S3 are printable ASCII")
    keys = {"access_key_id": found[_KEY_NAMES[0]], "secret_access_key": found[_KEY_NAMES[1]]}
    return S3Settings.model_validate({"endpoint_url": own.endpoint_url, "region": region, **keys})


def check_external_url(url: str) -> None:
    """Raise `ProblemError` unless a URL names something in S3: 501 for other schemes, 400 for an invalid URL."""
    scheme, _, rest = url.partition("://")
    if scheme != "s3":
        raise ProblemError(501, f"dataset.externalUrl: {scheme[:20]}:// is not read here, only s3://: or upload the files")
    bucket, _, path = rest.partition("/")
    if _BUCKET.fullmatch(bucket) is None or not path.strip("/") or ".." in path.split("/") or len(url) > 1024 or not url.isprintable():
        raise ProblemError(400, "dataset.externalUrl: s3://bucket/folder/ or s3://bucket/file.jsonl is needed")


def read_s3_lines(url: str, access: S3Settings) -> Iterator[bytes]:
    """The lines of a dataset in S3, without empty ones. Raises ProblemError (400: it does not exist or cannot be read)."""
    place = urlsplit(url)
    folder, _, name = place.path.strip("/").rpartition("/") if place.path.endswith(_SUFFIX) else (place.path.strip("/"), "", "")
    try:
        store = open_store(f"s3://{place.netloc}/{folder}", access)
        keys = [name] if name else [item.key for item in store.list("") if item.key.endswith(_SUFFIX)]
        if not keys:
            raise ProblemError(400, f"dataset: {url} has no file that ends with {_SUFFIX}", code=FAILED_PRECONDITION)
        for key in keys:
            yield from _stored_lines(store, key)
    except (StoreError, DatasetFaultError) as error:
        message = f"dataset: {url} can't be read with the job's awsS3Config: {error}"
        raise ProblemError(400, message, code=FAILED_PRECONDITION) from None


def _stored_lines(store: ObjectStore, key: str, sha256: str | None = None) -> Iterator[bytes]:
    def chunks() -> Generator[bytes]:
        yield from store.get_chunks(key, sha256=sha256)

    with contextlib.closing(chunks()) as pieces:
        for line in split_lines(pieces):
            yield line.text


def _read_chunks(spool: IO[bytes], update: Callable[[bytes], object] | None = None) -> Iterator[bytes]:
    while chunk := spool.read(CHUNK_BYTES):
        if update is not None:
            update(chunk)
        yield chunk


def _check(chunks: Iterator[bytes], declared: DatasetFormat | None) -> tuple[DatasetFormat, int, int | None]:
    """Check all lines; returns the format, the number of lines, and the samples of each line of format RL."""
    format, examples, samples = declared, 0, None  # noqa: A001 - the API's word
    for line in split_lines(chunks):
        format = format or infer_format(line)  # noqa: A001 - as above
        found = read_line(line, format)
        examples += 1
        if isinstance(found, RlLine):
            if samples is not None and len(found.samples) != samples:
                raise DatasetFaultError(
                    f"line {line.number} has {len(found.samples)} samples, those before have {samples}: each line needs the same number"
                )
            samples = len(found.samples)
    if format is None or not examples:
        raise DatasetFaultError("the file has no example: every line is empty")
    return format, examples, samples
