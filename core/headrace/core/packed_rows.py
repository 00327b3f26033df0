"""The file of packed rows next to a step's report, opened: `rows.safetensors`, laid out as `headrace.trainer.rows_out` says.

Guarantees: a file of another layout is told apart (`laid_out`), never misread. Limitations: reading a part of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.core.errors import HeadraceError

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
        raise RowsUnreadableError("reading rows needs the package safetensors: install headrace[gateway] or headrace[trainer]") from error
    try:
        arrays: Arrays = load(body)
    except SafetensorError as error:
        raise RowsUnreadableError(f"the rows are no safetensors file: {error}") from error
    # The loader keeps the metadata to itself; it stands in the header, whose length is in the first 8 bytes.
    metadata: dict[str, str] = orjson.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    if metadata.get("layout") != LAYOUT:
        return PackedRows(arrays=arrays, laid_out=False, rows=0, groups=())
    return PackedRows(arrays=arrays, laid_out=True, rows=int(metadata["rows"]), groups=tuple(orjson.loads(metadata["groups"])))
