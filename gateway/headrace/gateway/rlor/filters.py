"""Filter expressions after AIP-160, over JSON objects. Pure.

    state = "JOB_STATE_RUNNING" AND (training_config.lora_rank >= 8 OR keep_alive = true) AND NOT display_name = "old *"

An expression is comparisons `field op value` with = != < > <= >=, joined by AND, OR, NOT (or `-`) and parentheses. As in AIP-160, OR binds
tighter than AND: `a AND b OR c` is `a AND (b OR c)`. Values are numbers, true, false, quoted texts (`"…"`, `'…'`, with backslashes) or bare
words. A `*` at either end of a text matches anything with = and !=. Times compare as times, durations as seconds, everything else as text.

Guarantees: an invalid expression is rejected with the position of the fault. Length, nesting and the number of comparisons are bounded. A
field that is not set matches != only. Limitations: no words without a field, functions or `:`, and no comparison of lists.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from pydantic import BaseModel

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.field_paths import Path, field_path, value_at

Resource = Mapping[str, Any]
Predicate = Callable[[Resource], bool]

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<op><=|>=|!=|=|<|>)
  | (?P<paren>[()])
  | (?P<minus>-(?=[\s(A-Za-z_]))
  | (?P<word>[^\s()<>=!"']+)
  | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"^[+-]?\d+(\.\d+)?([eE][+-]?\d+)?$")
_SECONDS = re.compile(r"^(\d+(?:\.\d+)?)s$")
_MAX_CHARACTERS = 4096
_MAX_DEPTH = 50
_MAX_COMPARISONS = 100
_KEYWORDS = {"AND", "OR", "NOT"}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"=": eq, "!=": ne, "<": lt, ">": gt, "<=": le, ">=": ge}


def parse_filter(expression: str, kind: type[BaseModel]) -> Predicate:
    """The predicate of an expression over resources of a kind; an empty one is always true. Raises ProblemError (400)."""
    if len(expression) > _MAX_CHARACTERS:
        raise ProblemError(400, f"filter: it has {len(expression)} characters, {_MAX_CHARACTERS} at most are read")
    parser = _Parser(expression, kind)
    if parser.kind == "end":
        return lambda _resource: True
    found = parser.all_of(0)
    if parser.kind != "end":
        raise ProblemError(400, f"filter: position {parser.position}: {parser.text[:40]!r} is too much: join comparisons with AND or OR")
    return found


class _Parser:
    """Recursive descent over the tokens. `kind`, `text` and `position` (from 1) are of the current token."""

    def __init__(self, expression: str, kind: type[BaseModel]) -> None:
        self._expression = expression
        self._kind = kind
        self._next = 0
        self._comparisons = 0
        self._advance()

    def all_of(self, depth: int) -> Predicate:
        parts = [self._any_of(depth)]
        while self._take("AND"):
            parts.append(self._any_of(depth))
        return parts[0] if len(parts) == 1 else lambda resource: all(part(resource) for part in parts)

    def _any_of(self, depth: int) -> Predicate:
        parts = [self._term(depth)]
        while self._take("OR"):
            parts.append(self._term(depth))
        return parts[0] if len(parts) == 1 else lambda resource: any(part(resource) for part in parts)

    def _term(self, depth: int) -> Predicate:
        if depth > _MAX_DEPTH:
            raise ProblemError(400, f"filter: it is nested deeper than {_MAX_DEPTH}")
        if self._take("NOT") or (self.kind == "minus" and self._take("-")):
            inner = self._term(depth + 1)
            return lambda resource: not inner(resource)
        if self._take("("):
            found = self.all_of(depth + 1)
            if not self._take(")"):
                raise self._unexpected("a closing parenthesis")
            return found
        return self._comparison()

    def _comparison(self) -> Predicate:
        position, field = self.position, self._need("word", what="a field's name")
        path = field_path(self._kind, field, f"filter: position {position}")
        self._comparisons += 1
        if self._comparisons > _MAX_COMPARISONS:
            raise ProblemError(400, f"filter: position {position}: it has more than {_MAX_COMPARISONS} comparisons")
        operator = self._need("op", what=f"a comparison (= != < > <= >=) after {field[:40]!r}")
        is_quoted = self.kind == "text"
        value = self._need("word", "text", what=f"a value after {operator!r}")
        return _compare(path, operator, re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL) if is_quoted else value)

    def _advance(self) -> None:
        match = _TOKEN.match(self._expression, self._next)
        if match is None:
            rest = self._expression[self._next :].lstrip()
            position = len(self._expression) - len(rest) + 1
            raise ProblemError(400, f"filter: position {position}: {rest[:20]!r} can't be read: is a quote not closed?")
        self.kind = str(match.lastgroup)
        self.text = match[self.kind]
        self.position = match.start(self.kind) + 1
        self._next = match.end()

    def _take(self, text: str) -> bool:
        if self.kind == "text" or self.text != text:
            return False
        self._advance()
        return True

    def _need(self, *kinds: str, what: str) -> str:
        text = self.text
        if self.kind not in kinds or text in _KEYWORDS:
            raise self._unexpected(what)
        self._advance()
        return text

    def _unexpected(self, needed: str) -> ProblemError:
        found = "the end" if self.kind == "end" else f"{self.text[:40]!r}"
        return ProblemError(400, f"filter: position {self.position}: {needed} is needed, not {found}")


def _compare(path: Path, operator: str, wanted: str) -> Predicate:
    compare = _OPERATORS[operator]
    begins, ends = wanted.startswith("*"), wanted.endswith("*")
    has_pattern = operator in {"=", "!="} and len(wanted) > 1 and (begins or ends)
    part = wanted.removeprefix("*").removesuffix("*")

    def holds(resource: Resource) -> bool:
        value = value_at(resource, path)
        if value is None or isinstance(value, Mapping | list):
            return operator == "!="
        if has_pattern and isinstance(value, str):
            fits = part in value if begins and ends else value.endswith(part) if begins else value.startswith(part)
            return fits == (operator == "=")
        return bool(compare(*_comparable(value, wanted)))

    return holds


def _comparable(value: Any, wanted: str) -> tuple[Any, Any]:  # noqa: ANN401 - any JSON value
    """Both as numbers, truth values, times, seconds or texts."""
    if isinstance(value, bool):
        return str(value).lower(), wanted.lower()
    text = str(value)
    if _NUMBER.match(wanted) and _NUMBER.match(text):
        return float(text), float(wanted)
    if (a := _SECONDS.match(text)) and (b := _SECONDS.match(wanted)):
        return float(a[1]), float(b[1])
    if (then := _parse_time(text)) and (when := _parse_time(wanted)):
        return then, when
    return text, wanted


def _parse_time(text: str) -> datetime | None:
    if not re.match(r"^\d{4}-\d{2}-\d{2}T", text):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None
