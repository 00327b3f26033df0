"""The two base classes of all schemas.

Guarantees: unknown fields survive a round trip (`extra="allow"`), so a newer producer can talk through an older part;
NaN and infinity are refused in every float field, typed or not. Gives up: immutability of what users build (`Open`), since
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


def utc_now() -> datetime:
    """The current time with its zone; every timestamp in a record is UTC."""
    return datetime.now(UTC)


def non_finite_paths(value: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401 - walks any JSON value
    """Paths (`a.b[2].c`) of every NaN or infinity inside a JSON-like value.

    Needed because orjson writes NaN as null and an untyped field (metadata, an unknown key) has no validator.
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
