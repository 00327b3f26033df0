"""Bytes of a dataset's file, from a request to the object store and into the log.

They are spooled to a temporary file as they come, checked there line by line, stored, and then named in the log. Guarantees: an upload that
breaks off, is too short or has a line that can't be is not part of the dataset, whose `status` says why; a dataset that is READY does not
change any more. Gives up: going on with an upload that broke off; it is sent again.
"""

import asyncio
import contextlib
import logging
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from headrace.core.store import StoreError
from headrace.gateway.facts import fact_record, write_fact
from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import OvertakenError, Turn
from headrace.gateway.problems import FAILED_PRECONDITION, ProblemError
from headrace.gateway.rlor.dataset_facts import Dataset, find_dataset
from headrace.gateway.rlor.dataset_files import delete_files, take_in
from headrace.gateway.rlor.dataset_lines import DatasetFaultError
from headrace.schemas.base import utc_now
from headrace.schemas.rlor_resources import DatasetFact, DatasetFile, dataset_file_key, dataset_key

logger = logging.getLogger(__name__)

_IN_MEMORY_BYTES = 1024 * 1024
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@contextlib.asynccontextmanager
async def multipart_file(request: Request) -> AsyncIterator[UploadFile]:
    """The part `file` of a multipart body, all of it in a temporary file.

    Raises:
        ProblemError: 400: there is none, or the body broke off; 503: there is no space for it.
    """
    with _receiving():
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
    """The body as it is, all of it in a temporary file.

    Raises:
        ProblemError: 400: it has another size, or broke off; 503: there is no space for it.
    """
    received = 0
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
        with _receiving():
            async for chunk in request.stream():
                received += len(chunk)
                await asyncio.to_thread(spool.write, chunk)
            await asyncio.to_thread(spool.seek, 0)
        if received != size:
            raise ProblemError(400, f"the file has {received} bytes, the address is for one of {size}: ask :getUploadEndpoint for another")
        yield spool


@contextlib.contextmanager
def _receiving() -> Iterator[None]:
    try:
        yield
    except ClientDisconnect:
        raise ProblemError(400, "the upload broke off: send it again") from None
    except OSError as error:
        logger.error("an upload can't be kept in %s: %s", tempfile.gettempdir(), error)  # noqa: TRY400 - said by its text
        raise ProblemError(503, f"the gateway has no place for the file while it comes in ({error.strerror}): try again later") from None


def file_name_of(text: str | None) -> str:
    """A file's name as the log keeps it: what is not a letter, digit, dot, dash or underscore is an underscore."""
    return _NOT_IN_NAMES.sub("_", text or "")[-128:] or "file.jsonl"


async def add_file(gate: Gate, dataset: Dataset, name: str, spool: IO[bytes], *, completes: bool) -> DatasetFile:
    """Make a file part of a dataset.

    Args:
        gate: The gateway's.
        dataset: Which; UPLOADING, or READY with this very file.
        name: Of the file.
        spool: All of it.
        completes: The dataset is READY with it.

    Raises:
        ProblemError: 400: the file can't be part of it, or the dataset is READY without it; 404: deleted meanwhile.
        KafkaUnavailableError: nothing was changed.
        StoreUnavailableError: the same.
    """
    fact = dataset.fact
    try:
        file = await asyncio.to_thread(take_in, gate.store, fact, name, spool)
    except DatasetFaultError as error:
        await _note_fault(gate, fact, f"{name}: {error}")
        raise ProblemError(400, f"{name}: {error}") from error
    key, is_written = dataset_file_key(file), False
    while not is_written:
        now = find_dataset(await gate.view.fresh(), fact.account, fact.dataset)
        same = [there for there in now.files if there.sha256 == file.sha256]
        if any(there.name == name for there in same) and now.fact.state == "READY":
            return file  # a repeat
        kept = Dataset(now.fact, [*(there for there in now.files if there.name != name), file])
        if (refusal := _refusal(dataset, kept, completes=completes)) is not None:
            await remove_files(gate, [] if same else [file])  # an object is named by its content
            raise refusal
        changed = now.fact.model_copy(update={"fault": None, "state": "READY" if completes else "UPLOADING", "updated_at": utc_now()})
        records = [fact_record(gate, file), fact_record(gate, changed)]
        # Another file may come in beside it, or a deletion: the next look says what is to be done then.
        with contextlib.suppress(OvertakenError):
            await gate.writer.commit(records, is_in=lambda: gate.view.tables.facts.get(key) == file, turn=while_it_is(gate, now.fact))
            is_written = True
    await remove_files(gate, [there for there in now.files if there.sha256 not in {other.sha256 for other in kept.files}])
    return file


