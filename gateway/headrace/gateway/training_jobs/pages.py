"""Lists as the training-jobs API pages them: an exclusive cursor, a limit, and whether there is more."""

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel

from headrace.gateway.problems import FaultError, UnprocessableError

DEFAULT_LIMIT, MAX_LIMIT = 20, 100

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Most items of one answer.")]
After = Annotated[str | None, Query(max_length=256, description="Id of the last item that is known: the list continues behind it.")]


class Listed(BaseModel):
    """An item of a list; its id is the cursor."""

    id: str


T = TypeVar("T", bound=Listed)


class Page(BaseModel, Generic[T]):
    """One answer of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(items: Sequence[T], *, after: str | None, limit: int) -> Page[T]:
    """The items behind a cursor.

    Raises:
        UnprocessableError: no item has that id. A list that began again would be taken for news.
    """
    start = 0
    if after is not None:
        at = next((i for i, item in enumerate(items) if item.id == after), None)
        if at is None:
            raise UnprocessableError([FaultError(["query", "after"], "no item of this list has this id: leave it out to start again")])
        start = at + 1
    chosen = list(items[start : start + limit])
    ends = (chosen[0].id, chosen[-1].id) if chosen else (None, None)
    return Page(data=chosen, first_id=ends[0], last_id=ends[1], has_more=start + limit < len(items))
