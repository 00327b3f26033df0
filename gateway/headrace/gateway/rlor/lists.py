"""A page of a list of resources: filtered, ordered, cut.

`orderBy` is a list of fields, each with ` desc` if it falls; what is equal then stands by name. Guarantees: a field that is not set comes
first, however the order goes on; pages fit together as long as filter and order are repeated.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.field_paths import Path, UnknownFieldError, path_of, value_at
from headrace.gateway.rlor.filters import FilterError, parse_filter
from headrace.gateway.rlor.masks import mask_of
from headrace.gateway.rlor.paging import page
from headrace.gateway.rlor.wire import Wire

_MOST_ORDERS = 16


class ListQuery(BaseModel):
    """The parameters of every list."""

    page_size: int | None = Field(default=None, alias="pageSize")
    page_token: str = Field(default="", alias="pageToken")
    filter: str = ""
    order_by: str = Field(default="", alias="orderBy")
    read_mask: str = Field(default="", alias="readMask")


Asked = Annotated[ListQuery, Query()]
"""The parameters of a list, of a route."""


def listed(resources: Sequence[Wire], kind: type[Wire], asked: ListQuery, *, key: str, account: str) -> dict[str, Any]:
    """One page, as JSON.

    Args:
        resources: All that there are; each has a name.
        kind: What they are.
        asked: Of the request.
        key: Under which they stand in the answer, as in the path: `datasets`, `models`, …
        account: Whose they are.

    Raises:
        ProblemError: 400: a filter, order, mask or token that is not understood.
    """
    try:
        holds = parse_filter(asked.filter, lambda text: path_of(kind, text))
    except FilterError as error:
        raise ProblemError(400, f"filter: {error}") from None
    mask = mask_of(asked.read_mask, kind)
    found = [resource.model_dump(mode="json", by_alias=True, exclude_none=True) for resource in resources]
    chosen = sorted((resource for resource in found if holds(resource)), key=lambda resource: str(resource["name"]))
    for path, falls in reversed(_order(asked.order_by, kind)):
        chosen.sort(key=lambda resource: _sortable(value_at(resource, path)), reverse=falls)
    rows = [(str(resource["name"]), resource) for resource in chosen]
    bound = (key, account, asked.filter, asked.order_by, asked.read_mask)
    cut = page(rows, size=asked.page_size, token=asked.page_token, asked=bound)
    answer: dict[str, Any] = {key: [mask(row) for row in cut.rows], "totalSize": cut.total_size}
    return answer if cut.next_page_token is None else {**answer, "nextPageToken": cut.next_page_token}


def _order(order_by: str, kind: type[Wire]) -> list[tuple[Path, bool]]:
    found: list[tuple[Path, bool]] = []
    parts = order_by.split(",") if order_by.strip() else []
    if len(parts) > _MOST_ORDERS:
        raise ProblemError(400, f"orderBy: {len(parts)} fields, {_MOST_ORDERS} at most are possible")
    for part in parts:
        words = part.split()
        if not words or len(words) > 2 or (len(words) == 2 and words[1].lower() not in {"asc", "desc"}):
            raise ProblemError(400, f"orderBy: {part.strip()[:80]!r}: a field, with ' desc' behind it if it falls, is needed")
        try:
            found.append((path_of(kind, words[0]), len(words) == 2 and words[1].lower() == "desc"))
        except UnknownFieldError as error:
            raise ProblemError(400, f"orderBy: {error}") from None
    return found


def _sortable(value: object) -> tuple[int, float, str]:
    """Values of one field in an order: what is not set, then numbers, then texts (times among them, which sort as they are written)."""
    if value is None or isinstance(value, dict | list):
        return (0, 0.0, "")
    if isinstance(value, bool | int | float):
        return (1, float(value), "")
    return (2, 0.0, str(value))
