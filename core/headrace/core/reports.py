"""Reading what a step left in the object store next to its weights: its report, and the file of packed rows.

Guarantees: nothing is given out that differs from the digests of the ledger. What was never kept and what is gone are told apart.
All calls block: not for an event loop.

The file of packed rows next to a step's report, opened: `rows.safetensors`, laid out as `headrace.trainer.rows_out` says.

Guarantees: a file of another layout is told apart (`laid_out`), never misread. Limitations: reading a part of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError

from headrace.core.errors import HeadraceError, install_advice
from headrace.core.store import ObjectNotFoundError, ObjectStore, read_manifest
from headrace.schemas.state import REPORT_FILE, ROWS_FILE, StepReport
from headrace.schemas.weights import WeightsRef


class NoReportError(HeadraceError):
    """A step has no report, or it is gone; says which, and why."""


class RowsTooLargeError(HeadraceError):
    """The rows of a step are more than the caller wants to read."""


def read_report(store: ObjectStore, ref: WeightsRef | None) -> StepReport:
    """The report that a ledger record names.

    Args:
        store: Where reports are.
        ref: `StepRecord.report`.

    Raises:
        NoReportError: none was kept, it is gone, or what is there is none.
        DigestMismatchError: it was changed since the step was committed.
        StoreUnavailableError: the store did not answer; it may still be there.
    """
    if ref is None:
        raise NoReportError("no report was kept: the ledger names none for this step")
    body = _file(store, ref, REPORT_FILE)
    if body is None:
        raise NoReportError(f"{ref.uri} has no {REPORT_FILE}: it is no report")
    try:
        return StepReport.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise NoReportError(
            f"{ref.uri}/{REPORT_FILE} can't be read: {'.'.join(map(str, fault['loc']))}: {fault['msg']}; was it written by another release?"
        ) from error


def read_rows(store: ObjectStore, ref: WeightsRef | None, limit: int | None = None) -> bytes | None:
    """The packed rows next to the report, a safetensors file; None where none were kept (`worker.report_rows`).

    Args:
        store: Where reports are.
        ref: `StepRecord.report`.
        limit: Bytes that are read at most; None: all there are.

    Raises:
        RowsTooLargeError: the file is beyond the limit.
        NoReportError, DigestMismatchError, StoreUnavailableError: as `read_report`.
    """
    if ref is None:
        raise NoReportError("no report was kept: the ledger names none for this step")
    return _file(store, ref, ROWS_FILE, limit)


def _file(store: ObjectStore, ref: WeightsRef, name: str, limit: int | None = None) -> bytes | None:
    try:
        manifest = read_manifest(store, ref.uri, ref.digest)
        if manifest.kind != "report":
            raise NoReportError(f"{ref.uri} holds {manifest.kind}, not a report")
        file = next((file for file in manifest.files if file.path == name), None)
        if file is not None and limit is not None and file.size > limit:
            raise RowsTooLargeError(f"{ref.uri}/{name} has {file.size} bytes, of which at most {limit} are read")
        return None if file is None else store.get_bytes(f"{store.resolve(ref.uri)}/{name}", sha256=file.sha256)
    except ObjectNotFoundError as error:
        raise NoReportError(f"the report at {ref.uri} is gone: it was deleted from the object store ({error})") from error


LAYOUT = "headrace.rows.v1"

Arrays = dict[str, npt.NDArray[Any]]


class RowsUnreadableError(HeadraceError):
    """The file of rows can't be read; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """What the file holds."""

    arrays: Arrays
    laid_out: bool
    """Whether the arrays are those that we know."""
    rows: int
    """How many the step had; 0 in another layout."""
    groups: tuple[str, ...]
    """Ids that `sequence_groups` counts in."""

    def trained(self, sequence: int) -> npt.NDArray[np.int64]:
        """Places of a sequence's trained tokens."""
        first, last = self.arrays["sequence_tokens"][sequence : sequence + 2]
        places: npt.NDArray[np.int64] = np.flatnonzero(self.arrays["trainable"][first:last]) + first
        return places


def open_rows(body: bytes) -> PackedRows:
    """Read the file.

    Raises:
        RowsUnreadableError: safetensors is not installed, or the bytes are none.
    """
    try:
        from safetensors import SafetensorError  # noqa: PLC0415  (part of an extra)
        from safetensors.numpy import load  # noqa: PLC0415
    except ImportError as error:
        raise RowsUnreadableError(
            f"reading rows needs the package safetensors, which is not installed. {install_advice('gateway')}"
        ) from error
    try:
        arrays: Arrays = load(body)
    except SafetensorError as error:
        raise RowsUnreadableError(f"the rows are no safetensors file: {error}") from error
    # The loader keeps the metadata to itself; it stands in the header, whose length is in the first 8 bytes.
    metadata: dict[str, str] = orjson.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    if metadata.get("layout") != LAYOUT:
        return PackedRows(arrays=arrays, laid_out=False, rows=0, groups=())
    return PackedRows(arrays=arrays, laid_out=True, rows=int(metadata["rows"]), groups=tuple(orjson.loads(metadata["groups"])))
