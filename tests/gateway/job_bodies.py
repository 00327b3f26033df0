"""Bodies of training jobs, as clients of the hosted API send them."""

import json
import uuid
from pathlib import Path
from typing import Any

import httpx

FIXTURES = Path(__file__).parents[1] / "fixtures"


def choice(ids: list[int], **fields: Any) -> dict[str, Any]:
    """A sampled turn, as the recorded client sends it."""
    content = [{"token": f"token_id:{i}", "bytes": [97], "logprob": -1.0 - 0.1 * n, "top_logprobs": []} for n, i in enumerate(ids)]
    message = {"content": "a", "refusal": None, "role": "assistant", "annotations": None, "tool_calls": None}
    return {"finish_reason": "stop", "index": 0, "logprobs": {"content": content, "refusal": None}, "message": message, **fields}


def trajectory(reward: float, ids: list[int], **fields: Any) -> dict[str, Any]:
    """One rollout of the tiny base model (token ids below 32)."""
    return {
        "messages_and_choices": [{"role": "user", "content": "a b"}, choice(ids)],
        "tools": None,
        "additional_histories": [],
        "reward": reward,
        "initial_policy_version": None,
        "final_policy_version": None,
        "metrics": {},
        "metadata": {},
        "logs": [],
        **fields,
    }


def group(seed: int = 0, **fields: Any) -> dict[str, Any]:
    """Two rollouts, one right, one wrong."""
    two = [trajectory(1.0, [9 + seed % 8, 10, 1]), trajectory(0.0, [11, 12 + seed % 8, 13, 1])]
    return {"trajectories": two, "exceptions": [], "metadata": {}, "metrics": {}, "logs": [], **fields}


def job(model_id: str, *groups: dict[str, Any], config: dict[str, Any] | None = None) -> dict[str, Any]:
    """A whole body."""
    return {"model_id": model_id, "trajectory_groups": list(groups), "experimental_config": config}


def placeholder() -> dict[str, Any]:
    """The body of the reference's page, placeholders and all."""
    found: dict[str, Any] = json.loads((FIXTURES / "training-job-placeholder.json").read_text())
    return found


async def make_model(http: httpx.AsyncClient, name: str | None = None, **fields: Any) -> str:
    """A model's id; one of its own unless a name is given."""
    name = f"agent-{uuid.uuid4().hex[:8]}" if name is None else name
    body = {"entity": None, "project": "tests", "name": name, "base_model": "tiny", "return_existing": True, **fields}
    answer = await http.post("/v1/preview/models", json=body)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


def faults(answer: httpx.Response) -> dict[str, str]:
    """Messages of a 422 by place, as `body.a.0.b`."""
    assert answer.status_code == 422, answer.text
    items = answer.json()["detail"]
    assert all(set(item) == {"loc", "msg", "type"} for item in items)
    return {".".join(map(str, item["loc"])): item["msg"] for item in items}
