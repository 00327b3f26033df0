"""Lists as the training-jobs API pages them: an exclusive cursor, a limit, and whether there is more.

What the OpenAPI document says of bodies that are read as bytes: the same models that read them, group by group.

Limitations: sharing components with the rest of the document; what stands deeper than a trajectory is named only: `schemas/json` has it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel

from headrace.gateway.problems import FaultError, UnprocessableError
from headrace.schemas.training import TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup

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


_LEVELS = 2
"""Groups and their trajectories."""


class TrainingJobRequest(BaseModel):
    """One step on groups of trajectories."""

    model_id: str
    trajectory_groups: list[TrajectoryGroup]
    experimental_config: TrainConfig | None = None


class LogRequest(BaseModel):
    """Groups that are kept."""

    split: str
    trajectory_groups: list[TrajectoryGroup]


def request_body(model: type[BaseModel], levels: int = _LEVELS) -> dict[str, Any]:
    """For `openapi_extra`; models that stand so many levels deep are told whole."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def whole(node: Any, levels: int) -> Any:  # noqa: ANN401 - any part of a JSON Schema
        if isinstance(node, dict):
            if "$ref" in node:
                name = node["$ref"].rpartition("/")[2]
                return whole(definitions[name], levels - 1) if levels else {"type": "object", "title": name}
            return {key: whole(value, levels) for key, value in node.items()}
        return [whole(item, levels) for item in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole(schema, levels)}}}}
