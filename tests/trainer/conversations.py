"""Conversations with sampled turns, and what a tokenizer makes of them."""

from typing import Any

import pytest
from tests.trainer.tiny import END, START

from headrace.schemas.codec import SampledGroup, sampled
from headrace.schemas.training import BatchPolicy, ModelSettings, TrainConfig
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.trainer.groups import TokenizedGroup, TokenSequence
from headrace.trainer.tokenize import GroupRefused, GroupTokenizer

ALLOW = TrainConfig(allow_training_without_logprobs=True)
USER = {"role": "user", "content": "q"}


def choice(text: str, ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    """A sampled turn; by default its text byte by byte, ended by the model."""
    tokens = [*text.encode(), END] if ids is None else ids
    return {
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
        "token_ids": tokens,
        "token_logprobs": [-0.5 - 0.01 * i for i in range(len(tokens))],
        **changes,
    }


def group_of(*conversations: list[dict[str, Any]], group: dict[str, Any] | None = None, **trajectory: Any) -> SampledGroup:
    trajectories = [{"messages_and_choices": items, "reward": float(i), **trajectory} for i, items in enumerate(conversations)]
    return sampled(TrajectoryGroup.model_validate({"trajectories": trajectories, **(group or {})}))


def tokenize(
    tokenizer: GroupTokenizer,
    *conversations: list[dict[str, Any]],
    config: TrainConfig | None = None,
    limit: int = 400,
    batch: dict[str, Any] | None = None,
    switches: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
    **trajectory: Any,
) -> TokenizedGroup:
    settings = ModelSettings(
        base_model="tiny",
        train=config or TrainConfig(),
        max_sequence_tokens=limit,
        batch=BatchPolicy.model_validate(batch or {}),
        chat_template_kwargs=switches or {},
    )
    return tokenizer.tokenize(group_of(*conversations, group=group, **trajectory), "g", settings)


def text_of(sequence: TokenSequence, *, trained: bool = False) -> str:
    """The sequence's text with its marks written as [ and ]; only what trains, if asked."""
    marks = {END: b"]", START: b"["}
    chosen = [t for t, m in zip(sequence.token_ids.tolist(), sequence.trainable.tolist(), strict=True) if m or not trained]
    return b"".join(marks.get(t, bytes([t % 256])) for t in chosen).decode()


def only(group: TokenizedGroup) -> TokenSequence:
    ((sequence,),) = [trajectory.sequences for trajectory in group.trajectories]
    return sequence


def refusal(tokenizer: GroupTokenizer, *conversations: list[dict[str, Any]], **options: Any) -> GroupRefused:
    with pytest.raises(GroupRefused) as caught:
        tokenize(tokenizer, *conversations, **options)
    return caught.value


def runs(sequence: TokenSequence) -> list[tuple[bool, int]]:
    """The mask as runs: [(False, 20), (True, 3)]."""
    found: list[tuple[bool, int]] = []
    for value in sequence.trainable.tolist():
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found
