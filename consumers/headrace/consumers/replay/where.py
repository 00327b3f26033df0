"""The expressions of `headrace replay groups --where`: comparisons over a trajectory and its group, joined by `and`, `or` and `not`.

    reward < 0
    metadata.task == 'sums' and not (final_policy_version < 10)

A group fits if the expression holds for one of its trajectories. Guarantees: the text is parsed with Python's grammar and never run. What
is not allowed here is rejected before anything is read, with what is possible; so is the comparison of a number with a text. A missing
value (no version, no such metadata) is `null`: equal to `null` only, and neither less nor greater than anything. Limitations: there is no
arithmetic, no function and no pattern of a text.
"""

import ast
import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.schemas.chat import Choice
from headrace.schemas.codec import SampledGroup

MAX_CHARACTERS = 2000
NUMBERS = (
    "reward",
    "tokens",
    "initial_policy_version",
    "final_policy_version",
    "max_reward",
    "min_reward",
    "mean_reward",
    "trajectories",
    "exceptions",
)
TEXTS = ("group_id", "job_id")
FOLDERS = ("metadata", "metrics")

Value = str | int | float | bool | None
Row = Mapping[str, Any]
"""The values of the names at one trajectory; a folder's value is a mapping."""

_CONSTANTS: dict[str, Value] = {"true": True, "false": False, "null": None}
_KINDS: dict[type, str] = {int: "number", float: "number", str: "text", bool: "any", type(None): "null"}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARE = {**_ORDER, ast.Eq: operator.eq, ast.NotEq: operator.ne}
_NAMES = f"{', '.join((*NUMBERS, *TEXTS))}, metadata.NAME and metrics.NAME"


class WhereError(HeadraceError):
    """An expression that can't be used; says which part and what is possible."""


@dataclass(frozen=True, slots=True)
class Where:
    """An expression that was read and found good. Example: `Where.parse("reward < 0").fits(group)`."""

    _holds: Callable[[Row], bool]

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Read an expression.

        Raises:
            WhereError: it is too long, no expression, or holds what is not allowed.
        """
        if len(text) > MAX_CHARACTERS:
            raise WhereError(f"--where has {len(text)} characters, at most {MAX_CHARACTERS} are read")
        try:
            root = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = getattr(error, "msg", None) or error
            raise WhereError(f"--where {text[:80]!r} is no expression ({why}): write as in reward < 0") from None
        return cls(_condition(root))

    def fits(self, sampled: SampledGroup) -> bool:
        """Whether the expression holds for one of the trajectories."""
        return any(map(self._holds, _rows(sampled)))


def _condition(node: ast.expr) -> Callable[[Row], bool]:
    """The function of a condition; rejects every other node."""
    match node:
        case ast.BoolOp(op=op, values=values):
            parts, join = [_condition(value) for value in values], all if isinstance(op, ast.And) else any
            return lambda row: join(part(row) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _condition(operand)
            return lambda row: not inner(row)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [left, *comparators]
            pairs = [_comparison(node, op, sides[i], sides[i + 1]) for i, op in enumerate(ops)]
            return lambda row: all(pair(row) for pair in pairs)
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Constant():
            _operand(node)
            example = f"{_shown(node)} > 0 or metadata.solved == true"
            raise WhereError(f"--where: {_shown(node)!r} alone is no condition: compare it, as in {example}")
    possible = f"comparisons of {_NAMES} with numbers and texts, joined by and, or, not"
    raise WhereError(f"--where: {_shown(node)!r} can't be used: possible are {possible}")


def _comparison(whole: ast.expr, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Callable[[Row], bool]:
    (kind, value), (other_kind, other) = _operand(left), _operand(right)
    if (compare := _COMPARE.get(type(op))) is None:
        raise WhereError(f"--where: {_shown(whole)!r} compares with {type(op).__name__}; possible are < <= > >= == !=")
    ordered = type(op) in _ORDER
    if {kind, other_kind} == {"number", "text"} or (ordered and "null" in {kind, other_kind}):
        raise WhereError(f"--where: {_shown(left)} is a {kind} and {_shown(right)} a {other_kind}: they can't be compared that way")

    def holds(row: Row) -> bool:
        a, b = value(row), other(row)
        # A missing value, and a metadata value of another kind, is neither less nor greater.
        return (not ordered or _can_be_ordered(a, b)) and compare(a, b)

    return holds


def _can_be_ordered(a: Value, b: Value) -> bool:
    return any(isinstance(a, kind) and isinstance(b, kind) for kind in (str, int | float))


def _operand(node: ast.expr) -> tuple[str, Callable[[Row], Value]]:
    """The kind of a name or a constant (`number`, `text`, `null`; `any` of what only the log knows), and the function that reads it."""
    match node:
        case ast.Name(id=name) if name in NUMBERS or name in TEXTS:
            return "number" if name in NUMBERS else "text", operator.itemgetter(name)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _KINDS[type(_CONSTANTS[name])], lambda _row: _CONSTANTS[name]
        case ast.Constant(value=str() | int() | float() | None as constant):
            return _KINDS[type(constant)], lambda _row: constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as constant)):
            return "number", lambda _row: -constant
        case (
            ast.Attribute(value=ast.Name(id=folder), attr=name)
            | ast.Subscript(value=ast.Name(id=folder), slice=ast.Constant(value=str(name)))
        ) if folder in FOLDERS:
            return "any", lambda row: _plain(row[folder].get(name))
        case ast.Name(id=name) if name in FOLDERS:
            raise WhereError(f"--where: {name} holds many values: name one, as in {name}.task or {name}['my task']")
        case ast.Name() | ast.Attribute():
            raise WhereError(f"--where: there is no {_shown(node)!r}; there are {_NAMES}. Texts stand in quotes")
    raise WhereError(f"--where: {_shown(node)!r} can't be compared; what can are {_NAMES}, numbers and texts")


def _plain(value: object) -> Value:
    return value if isinstance(value, str | int | float | bool) else None


def _rows(sampled: SampledGroup) -> Iterator[Row]:
    group = sampled.group
    rewards = [trajectory.reward for trajectory in group.trajectories]
    if not rewards:
        return
    of_group = {
        "group_id": group.group_id,
        "job_id": group.job_id,
        "trajectories": len(rewards),
        "exceptions": len(group.exceptions),
        "max_reward": max(rewards),
        "min_reward": min(rewards),
        "mean_reward": sum(rewards) / len(rewards),
    }
    turns = iter(sampled.turns)  # in the order of the choices
    for trajectory in group.trajectories:
        choices = [item for items, _tools in trajectory.histories() for item in items if isinstance(item, Choice)]
        yield {
            **of_group,
            "reward": trajectory.reward,
            "tokens": sum(len(next(turns) or ()) for _ in choices),  # a turn that has text only has none
            "initial_policy_version": trajectory.initial_policy_version,
            "final_policy_version": trajectory.final_policy_version,
            "metadata": ChainMap(trajectory.metadata, group.metadata),
            "metrics": ChainMap(trajectory.metrics, group.metrics),
        }


def _shown(node: ast.expr) -> str:
    return ast.unparse(node)[:80]
