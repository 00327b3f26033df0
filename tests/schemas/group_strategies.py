"""Random trajectory groups for hypothesis: everything that the codec promises to keep."""

import math
from datetime import UTC

from hypothesis import strategies as st

from headrace.schemas.chat import Choice, ChoiceMessage, Message, Tool
from headrace.schemas.codec import SampledGroup
from headrace.schemas.trajectory import History, RolloutException, Trajectory, TrajectoryGroup
from headrace.schemas.turns import SampledTokens

# U+FDD0 is what the reader puts in the place of a lone surrogate (`headrace.schemas.surrogates`).
text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufdd0"), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
int32 = st.integers(0, 2**31 - 1)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | text
json_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)
# Unknown fields: names that no schema has.
extras = st.dictionaries(text.map(lambda name: f"x_{name}"), json_values, max_size=2)
tool_calls = st.none() | st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": text, "arguments": text | st.dictionaries(text, scalars, max_size=2)})},
        optional={"id": text},
    ),
    max_size=2,
)
tools = st.none() | st.lists(
    st.builds(
        lambda name, extra: Tool.model_validate({"function": {"name": name, "parameters": {"type": "object"}, **extra}}), text, extras
    ),
    max_size=2,
)


@st.composite
def turns(draw: st.DrawFn) -> SampledTokens | None:
    """Sampled tokens, often with a missing log-probability, sometimes without any token; None for text only."""
    if draw(st.integers(0, 4)) == 0:
        return None
    n = draw(st.integers(0, 6))
    logprobs = [None if p is None or math.isnan(p) else p for p in draw(st.lists(st.none() | float32, min_size=n, max_size=n))]
    versions = draw(st.none() | st.lists(st.none() | int32, min_size=n, max_size=n))
    return SampledTokens.of(draw(st.lists(int32, min_size=n, max_size=n)), logprobs, versions)


@st.composite
def items(draw: st.DrawFn) -> tuple[list[Choice | Message], list[SampledTokens | None]]:
    """Messages and choices of one history, with the turns of its choices."""
    conversation: list[Choice | Message] = []
    sampled: list[SampledTokens | None] = []
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            conversation.append(
                Message(role=draw(st.sampled_from(["system", "user", "tool"])), content=draw(st.none() | text), **draw(extras))
            )
            continue
        turn = draw(turns())
        message = ChoiceMessage.model_validate({"content": draw(st.none() | text), "tool_calls": draw(tool_calls), **draw(extras)})
        prompt = draw(st.none() | st.lists(int32, max_size=3))
        reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
        conversation.append(Choice(finish_reason=reason, message=message, prompt_token_ids=prompt, **draw(extras)))
        sampled.append(turn)
    return conversation, sampled


@st.composite
def groups(draw: st.DrawFn) -> SampledGroup:
    """A whole group in memory."""
    trajectories: list[Trajectory] = []
    sampled: list[SampledTokens | None] = []
    for _ in range(draw(st.integers(0, 3))):
        main, its_turns = draw(items())
        sampled += its_turns
        histories: list[History] = []
        for _ in range(draw(st.integers(0, 2))):
            branch, its_turns = draw(items())
            sampled += its_turns
            histories.append(History(messages_and_choices=branch, tools=draw(tools)))
        trajectories.append(
            Trajectory(
                messages_and_choices=main,
                additional_histories=histories,
                tools=draw(tools),
                reward=draw(finite),
                initial_policy_version=draw(st.none() | int32),
                metrics=draw(st.dictionaries(text, st.booleans() | finite, max_size=2)),
                metadata=draw(st.dictionaries(text, scalars, max_size=2)),
                logs=draw(st.lists(text, max_size=2)),
                start_time=draw(st.none() | st.datetimes(timezones=st.just(UTC))),
                **draw(extras),
            )
        )
    group = TrajectoryGroup(
        trajectories=trajectories,
        exceptions=draw(st.lists(st.builds(RolloutException, type=text, message=text), max_size=1)),
        metadata=draw(st.dictionaries(text, json_values, max_size=2)),
        metrics=draw(st.dictionaries(text, finite, max_size=2)),
        group_id=draw(st.none() | text.filter(bool)),
        purpose=draw(st.sampled_from([None, "rl", "sft"])),
        allow_training_without_logprobs=draw(st.none() | st.booleans()),
        **draw(extras),
    )
    return SampledGroup(group=group, turns=tuple(sampled))
