"""The small language of `headrace replay groups --where`: comparisons over a trajectory and its group, joined by `and`, `or` and `not`.

    reward < 0
    max_reward == min_reward and tokens > 500
    metadata.task == 'sums' and not (final_policy_version < 10)

A group fits if the expression holds for one of its trajectories; names of the group are the same for each of them. Guarantees: the text is
parsed as Python's grammar and only what stands in the whitelist below is walked, nothing is ever run; a name or a construct that is not
there is refused with what is possible, and so is the comparison of a number with a text. A value that is missing (no version, no such
metadata) is `null`: equal to `null` only, and neither less nor greater than anything. Limitations: arithmetic, functions, texts by pattern.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.schemas.chat import Choice
from headrace.schemas.codec import SampledGroup

MAX_CHARACTERS = 2000

Value = str | int | float | bool | None

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
_CONSTANTS: dict[str, Value] = {"true": True, "false": False, "null": None}
_KINDS = {
    **dict.fromkeys(NUMBERS, "number"),
    **dict.fromkeys(TEXTS, "text"),
    **dict.fromkeys(("true", "false"), "any"),
    "null": "null",
}
_CONSTANT_KINDS: dict[type, str] = {int: "number", float: "number", str: "text", bool: "any", type(None): "null"}
_NAMES = f"{', '.join((*NUMBERS, *TEXTS))}, metadata.NAME and metrics.NAME"

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class WhereError(HeadraceError):
    """An expression that can't be used; says which part and what is possible."""


@dataclass(frozen=True, slots=True)
class Where:
    """An expression that was read and found good. Example: `Where.parse("reward < 0").fits(group)`."""

    _root: ast.expr

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Read an expression.

        Raises:
            WhereError: it is too long, no expression, or holds what is not in the whitelist.
        """
        if len(text) > MAX_CHARACTERS:
            raise WhereError(f"--where has {len(text)} characters, at most {MAX_CHARACTERS} are read")
        try:
            root = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = getattr(error, "msg", None) or error
            raise WhereError(f"--where {text[:80]!r} is no expression ({why}): write as in reward < 0") from None
        _check(root)
        return cls(root)

    def fits(self, sampled: SampledGroup, group_id: str | None = None) -> bool:
        """Whether the expression holds for one of the trajectories.

        Args:
            sampled: The group.
            group_id: What the group is called, where it does not say so itself.
        """
        return any(_holds(self._root, row) for row in _rows(sampled, group_id))


def _check(node: ast.expr) -> None:
    """Refuse whatever `_holds` does not know."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check(operand)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [left, *comparators]
            kinds = [_kind(operand) for operand in operands]
            for i, op in enumerate(ops):
                if type(op) not in _COMPARE:
                    raise WhereError(f"--where: {_shown(node)!r} compares with {type(op).__name__}; possible are < <= > >= == !=")
                _check_pair(op, (operands[i], operands[i + 1]), (kinds[i], kinds[i + 1]))
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Constant():
            _kind(node)
            example = f"{_shown(node)} > 0 or metadata.solved == true"
            raise WhereError(f"--where: {_shown(node)!r} alone is no condition: compare it, as in {example}")
        case _:
            possible = f"comparisons of {_NAMES} with numbers and texts, joined by and, or, not"
            raise WhereError(f"--where: {_shown(node)!r} can't be used: possible are {possible}")


def _check_pair(op: ast.cmpop, operands: tuple[ast.expr, ast.expr], kinds: tuple[str, str]) -> None:
    wrong = kinds in {("number", "text"), ("text", "number")} or ("null" in kinds and isinstance(op, _ORDERED))
    if wrong:
        left, right = map(_shown, operands)
        raise WhereError(f"--where: {left} is a {kinds[0]} and {right} a {kinds[1]}: they can't be compared that way")


