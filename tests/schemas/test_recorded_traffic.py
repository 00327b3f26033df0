"""Bodies recorded from a real client of the training-jobs API, and the example of its reference page, validate and survive."""

import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.schemas.codec import SAFETENSORS_TYPE, decode_group, encode_json, encode_safetensors
from headrace.schemas.training import TrainConfig

FIXTURES = Path(__file__).parent.parent / "fixtures"


def job_bodies() -> list[dict[str, Any]]:
    exchanges = [orjson.loads(line) for line in (FIXTURES / "art-client-traffic.jsonl").read_bytes().splitlines()]
    return [e["body"] for e in exchanges if e["method"] == "POST" and e["path"].endswith("/training-jobs")]


JOBS = job_bodies()
GROUPS = [group for body in JOBS for group in body["trajectory_groups"]]


def differences(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Paths of what was sent and is not in what was kept; fields that only `kept` has are defaults."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [d for key, value in sent.items() for d in differences(value, kept.get(key), f"{path}.{key}")]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [d for i, pair in enumerate(zip(sent, kept, strict=True)) for d in differences(*pair, f"{path}[{i}]")]
    return [] if sent == kept else [path]


def test_there_are_recorded_jobs():
    assert len(JOBS) >= 2
    assert GROUPS


@pytest.mark.parametrize("group", GROUPS, ids=range(len(GROUPS)))
def test_a_recorded_group_survives_both_forms(group: dict[str, Any]):
    decoded = decode_group(orjson.dumps(group))
    assert decode_group(encode_json(decoded)) == decoded
    assert decode_group(encode_safetensors(decoded), SAFETENSORS_TYPE) == decoded


@pytest.mark.parametrize("group", GROUPS, ids=range(len(GROUPS)))
def test_nothing_of_a_recorded_group_is_lost_but_what_the_tokens_say(group: dict[str, Any]):
    decoded = decode_group(orjson.dumps(group))
    kept = decoded.group.model_dump(mode="json")
    assert [path for path in differences(group, kept) if ".logprobs" not in path and not path.endswith(".token_ids")] == []
    choices = [
        item
        for trajectory in group["trajectories"]
        for history in [trajectory, *trajectory.get("additional_histories", [])]
        for item in history["messages_and_choices"]
        if "finish_reason" in item
    ]
    for choice, turn in zip(choices, decoded.turns, strict=True):
        entries = ((choice.get("logprobs") or {}).get("content")) or []
        ids = choice.get("token_ids") or [
            int(entry["token"].removeprefix("token_id:")) for entry in entries if "token_id:" in entry["token"]
        ]
        assert (turn is None) == (not ids)
        if turn is not None:
            assert list(turn.token_ids) == ids
            assert list(turn.logprobs) == pytest.approx([entry["logprob"] for entry in entries] or [math.nan] * len(ids), nan_ok=True)


@pytest.mark.parametrize("body", JOBS, ids=range(len(JOBS)))
def test_a_recorded_config_is_kept_field_by_field(body: dict[str, Any]):
    config = TrainConfig.model_validate(body["experimental_config"] or {})
    assert config.model_dump(exclude_unset=True) == (body["experimental_config"] or {})


def test_the_reference_pages_example_has_only_fields_that_we_know():
    body = orjson.loads((FIXTURES / "training-job-placeholder.json").read_bytes())
    (group,) = [decode_group(orjson.dumps(g)).group for g in body["trajectory_groups"]]
    assert group.model_extra == {}
    assert group.trajectories[0].model_extra == {}
    # Its numbers are placeholders outside of every range, and two fields exclude each other: the names are what counts.
    assert {*body["experimental_config"]} <= {*TrainConfig.model_fields}
