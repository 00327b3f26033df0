"""A page of a list of resources: `filter`, `orderBy`, `readMask`, `pageSize` and `pageToken`.

`orderBy` is a list of fields, each with ` desc` for a falling order; equal rows are ordered by name. A field that is not set comes first.
Guarantees: a page token is valid only for the call that returned it, with the same other parameters. A token names the last row of its
page, so a list that changes between two calls repeats and skips no row.
Limitations: if that very row is deleted between the calls, the next page begins at its former position.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Query
from pydantic import BaseModel, Field

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.filters import Path, field_path, parse_filter, parse_mask, to_json, value_at
from headrace.gateway.rlor.resources import Wire

DEFAULT_SIZE = 50
MAX_SIZE = 200
_MAX_ORDERS = 16
Row = TypeVar("Row")


class _ListParameters(BaseModel):
    page_size: int | None = Field(default=None, alias="pageSize")
    page_token: str = Field(default="", alias="pageToken")
    filter: str = ""
    order_by: str = Field(default="", alias="orderBy")
    read_mask: str = Field(default="", alias="readMask")


ListParameters = Annotated[_ListParameters, Query()]
"""The parameters of every list, for a route."""


def list_page(resources: Sequence[Wire], kind: type[Wire], parameters: _ListParameters, *, key: str, account: str) -> dict[str, Any]:
    """One page as JSON, with the rows under `key`. Raises ProblemError (400: an invalid filter, order, mask, size or token)."""
    matches = parse_filter(parameters.filter, kind)
    mask = parse_mask(parameters.read_mask, kind)
    chosen = sorted((row for row in map(to_json, resources) if matches(row)), key=lambda row: str(row["name"]))
    for path, falls in reversed(_parse_order(parameters.order_by, kind)):
        chosen.sort(key=lambda row: _sort_key(value_at(row, path)), reverse=falls)
    call = (key, account, parameters.filter, parameters.order_by, parameters.read_mask)
    rows = [(str(row["name"]), row) for row in chosen]
    page_rows, next_token = cut_page(rows, size=parameters.page_size, token=parameters.page_token, call=call)
    answer: dict[str, Any] = {key: [mask(row) for row in page_rows], "totalSize": len(rows)}
    return answer if next_token is None else {**answer, "nextPageToken": next_token}


def cut_page(
    rows: Sequence[tuple[str, Row]], *, size: int | None, token: str | None, call: Sequence[object]
) -> tuple[list[Row], str | None]:
    """One page of rows with unique names, and the token of the next page, if there is one.

    `call` is the other parameters of the call, which tokens are bound to. Raises ProblemError (400: an invalid size or token).
    """
    if size is not None and size < 0:
        raise ProblemError(400, f"pageSize: {size}: 0 (for {DEFAULT_SIZE}) to {MAX_SIZE} are possible")
    digest = hashlib.sha256(orjson.dumps([str(part) for part in call])).hexdigest()[:16]
    first = _position(rows, token, digest) if token else 0
    end = first + min(size or DEFAULT_SIZE, MAX_SIZE)
    chosen = rows[first:end]
    next_token = None
    if end < len(rows):
        next_token = base64.urlsafe_b64encode(orjson.dumps([digest, end, chosen[-1][0]])).decode().rstrip("=")
    return [row for _, row in chosen], next_token


def _position(rows: Sequence[tuple[str, Row]], token: str, digest: str) -> int:
    try:
        token_digest, position, after = orjson.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (ValueError, binascii.Error, TypeError):
        raise ProblemError(400, "pageToken: no token of this gateway: take nextPageToken of the page before as it is") from None
    if token_digest != digest or not isinstance(position, int) or position < 0:
        raise ProblemError(400, "pageToken: the token is of a call with other parameters: repeat filter, orderBy and readMask as they were")
    for index, (name, _) in enumerate(rows):
        if name == after:
            return index + 1
    return max(position - 1, 0)  # the row was deleted: its followers moved up by one


def _parse_order(order_by: str, kind: type[Wire]) -> list[tuple[Path, bool]]:
    found: list[tuple[Path, bool]] = []
    parts = order_by.split(",") if order_by.strip() else []
    if len(parts) > _MAX_ORDERS:
        raise ProblemError(400, f"orderBy: {len(parts)} fields, {_MAX_ORDERS} at most are possible")
    for part in parts:
        words = part.split()
        if not words or len(words) > 2 or (len(words) == 2 and words[1].lower() not in {"asc", "desc"}):
            raise ProblemError(400, f"orderBy: {part.strip()[:80]!r}: a field is needed, with ' desc' after it for a falling order")
        found.append((field_path(kind, words[0], "orderBy"), len(words) == 2 and words[1].lower() == "desc"))
    return found


def _sort_key(value: object) -> tuple[int, float, str]:
    """Values that are not set come first, then numbers, then texts. Times are texts that sort as they are written."""
    if value is None or isinstance(value, dict | list):
        return (0, 0.0, "")
    if isinstance(value, bool | int | float):
        return (1, float(value), "")
    return (2, 0.0, str(value))