async def complete(gate: Gate, dataset: Dataset) -> None:
    """Make a dataset READY, whose files were put one by one.

    Raises:
        ProblemError: 400: it has none, one is missing, or they can't be one dataset.
    """
    fact = dataset.fact
    if fact.state == "READY":
        return
    missing = sorted(set(fact.expected) - {file.name for file in dataset.files})
    if missing or not dataset.files:
        why = fact.fault or f"not uploaded yet: {', '.join(missing) or 'any file'}"
        raise ProblemError(400, f"{dataset.name}: {why}", code=FAILED_PRECONDITION)
    if (fault := dataset.disagreement()) is not None:
        raise ProblemError(400, f"{dataset.name}: {fault}")
    await write_change(gate, fact.model_copy(update={"state": "READY", "fault": None, "updated_at": utc_now()}), before=fact)


async def remove_files(gate: Gate, files: list[DatasetFile]) -> None:
    """Delete objects that nothing names any more; where the store does not answer, they stay."""
    if not files:
        return
    try:
        await asyncio.to_thread(delete_files, gate.store, files)
    except StoreError as error:
        logger.warning("%d files of dataset %s stay in the store, unused: %s", len(files), files[0].dataset, error)


async def write_new(gate: Gate, fact: DatasetFact) -> None:
    """Write the fact of a dataset that nobody has made yet.

    Raises:
        OvertakenError: somebody has, meanwhile.
        KafkaUnavailableError: nothing was changed.
    """
    key = dataset_key(fact.account, fact.dataset)
    await write_fact(gate, fact, turn=Turn.while_unchanged(fact.account, gate.view.tables.facts, {key: None}))


async def write_change(gate: Gate, fact: DatasetFact, *, before: DatasetFact) -> None:
    """Write a dataset's fact in the place of the one that it was made of.

    Raises:
        OvertakenError: that one is there no more; nothing was changed.
        KafkaUnavailableError: nothing was changed.
    """
    await write_fact(gate, fact, turn=while_it_is(gate, before))


def while_it_is(gate: Gate, fact: DatasetFact) -> Turn:
    """For what is right only while a dataset is as this fact says: one that was deleted meanwhile must not come back."""
    key = dataset_key(fact.account, fact.dataset)
    return Turn.while_unchanged(fact.account, gate.view.tables.facts, {key: fact})


def _refusal(asked: Dataset, kept: Dataset, *, completes: bool) -> ProblemError | None:
    """Why a dataset can't have the files that it would have; `asked` is how it stood when they began to come in."""
    if kept.fact.incarnation != asked.fact.incarnation:
        return ProblemError(404, f"{kept.name} was deleted while the file came in, and made anew: send it again")
    if kept.fact.state == "READY":
        return ProblemError(400, f"{kept.name} is READY and does not change any more: create another dataset", code=FAILED_PRECONDITION)
    if completes and (fault := kept.disagreement()) is not None:
        return ProblemError(400, f"{kept.name}: {fault}")
    return None


async def _note_fault(gate: Gate, fact: DatasetFact, fault: str) -> None:
    now = gate.view.tables.facts.get(dataset_key(fact.account, fact.dataset))
    if isinstance(now, DatasetFact) and now.incarnation == fact.incarnation and now.state == "UPLOADING":
        with contextlib.suppress(OvertakenError):  # it is no longer what the fault is of
            await write_change(gate, now.model_copy(update={"fault": fault[:2000], "updated_at": utc_now()}), before=now)
