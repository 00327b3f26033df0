"""Uploads to datasets: bodies in temporary files, signed addresses, and the records that make a file part of its dataset.

An upload goes to a temporary file, is checked there line by line, is stored, and then its record is written. A signed address accepts one
file of one name and size without a key, for an hour, and not for a dataset that was created again under the name.
Guarantees: an upload that breaks off, is too short or has an invalid line is not part of the dataset, whose `status` has the fault. All
gateways with one `gateway.secrets_key` accept each other's addresses.
Limitations: an upload that broke off cannot be continued. An address cannot be withdrawn; without `gateway.secrets_key` it is valid only at
the gateway process that made it.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from typing import IO
from urllib.parse import quote, urlencode

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from headrace.core.settings import GatewaySettings
from headrace.core.store import StoreError
from headrace.gateway.facts import fact_record, write_fact
from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import OvertakenError, Turn
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_files import (
    Dataset,
    DatasetFaultError,
    delete_files,
    find_dataset,
    store_file,
)
from headrace.schemas.base import utc_now
from headrace.schemas.rlor import DatasetFact, DatasetFile, dataset_file_key, dataset_key

logger = logging.getLogger(__name__)

_IN_MEMORY_BYTES = 1024 * 1024
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_VALID_SECONDS = 3600
_PROCESS_KEY = secrets.token_bytes(32)


@contextlib.asynccontextmanager
async def multipart_file(request: Request) -> AsyncIterator[UploadFile]:
    """The part `file` of a multipart body, in a temporary file. Raises ProblemError (400: none, or it broke off; 503: no space)."""
    with _receive_errors():
        form = await request.form(max_files=1, max_fields=8)
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ProblemError(400, "multipart/form-data with one part named `file`, with a file name, is needed")
        yield file
    finally:
        await form.close()


@contextlib.asynccontextmanager
async def body_file(request: Request, size: int) -> AsyncIterator[IO[bytes]]:
    """The body in a temporary file. Raises ProblemError (400: another size, or it broke off; 503: no space)."""
    received = 0
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
        with _receive_errors():
            async for chunk in request.stream():
                received += len(chunk)
                await asyncio.to_thread(spool.write, chunk)
            await asyncio.to_thread(spool.seek, 0)
        if received != size:
            raise ProblemError(400, f"the file has {received} bytes, the address is for one of {size}: ask :getUploadEndpoint for another")
        yield spool


@contextlib.contextmanager
def _receive_errors() -> Iterator[None]:
    try:
        yield
    except ClientDisconnect:
        raise ProblemError(400, "the upload broke off: send it again") from None
    except OSError as error:
        logger.error("cannot keep an upload in %s: %s", tempfile.gettempdir(), error)  # noqa: TRY400 - the text says enough
        raise ProblemError(503, f"the gateway has no place for the file while it comes in ({error.strerror}): try again later") from None


def safe_file_name(text: str | None) -> str:
    """A file name for the log: each character that is not a letter, digit, dot, dash or underscore becomes an underscore."""
    return _NOT_IN_NAMES.sub("_", text or "")[-128:] or "file.jsonl"


def upload_url(settings: GatewaySettings, base_url: str, dataset: DatasetFact, name: str, size: int) -> str:
    """A signed address for one file. `base_url` is where the client reached the gateway, with a slash at its end."""
    expires = int(time.time()) + _VALID_SECONDS
    path = "/".join(quote(part, safe="") for part in ("v1", "accounts", dataset.account, "datasets", dataset.dataset, "uploads", name))
    query = {"size": size, "expires": expires, "signature": _signature(settings, dataset, name, size, expires)}
    return f"{base_url}{path}?{urlencode(query)}"


def check_signature(settings: GatewaySettings, dataset: DatasetFact, name: str, *, size: int, expires: int, signature: str) -> None:
    """Raise `ProblemError` 403 for an address that is not from a gateway with this key, or that has expired."""
    if not hmac.compare_digest(_signature(settings, dataset, name, size, expires).encode(), signature.encode()):
        raise ProblemError(403, "the address is not one that this gateway gave for this file: ask :getUploadEndpoint for one")
    if expires < time.time():
        raise ProblemError(403, "the address has expired: ask :getUploadEndpoint for a new one")


async def add_file(gate: Gate, dataset: Dataset, name: str, spool: IO[bytes], *, completes: bool) -> DatasetFile:
    """Make a file part of a dataset, which is UPLOADING, or READY with this very file. With `completes` the dataset is READY then.

    Raises ProblemError (400: the file cannot be part of it, or the dataset is READY without it; 404: the dataset was deleted meanwhile).
    """
    record = dataset.record
    try:
        file = await asyncio.to_thread(store_file, gate.store, record, name, spool)
    except DatasetFaultError as error:
        await _write_fault(gate, record, f"{name}: {error}")
        raise ProblemError(400, f"{name}: {error}") from error
    key, is_written = dataset_file_key(file), False
    while not is_written:
        now = find_dataset(await gate.view.fresh(), record.account, record.dataset)
        same = [other for other in now.files if other.sha256 == file.sha256]
        if any(other.name == name for other in same) and now.record.state == "READY":
            return file  # a repeat
        changed = Dataset(now.record, [*(other for other in now.files if other.name != name), file])
        if (rejection := _rejection(dataset, changed, completes=completes)) is not None:
            await remove_files(gate, [] if same else [file])  # files with one content share an object
            raise rejection
        state = "READY" if completes else "UPLOADING"
        new_record = now.record.model_copy(update={"fault": None, "state": state, "updated_at": utc_now()})
        records = [fact_record(gate, file), fact_record(gate, new_record)]
        # Another file or a deletion can come in between: the next round sees it.
        with contextlib.suppress(OvertakenError):
            turn = while_unchanged(gate, now.record)
            await gate.writer.commit(records, is_in=lambda: gate.view.tables.facts.get(key) == file, turn=turn)
            is_written = True
    await remove_files(gate, [old for old in now.files if old.sha256 not in {other.sha256 for other in changed.files}])
    return file


async def complete(gate: Gate, dataset: Dataset) -> None:
    """Make a dataset READY whose files were uploaded one by one. Raises ProblemError (400: a file is missing, or they disagree)."""
    record = dataset.record
    if record.state == "READY":
        return
    missing = sorted(set(record.expected) - {file.name for file in dataset.files})
    if missing or not dataset.files:
        why = record.fault or f"not uploaded yet: {', '.join(missing) or 'any file'}"
        raise ProblemError(400, f"{dataset.name}: {why}", code=FAILED_PRECONDITION)
    if (fault := dataset.find_disagreement()) is not None:
        raise ProblemError(400, f"{dataset.name}: {fault}")
    await write_change(gate, record, state="READY", fault=None)


async def remove_files(gate: Gate, files: list[DatasetFile]) -> None:
    """Delete objects that no record names any more; if the store does not answer, they stay."""
    if not files:
        return
    try:
        await asyncio.to_thread(delete_files, gate.store, files)
    except StoreError as error:
        logger.warning("%d files of dataset %s stay in the store, unused: %s", len(files), files[0].dataset, error)


async def write_change(gate: Gate, record: DatasetFact, **changes: object) -> None:
    """Write a dataset's record with changes. Raises OvertakenError (the record has changed meanwhile; nothing was written)."""
    await write_fact(gate, record.model_copy(update={**changes, "updated_at": utc_now()}), turn=while_unchanged(gate, record))


