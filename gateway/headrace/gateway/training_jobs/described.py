"""What the OpenAPI document says of bodies that are read as bytes: the same models that read them, group by group.

Limitations: sharing components with the rest of the document; what stands deeper than a trajectory is named only: `schemas/json` has it.
"""

from typing import Any

from pydantic import BaseModel

from headrace.schemas.training import TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup

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
