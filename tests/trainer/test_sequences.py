"""Turns to sequences, for random histories: every sampled token trains exactly once, behind the very prompt that it had."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.lengths import OverLongError, fit
from headrace.trainer.sequences import Turn, sequences_of

ids = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def histories(draw: st.DrawFn) -> list[Turn]:
    """Turns whose prompts continue from the turn before, or nearly, or not at all; each sampled token has a log-probability of its own."""
    turns: list[Turn] = []
    said: list[int] = []
    count = 0
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["extends", "rewritten", "new", "shorter"]))
        prompt = {
            "extends": said,
            "rewritten": said[:-1] + [2 - token for token in said[-1:]],
            "new": [],
            "shorter": said[: len(said) // 2],
        }[kind] + draw(ids)
        drawn = draw(ids)
        turns.append(
            Turn(
                prompt=np.array(prompt, np.int32),
                token_ids=np.array(drawn, np.int32),
                logprobs=-np.arange(count, count + len(drawn), dtype=np.float32),
                policy_versions=draw(st.none() | st.just(np.full(len(drawn), len(turns), np.int32))),
            )
        )
        count += len(drawn)
        said = prompt + drawn
    return turns


@settings(deadline=None)
@given(histories())
def test_each_sampled_token_trains_once_behind_its_own_prompt(turns: list[Turn]):
    expected = {}  # log-probability (unique) -> what the model saw before it, and it
    for turn in turns:
        for i, logprob in enumerate(turn.logprobs.tolist()):
            seen = [*turn.prompt.tolist(), *turn.token_ids[: i + 1].tolist()]
            if len(seen) > 1:  # nothing predicts a first token
                expected[logprob] = seen
    found = {}
    for sequence in sequences_of(turns):
        assert sequence.trainable_tokens > 0
        for at in np.flatnonzero(sequence.trainable).tolist():
            found[float(sequence.logprobs[at])] = sequence.token_ids[: at + 1].tolist()
        assert np.isnan(sequence.logprobs[1:][~sequence.trainable[1:]]).all()
    assert found == expected


@settings(deadline=None)
@given(histories())
def test_turns_share_a_sequence_exactly_while_their_prompts_go_on(turns: list[Turn]):
    splits = 0
    said: list[int] | None = None
    for turn in turns:
        prompt = turn.prompt.tolist()
        splits += said is None or prompt[: len(said)] != said
        said = prompt + turn.token_ids.tolist()
    assert len(sequences_of(turns)) <= splits
    if all(len(turn.prompt) and len(turn.token_ids) for turn in turns):
        assert len(sequences_of(turns)) == splits


@settings(deadline=None)
@given(histories(), st.integers(1, 12))
def test_cut_sequences_are_the_heads_of_the_whole_ones(turns: list[Turn], limit: int):
    whole = sequences_of(turns)
    fits = all(len(sequence) <= limit for sequence in whole)
    try:
        cut = fit(whole, limit, truncate=True)
    except OverLongError:
        assert not any(sequence.trainable[:limit].any() for sequence in whole)
        return
    assert (cut.truncated == 0) == fits
    heads = [sequence for sequence in whole if sequence.trainable[:limit].any()]
    assert len(cut.sequences) == len(heads)
    for short, long in zip(cut.sequences, heads, strict=True):
        assert short.token_ids.tolist() == long.token_ids[:limit].tolist()
        assert short.trainable_tokens == int(long.trainable[:limit].sum())
        assert not math.isnan(float(short.logprobs[short.trainable].sum()))
