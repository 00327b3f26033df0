"""`make lint`: rejects words of `words.txt` in docstrings, comments and strings of the product, and in the documentation.

Exit code 1 with one line for each hit: where it is and what to write instead.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("schemas", "core", "producers", "trainer", "consumers", "engine", "gateway", "cli", "demo", "examples", "benchmarks")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")


def advice() -> dict[str, str]:
    """What to write instead, by word."""
    lines = Path(__file__).with_name("words.txt").read_text().splitlines()
    pairs = (line.split(" = ", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)  # type: ignore[arg-type]  # pairs of two


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Prose of a file with the number of its first line: all of a page, comments and strings of a program."""
    if path.suffix == ".md":
        yield 1, path.read_text()
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING} or tokenize.tok_name[token.type].startswith("FSTRING"):
            # Up to Python 3.11 an f-string is one token: its expressions are code.
            is_formatted = token.string.lstrip("rRbB")[:1] in {"f", "F"}
            yield token.start[0], re.sub(r"\{[^{}\n]*\}", "{}", token.string) if is_formatted else token.string


def hits() -> list[str]:
    """A line for each word that is not to be used."""
    instead = advice()
    pattern = re.compile(r"\b(" + "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in instead) + r")\b")
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    files += [path for page in PAGES for path in sorted(ROOT.glob(page)) if "reference" not in path.parts]
    found = []
    for path in files:
        for first, text in texts(path):
            for match in pattern.finditer(text):
                word = " ".join(match[0].split())
                line = first + text.count("\n", 0, match.start())
                found.append(f"{path.relative_to(ROOT)}:{line}: {word!r}: write {instead[word]!r}")
    return found


if __name__ == "__main__":
    lines = hits()
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(1 if lines else 0)
