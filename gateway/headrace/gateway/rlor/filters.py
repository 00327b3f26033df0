"""Paths to fields of a resource, `readMask`, which selects fields by their paths, and `filter` after AIP-160. Pure.

    state = "JOB_STATE_RUNNING" AND (training_config.lora_rank >= 8 OR keep_alive = true) AND NOT display_name = "old *"

A filter is comparisons `field op value` with = != < > <= >=, joined by AND, OR, NOT (or `-`) and parentheses. As in AIP-160, OR binds
tighter than AND: `a AND b OR c` is `a AND (b OR c)`. Values are numbers, true, false, quoted texts (`"…"`, `'…'`, with backslashes) or bare
words. A `*` at either end of a text matches anything with = and !=. Times compare as times, durations as seconds, everything else as text.

Guarantees: an unknown path is rejected with the names that exist, an invalid filter with the position of the fault. Length, nesting and the
number of comparisons are bounded. A field that is not set matches != only. A masked resource has exactly the named fields that are set.
Limitations: paths do not reach into lists. A filter has no words without a field, no functions, no `:` and no comparison of lists.
"""

import re
import typing
from collections.abc import Callable, Mapping
from datetime import datetime
from operator import eq, ge, gt, le, lt, ne
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.resources import Wire

MAX_FIELDS = 100
"""Fields of one mask."""
Path = tuple[str, ...]
Mask = Callable[[Mapping[str, Any]], Mapping[str, Any]]
ReadMask = Annotated[str, Query(alias="readMask")]
"""The parameter of a route: paths, separated by commas. `""` and `*` are all fields."""


def field_path(model: type[BaseModel], text: str, parameter: str) -> Path:
    """The path as the JSON has it, in camelCase, from snake_case or camelCase. `parameter` is the place of the text, for the message.

    Raises ProblemError (400: no such field; the message has the fields that exist).
    """
    found: list[str] = []
    at: object = model
    for part in text.strip().split("."):
        if isinstance(at, type) and issubclass(at, BaseModel):
            names = {to_camel(name): name for name in at.model_fields}
            name = to_camel(part) if "_" in part else part
            if name not in names:
                where = ".".join(found) or "the resource"
                problem = f"{where} has no field {part[:60]!r}; there are {', '.join(sorted(names))}"
                raise ProblemError(400, f"{parameter}: {text[:100]!r}: {problem}")
            at = _container_type(at.model_fields[names[name]].annotation)
            found.append(name)
        elif at is Mapping and part:
            found.append(part)
            at = None
        else:
            raise ProblemError(400, f"{parameter}: {text[:100]!r}: {'.'.join(found)} has no fields")
    return tuple(found)


def value_at(resource: Mapping[str, Any], path: Path) -> Any:  # noqa: ANN401 - any JSON
    """The value at a path; None if it is not set."""
    at: Any = resource
    for part in path:
        if not isinstance(at, Mapping) or part not in at:
            return None
        at = at[part]
    return at


def to_json(resource: Wire) -> dict[str, Any]:
    """A resource as the API shows it: without fields that are not set."""
    return resource.model_dump(mode="json", by_alias=True, exclude_none=True)


def resource_response(resource: Wire, read_mask: str = "") -> JSONResponse:
    """A resource as the answer of a route. Raises as `parse_mask`."""
    return JSONResponse(parse_mask(read_mask, type(resource))(to_json(resource)))


def parse_mask(read_mask: str, kind: type[BaseModel]) -> Mask:
    """A function that keeps the fields of a `kind` that a mask names. Raises ProblemError (400: an unknown field, or too many fields)."""
    texts = [part for part in read_mask.split(",") if part.strip()]
    if len(texts) > MAX_FIELDS:
        raise ProblemError(400, f"readMask: {len(texts)} fields, {MAX_FIELDS} at most are possible")
    if not texts or any(text.strip() == "*" for text in texts):
        return lambda resource: resource
    paths = [field_path(kind, text, "readMask") for text in texts]

    def mask(resource: Mapping[str, Any]) -> Mapping[str, Any]:
        masked: dict[str, Any] = {}
        for path in paths:
            if (value := value_at(resource, path)) is not None:
                _set_at(masked, path, value)
        return masked

    return mask


def _set_at(target: dict[str, Any], path: Path, value: object) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        target[part] = target = dict(inner) if isinstance(inner, Mapping) else inner
    target[path[-1]] = value


def _container_type(annotation: object) -> object:
    """The model or mapping inside `Model | None` or `dict[str, …]`; None for a plain value."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and not typing.get_args(kind) and issubclass(kind, BaseModel):
            return kind
        if typing.get_origin(kind) is dict:
            return Mapping
    return None


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
