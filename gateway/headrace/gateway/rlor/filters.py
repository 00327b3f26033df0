"""Filter expressions after AIP-160, over JSON objects. Pure.

    state = "JOB_STATE_RUNNING" AND (training_config.lora_rank >= 8 OR keep_alive = true) AND NOT display_name = "old *"

An expression is comparisons `field op value` with = != < > <= >=, joined by AND, OR, NOT (or `-`) and parentheses. As in AIP-160, OR binds
tighter than AND: `a AND b OR c` is `a AND (b OR c)`. Values are numbers, true, false, quoted texts (`"…"`, `'…'`, with backslashes) or bare
words. A `*` at either end of a text matches anything with = and !=. Times compare as times, durations as seconds, everything else as text.

Guarantees: an invalid expression is rejected with the position of the fault. Length, nesting and the number of comparisons are bounded. A
field that is not set matches != only.
Limitations: no words without a field, functions or `:`, and no comparison of lists.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.gateway.rlor.field_paths import Path, UnknownFieldError, value_at

Resource = Mapping[str, Any]
Predicate = Callable[[Resource], bool]
Resolve = Callable[[str], Path]

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<op><=|>=|!=|=|<|>)
  | (?P<paren>[()])
  | (?P<minus>-(?=[\s(A-Za-z_]))
  | (?P<word>[^\s()<>=!"']+)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"^[+-]?\d+(\.\d+)?([eE][+-]?\d+)?$")
_SECONDS = re.compile(r"^(\d+(?:\.\d+)?)s$")
_LONGEST = 4096
_DEEPEST = 50
_MOST_COMPARISONS = 100
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
    "<": lambda a, b: bool(a < b),
    ">": lambda a, b: bool(a > b),
    "<=": lambda a, b: bool(a <= b),
    ">=": lambda a, b: bool(a >= b),
}


class FilterError(ValueError):
    """A filter that is not understood; says where."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


def parse_filter(expression: str, resolve: Resolve) -> Predicate:
    """What an expression asks of a resource; an empty one asks nothing.

    Args:
        expression: The filter.
        resolve: From a field's name to its path; raises `UnknownFieldError`.

    Raises:
        FilterError: it is not understood.
    """
    if len(expression) > _LONGEST:
        raise FilterError(f"it has {len(expression)} characters, {_LONGEST} at most are read")
    tokens = _tokens(expression)
    if not tokens:
        return lambda _resource: True
    parser = _Parser(tokens, len(expression), resolve)
    found = parser.all_of(0)
    if (left := parser.peek()) is not None:
        raise FilterError(f"position {left.at + 1}: {left.text[:40]!r} is too much: join comparisons with AND or OR")
    return found


class _Parser:
    def __init__(self, tokens: list[_Token], end: int, resolve: Resolve) -> None:
        self._tokens = tokens
        self._end = end
        self._resolve = resolve
        self._next = 0
        self._comparisons = 0

    def peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def all_of(self, depth: int) -> Predicate:
        parts = [self._any_of(depth)]
        while self._take("word", "AND"):
            parts.append(self._any_of(depth))
        return parts[0] if len(parts) == 1 else lambda resource: all(part(resource) for part in parts)

    def _any_of(self, depth: int) -> Predicate:
        parts = [self._term(depth)]
        while self._take("word", "OR"):
            parts.append(self._term(depth))
        return parts[0] if len(parts) == 1 else lambda resource: any(part(resource) for part in parts)

    def _term(self, depth: int) -> Predicate:
        if depth > _DEEPEST:
            raise FilterError(f"it is nested deeper than {_DEEPEST}")
        if self._take("word", "NOT") or self._take("minus", "-"):
            inner = self._term(depth + 1)
            return lambda resource: not inner(resource)
        if self._take("paren", "("):
            found = self.all_of(depth + 1)
            if not self._take("paren", ")"):
                raise self._unexpected("a closing parenthesis")
            return found
        return self._comparison()

    def _comparison(self) -> Predicate:
        field = self._need("word", "a field's name")
        try:
            path = self._resolve(field.text)
        except UnknownFieldError as error:
            raise FilterError(f"position {field.at + 1}: {error}") from None
        self._comparisons += 1
        if self._comparisons > _MOST_COMPARISONS:
            raise FilterError(f"position {field.at + 1}: it has more than {_MOST_COMPARISONS} comparisons")
        operator = self._need("op", f"a comparison (= != < > <= >=) after {field.text[:40]!r}")
        token = self.peek()
        if token is None or token.kind not in {"word", "text"} or token.text in {"AND", "OR", "NOT"}:
            raise self._unexpected(f"a value after {operator.text!r}")
        self._next += 1
        return _compare(path, operator.text, _text_of(token) if token.kind == "text" else token.text)

    def _need(self, kind: str, what: str) -> _Token:
        token = self.peek()
        if token is None or token.kind != kind or token.text in {"AND", "OR", "NOT"}:
            raise self._unexpected(what)
        self._next += 1
        return token

    def _take(self, kind: str, text: str) -> bool:
        token = self.peek()
        if token is None or (token.kind, token.text) != (kind, text):
            return False
        self._next += 1
        return True

    def _unexpected(self, needed: str) -> FilterError:
        token = self.peek()
        found = "the end" if token is None else f"{token.text[:40]!r}"
        return FilterError(f"position {(self._end if token is None else token.at) + 1}: {needed} is needed, not {found}")


def _tokens(expression: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while expression[at:].strip():
        match = _TOKEN.match(expression, at)
        if match is None:
            place = at + len(expression[at:]) - len(expression[at:].lstrip())
            raise FilterError(f"position {place + 1}: {expression[place : place + 20]!r} can't be read: is a quote not closed?")
        kind = str(match.lastgroup)
        found.append(_Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return found


def _text_of(token: _Token) -> str:
    return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)


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
        return compare(*_alike(value, wanted))

    return holds


def _alike(value: Any, wanted: str) -> tuple[Any, Any]:  # noqa: ANN401 - any JSON value
    """Both as what compares: numbers, truth values, times, seconds or texts."""
    if isinstance(value, bool):
        return str(value).lower(), wanted.lower()
    text = str(value)
    if _NUMBER.match(wanted) and _NUMBER.match(text):
        return float(text), float(wanted)
    if (a := _SECONDS.match(text)) and (b := _SECONDS.match(wanted)):
        return float(a[1]), float(b[1])
    if (then := _time(text)) and (when := _time(wanted)):
        return then, when
    return text, wanted


def _time(text: str) -> datetime | None:
    if not re.match(r"^\d{4}-\d{2}-\d{2}T", text):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None
