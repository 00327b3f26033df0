"""A page of RLOR jobs: filtered, ordered, cut.

`orderBy` is a list of fields, each with ` desc` if it falls; what is equal then stands by name. Guarantees: a field that is not set comes
first, however the order goes on; pages fit together as long as filter and order are repeated.
"""

from collections.abc import Sequence
from typing import Any

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.field_paths import Path, UnknownFieldError, path_of, value_at
from headrace.gateway.rlor.filters import FilterError, parse_filter
from headrace.gateway.rlor.job_masks import masked
from headrace.gateway.rlor.paging import page
from headrace.gateway.rlor.shown_job import RlorTrainerJob
from headrace.gateway.rlor.wire import Wire


class Listing(Wire):
    """A page of jobs."""

    rlor_trainer_jobs: list[RlorTrainerJob]
    next_page_token: str | None = None
    total_size: int


def listed(
    jobs: Sequence[RlorTrainerJob], *, account: str, size: int | None, token: str, filter_by: str, order_by: str, read_mask: str
) -> dict[str, Any]:
    """One page, as JSON.

    Raises:
        ProblemError: 400: a filter, order, mask or token that is not understood.
    """
    try:
        holds = parse_filter(filter_by, lambda text: path_of(RlorTrainerJob, text))
    except FilterError as error:
        raise ProblemError(400, f"filter: {error}") from None
    masked({}, read_mask)
    resources = [job.model_dump(mode="json", by_alias=True, exclude_none=True) for job in jobs]
    chosen = sorted((resource for resource in resources if holds(resource)), key=lambda resource: str(resource["name"]))
    for path, falls in reversed(_order(order_by)):
        chosen.sort(key=lambda resource: _sortable(value_at(resource, path)), reverse=falls)
    rows = [(str(resource["name"]), resource) for resource in chosen]
    found = page(rows, size=size, token=token, asked=("jobs", account, filter_by, order_by, read_mask))
    answer: dict[str, Any] = {"rlorTrainerJobs": [masked(row, read_mask) for row in found.rows], "totalSize": found.total_size}
    return answer if found.next_page_token is None else {**answer, "nextPageToken": found.next_page_token}


def _order(order_by: str) -> list[tuple[Path, bool]]:
    found: list[tuple[Path, bool]] = []
    for part in order_by.split(",") if order_by.strip() else []:
        words = part.split()
        if not words or len(words) > 2 or (len(words) == 2 and words[1].lower() not in {"asc", "desc"}):
            raise ProblemError(400, f"orderBy: {part.strip()[:80]!r}: a field, with ' desc' behind it if it falls, is needed")
        try:
            found.append((path_of(RlorTrainerJob, words[0]), len(words) == 2 and words[1].lower() == "desc"))
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
