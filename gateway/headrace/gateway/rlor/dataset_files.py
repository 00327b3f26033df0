"""Files of datasets in the object store: checked line by line before they are stored, as they came, under a name with their digest.

Guarantees: a file is in the store whole and valid, or not at all; memory is bounded by one line. Reading checks the digest. Gives up:
uploads larger than the temporary folder's disk, where a file waits until its last line is known. Blocks: not for an event loop.
"""

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import IO

from headrace.core.store import ObjectStore
from headrace.core.store.digests import CHUNK_BYTES
from headrace.gateway.rlor.dataset_lines import DatasetFaultError, Line, RlLine, format_of, lines_in, read_line
from headrace.schemas.rlor_resources import DatasetFact, DatasetFile, DatasetFormat


def take_in(store: ObjectStore, dataset: DatasetFact, name: str, spool: IO[bytes]) -> DatasetFile:
    """Check a file and store it.

    Args:
        store: Where to.
        dataset: What it is to be part of.
        name: Of the file.
        spool: All of it, at its beginning.

    Raises:
        DatasetFaultError: it can't be part of the dataset; nothing is stored.
        StoreUnavailableError: the store.
    """
    digest = hashlib.sha256()
    found = _checked(_chunks(spool, digest.update), dataset.format)
    size = spool.tell()
    sha256 = digest.hexdigest()
    key = f"datasets/{dataset.incarnation}/{sha256}.jsonl"
    spool.seek(0)
    store.put_stream_if_absent(key, _chunks(spool), sha256=sha256)
    return DatasetFile(
        account=dataset.account,
        dataset=dataset.dataset,
        incarnation=dataset.incarnation,
        name=name,
        uri=store.uri(key),
        sha256=sha256,
        size=size,
        format=found.format,
        examples=found.examples,
        samples=found.samples,
    )


def lines_of(store: ObjectStore, files: Sequence[DatasetFile]) -> Iterator[bytes]:
    """The examples of files, one after the other: lines that are not empty, without their ends.

    Raises:
        ObjectNotFoundError: the dataset was deleted.
        DigestMismatchError: a file is not what was stored; raised at its end: use nothing before the iterator has ended.
        StoreUnavailableError: the store.
    """
    for file in files:
        with contextlib.closing(_read(store, file)) as chunks:
            for line in lines_in(chunks):
                yield line.text


def delete_files(store: ObjectStore, files: Sequence[DatasetFile]) -> None:
    """Delete what was stored; what is gone already is no error."""
    for file in files:
        store.delete(store.resolve(file.uri))


def _read(store: ObjectStore, file: DatasetFile) -> Generator[bytes]:
    yield from store.get_chunks(store.resolve(file.uri), sha256=file.sha256)


def _chunks(spool: IO[bytes], passed: Callable[[bytes], object] | None = None) -> Iterator[bytes]:
    while chunk := spool.read(CHUNK_BYTES):
        if passed is not None:
            passed(chunk)
        yield chunk


class _Found:
    """What the lines so far come to."""

    def __init__(self, format: DatasetFormat) -> None:  # noqa: A002 - the API's word
        self.format = format
        self.examples = 0
        self.samples: int | None = None

    def add(self, line: Line) -> None:
        read = read_line(line, self.format)
        self.examples += 1
        if not isinstance(read, RlLine):
            return
        if self.samples is not None and len(read.samples) != self.samples:
            raise DatasetFaultError(
                f"line {line.number} has {len(read.samples)} samples, those before have {self.samples}: each line needs the same number"
            )
        self.samples = len(read.samples)


def _checked(chunks: Iterator[bytes], declared: DatasetFormat | None) -> _Found:
    found: _Found | None = None
    for line in lines_in(chunks):
        found = found or _Found(declared or format_of(line))
        found.add(line)
    if found is None:
        raise DatasetFaultError("the file has no example: every line is empty")
    return found
