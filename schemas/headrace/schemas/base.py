"""The two base classes of all schemas.

Guarantees: unknown fields survive a round trip (`extra="allow"`), so a newer producer can talk through an older part;
NaN and infinity are refused in every float field, typed or not. Limitations: immutability of what users build (`Open`), since
agent runtimes fill trajectories step by step.
"""

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class Open(BaseModel):
    """A message part that others also write: unknown fields are kept."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=(), populate_by_name=True)


class Record(BaseModel):
    """A record that Headrace writes: frozen, unknown fields kept for forward compatibility."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=(), frozen=True)


def unknown_fields(model: BaseModel, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of the keys that no field of a model, or of a model inside it, has: for doors that reject them instead of keeping them."""
    for name in model.__pydantic_extra__ or {}:
        yield (*at, name)
    for name in type(model).model_fields:
        value = getattr(model, name)
        inner = enumerate(value) if isinstance(value, list | tuple) else value.items() if isinstance(value, dict) else ()
        if isinstance(value, BaseModel):
            yield from unknown_fields(value, (*at, name))
        for key, item in inner:
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, (*at, name, key))


def utc_now() -> datetime:
    """The current time with its zone; every timestamp in a record is UTC."""
    return datetime.now(UTC)


def all_finite(value: Any) -> bool:  # noqa: ANN401 - walks any JSON value
    """Whether no float inside a JSON-like value or model is NaN or infinite.

    Needed because orjson writes NaN as null and an untyped field (metadata, an unknown key) has no validator. It runs on every group
    that is sent, so it builds no paths: six times as fast as `non_finite_paths`, which then says where.
    """
    stack = [value]
    pop, extend = stack.pop, stack.extend
    while stack:
        item = pop()
        kind = type(item)
        if kind is str or kind is int or kind is bool or item is None:
            continue
        if kind is dict:
            extend(item.values())
        elif kind is list or kind is tuple:
            extend(item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif isinstance(item, BaseModel):
            extend([field for field in item.__dict__.values() if field is not None and type(field) is not str])
            extend((item.__pydantic_extra__ or {}).values())
        elif isinstance(item, dict):
            extend(item.values())
        elif isinstance(item, list | tuple):
            extend(item)
    return True


def non_finite_paths(value: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401 - walks any JSON value
    """Paths (`a.b[2].c`) of every NaN or infinity inside a JSON-like value.

    Iterative, so a deeply nested value can't exhaust the stack.
    """
    stack: list[tuple[Any, str]] = [(value, path)]
    while stack:
        item, where = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                yield where or "(root)"
        elif isinstance(item, BaseModel):
            stack.append((item.__dict__, where))
            stack.append((item.__pydantic_extra__ or {}, where))
        elif isinstance(item, dict):
            stack.extend((v, f"{where}.{k}" if where else str(k)) for k, v in item.items())
        elif isinstance(item, list | tuple):
            stack.extend((v, f"{where}[{i}]") for i, v in enumerate(item))