def _kind(node: ast.expr) -> str:
    """`number`, `text`, `null`, or `any` of what only the log knows."""
    match node:
        case ast.Name(id=name) if name in _KINDS:
            return _KINDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return "number"
        case ast.Constant(value=value) if type(value) in _CONSTANT_KINDS:
            return _CONSTANT_KINDS[type(value)]
        case _ if _inside(node) is not None:
            return "any"
        case ast.Name(id=name) if name in FOLDERS:
            raise WhereError(f"--where: {name} holds many values: name one, as in {name}.task or {name}['my task']")
        case ast.Name() | ast.Attribute():
            raise WhereError(f"--where: there is no {_shown(node)!r}; there are {_NAMES}. Texts stand in quotes")
        case _:
            raise WhereError(f"--where: {_shown(node)!r} can't be compared; what can are {_NAMES}, numbers and texts")


def _inside(node: ast.expr) -> tuple[str, str] | None:
    """(folder, name) of `metadata.name` or `metadata["name"]`."""
    match node:
        case ast.Attribute(value=ast.Name(id=folder), attr=name) if folder in FOLDERS:
            return folder, name
        case ast.Subscript(value=ast.Name(id=folder), slice=ast.Constant(value=str(name))) if folder in FOLDERS:
            return folder, name
    return None


def _holds(node: ast.expr, row: "_Row") -> bool:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_holds(value, row) for value in values)
        case ast.BoolOp(values=values):
            return any(_holds(value, row) for value in values)
        case ast.UnaryOp(operand=operand):
            return not _holds(operand, row)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            said = [_value(operand, row) for operand in (left, *comparators)]
            return all(_compared(op, said[i], said[i + 1]) for i, op in enumerate(ops))
    raise AssertionError(f"{type(node).__name__} passed the check")


def _compared(op: ast.cmpop, left: Value, right: Value) -> bool:
    if isinstance(op, _ORDERED) and not (_both(str, left, right) or _both((int, float), left, right)):
        return False  # missing, or a metadata value of another kind
    return _COMPARE[type(op)](left, right)


def _both(kind: type | tuple[type, ...], left: Value, right: Value) -> bool:
    return isinstance(left, kind) and isinstance(right, kind)


def _value(node: ast.expr, row: "_Row") -> Value:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name):
            return _CONSTANTS[name] if name in _CONSTANTS else row.fields[name]
    if (place := _inside(node)) is not None:
        return row.inside(*place)
    raise AssertionError(f"{type(node).__name__} passed the check")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What the names stand for, at one trajectory."""

    fields: Mapping[str, Value]
    folders: Mapping[str, tuple[Mapping[str, Any], ...]]

    def inside(self, folder: str, name: str) -> Value:
        """The trajectory's value, or the group's where the trajectory has none."""
        found = next((values[name] for values in self.folders[folder] if name in values), None)
        return found if isinstance(found, str | int | float | bool) else None


def _rows(sampled: SampledGroup, group_id: str | None) -> Iterator[_Row]:
    group = sampled.group
    rewards = [trajectory.reward for trajectory in group.trajectories]
    tokens = _tokens(sampled)
    of_group: dict[str, Value] = {
        "group_id": group.group_id or group_id,
        "job_id": group.job_id,
        "trajectories": len(rewards),
        "exceptions": len(group.exceptions),
        "max_reward": max(rewards, default=None),
        "min_reward": min(rewards, default=None),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
    }
    for trajectory, count in zip(group.trajectories, tokens, strict=True):
        own = {
            "reward": trajectory.reward,
            "tokens": count,
            "initial_policy_version": trajectory.initial_policy_version,
            "final_policy_version": trajectory.final_policy_version,
        }
        folders: dict[str, tuple[Mapping[str, Any], ...]]
        folders = {"metadata": (trajectory.metadata, group.metadata), "metrics": (trajectory.metrics, group.metrics)}
        yield _Row(fields={**of_group, **own}, folders=folders)


def _tokens(sampled: SampledGroup) -> list[int]:
    """Sampled tokens of each trajectory, over all its histories; a turn that carries text only has none."""
    turns = iter(sampled.turns)  # in the order of the choices
    return [
        sum(len(next(turns) or ()) for items, _tools in trajectory.histories() for item in items if isinstance(item, Choice))
        for trajectory in sampled.group.trajectories
    ]


def _shown(node: ast.expr) -> str:
    return ast.unparse(node)[:80]
