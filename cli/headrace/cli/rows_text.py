"""Packed rows of a step as text: which arrays were kept, and how each begins."""

from rich.console import Console
from rich.table import Table

from headrace.core.errors import HeadraceError


class RowsUnreadableError(HeadraceError):
    """The file of rows can't be shown; says why."""


def print_rows(console: Console, body: bytes | None) -> None:
    """Print what a `rows.safetensors` holds; None: nothing was kept.

    Raises:
        RowsUnreadableError: safetensors is not installed, or the bytes are none.
    """
    if body is None:
        console.print("no rows were kept: set worker.report_rows to sample or all")
        return
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.numpy import load  # noqa: PLC0415
    except ImportError as error:
        raise RowsUnreadableError("showing rows needs the package safetensors: install headrace[trainer]") from error
    try:
        arrays = load(body)
    except SafetensorError as error:
        raise RowsUnreadableError(f"the rows are no safetensors file: {error}") from error
    table = Table("array", "type", "shape", "begins with", box=None, header_style="bold")
    for name, array in sorted(arrays.items()):
        table.add_row(name, str(array.dtype), str(list(array.shape)), " ".join(f"{value:.4g}" for value in array.reshape(-1)[:12]))
    console.print(table)