def while_unchanged(gate: Gate, record: DatasetFact) -> Turn:
    """For a change that is based on this record: a dataset that was deleted meanwhile must not come back."""
    return Turn.while_unchanged(record.account, gate.view.tables.facts, {dataset_key(record.account, record.dataset): record})


def _rejection(before: Dataset, changed: Dataset, *, completes: bool) -> ProblemError | None:
    """Why a dataset cannot have the files of `changed`; `before` is the dataset when the upload began."""
    if changed.record.incarnation != before.record.incarnation:
        return ProblemError(404, f"{changed.name} was deleted and created again during the upload: send the file again")
    if changed.record.state == "READY":
        return ProblemError(400, f"{changed.name} is READY and does not change any more: create another dataset", code=FAILED_PRECONDITION)
    if completes and (fault := changed.find_disagreement()) is not None:
        return ProblemError(400, f"{changed.name}: {fault}")
    return None


async def _write_fault(gate: Gate, record: DatasetFact, fault: str) -> None:
    now = gate.view.tables.facts.get(dataset_key(record.account, record.dataset))
    if isinstance(now, DatasetFact) and now.incarnation == record.incarnation and now.state == "UPLOADING":
        with contextlib.suppress(OvertakenError):  # the fault is of a former state
            await write_change(gate, now, fault=fault[:2000])


def _signature(settings: GatewaySettings, dataset: DatasetFact, name: str, size: int, expires: int) -> str:
    secret = settings.secrets_key
    key = _PROCESS_KEY if secret is None else hmac.digest(secret.get_secret_value().encode(), b"dataset uploads", "sha256")
    content = "\n".join((dataset.account, dataset.dataset, dataset.incarnation, name, str(size), str(expires)))
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()
