"""Histories of captured trajectories: what `openpipe-art` trains by its own code, and ours, agree on ids, masks and log-probabilities."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.conformance.clients import run_client
from tests.conformance.test_art import art_python

from headrace.schemas.codec import decode_group
from headrace.schemas.training import ModelSettings
from headrace.trainer.plan import BaseSource
from headrace.trainer.tokenize import GroupTokenizer

RECORDED = Path(__file__).parents[1] / "fixtures" / "art-captured-groups.jsonl"


def each_trained(histories: list[dict[str, Any]]) -> Counter[tuple[tuple[int, ...], float]]:
    """What trains: a token behind all that stands before it, and its log-probability. How it is cut into histories does not matter."""
    return Counter(
        (tuple(history["token_ids"][: i + 1]), round(history["logprobs"][i], 5))
        for history in histories
        for i, trains in enumerate(history["trains"])
        if trains
    )


@pytest.mark.slow
def test_the_clients_own_histories_and_ours_agree_token_for_token(tiny_model: Path, tmp_path: Path) -> None:
    said = run_client(art_python(), Path(__file__).with_name("art_histories.py"), str(RECORDED), seconds=120, cwd=tmp_path)
    theirs = {found["name"]: found["trajectories"] for found in map(orjson.loads, said.splitlines())}
    tokenizer = GroupTokenizer(BaseSource(path=str(tiny_model)))
    groups = {named["name"]: named["group"] for named in map(orjson.loads, RECORDED.read_bytes().splitlines())}
    assert {"tool_loop", "stripped_thinking", "retry_with_the_same_answer", "retry_with_another_answer"} <= theirs.keys()
    for name, expected in theirs.items():
        made = tokenizer.tokenize(decode_group(orjson.dumps(groups[name])), "g", ModelSettings(base_model="tiny", max_sequence_tokens=100))
        for trajectory, histories in zip(made.trajectories, expected, strict=True):
            ours = [
                {"token_ids": s.token_ids.tolist(), "trains": s.trainable.tolist(), "logprobs": s.logprobs.tolist()}
                for s in trajectory.sequences
            ]
            assert not any(math.isnan(lp) for s in ours for lp, trains in zip(s["logprobs"], s["trains"], strict=True) if trains)
            assert each_trained(ours) == each_trained(histories), name
            if name not in {"retry_with_the_same_answer", "responses"}:  # the client cuts these in two, ours is one
                assert [(s["token_ids"], s["trains"]) for s in ours] == [(h["token_ids"], h["trains"]) for h in histories], name
