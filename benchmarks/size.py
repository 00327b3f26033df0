"""`make size`: how much code the product is, by part, and its heart.

Lines are all lines of a file; code leaves out docstrings, comments and blank lines.
The product is everything but tests, docs and benchmarks.
"""

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PARTS = ("schemas", "core", "producers", "trainer", "consumers", "engine", "gateway", "cli", "demo")
HEART = (
    *sorted((ROOT / "consumers/headrace/consumers/worker").glob("*.py")),
    *(ROOT / "trainer/headrace/trainer" / name for name in ("packing.py", "bins.py", "loss.py")),
)
"""Lanes, state, selection, step, recovery; packing, loss."""


def lines_of_code(source: str) -> int:
    """Lines that are neither docstring nor comment nor blank."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def main() -> None:
    """Print the table."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    heart = 0
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            source = path.read_text()
            lines, code = source.count("\n"), lines_of_code(source)
            for name in (part, "all"):
                found = counts[name]
                counts[name] = [found[0] + 1, found[1] + lines, found[2] + code, max(found[3], lines)]
            heart += code if path in HEART else 0
    table = Table("part", "files", "lines", "code", "longest file", box=None, header_style="bold")
    for name, found in counts.items():
        table.add_row(name, *map(str, found), style="bold" if name == "all" else None)
    console = Console()
    console.print(table)
    console.print(f"heart (lanes, state, selection, step, recovery, packing, loss): {heart} lines of code")


if __name__ == "__main__":
    main()
