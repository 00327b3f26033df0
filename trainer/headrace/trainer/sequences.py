"""Turns to sequences: what the sampler drew, behind the prompt that it saw.

A turn is a prompt (token ids) and the tokens that were sampled after it. While a turn's prompt begins with all tokens of the
sequence so far, token for token, the turn continues in that sequence; otherwise a new sequence begins with its whole prompt.
Guarantees: every sampled token is trained exactly once, behind the very prompt it is said to have had; nothing is shifted or
padded to make it fit. An end-of-turn token that was sampled is not doubled, and one that the template adds after a cut-off turn
is context, because both are in the next prompt. Limitations: sharing across a prompt that was tokenized differently than it was
sampled.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.trainer.groups import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn: P prompt tokens, N sampled tokens."""

    prompt: npt.NDArray[np.int32]
    """int32[P]."""
    token_ids: npt.NDArray[np.int32]
    """int32[N]."""
    logprobs: npt.NDArray[np.float32]
    """float32[N], NaN where missing."""
    policy_versions: npt.NDArray[np.int32] | None = None
    """int32[N], or None where the sampler said none."""


def sequences_of(turns: list[Turn]) -> tuple[TokenSequence, ...]:
    """Join the turns of one history into as few sequences as their prompts allow, in order.

    Sequences without a trainable token (a turn that drew nothing, or one token without any prompt) are left out.
    """
    chains: list[list[Turn]] = []
    for turn in turns:
        if chains and _extends(turn, chains[-1][-1]):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    joined = (_join(chain) for chain in chains)
    return tuple(sequence for sequence in joined if sequence is not None)


def _extends(turn: Turn, before: Turn) -> bool:
    """Whether a prompt begins with all tokens of the turn before it and of that one's prompt."""
    start, stop = len(before.prompt), len(before.prompt) + len(before.token_ids)
    if len(turn.prompt) < stop:
        return False
    return bool((turn.prompt[:start] == before.prompt).all() and (turn.prompt[start:stop] == before.token_ids).all())


def _join(chain: list[Turn]) -> TokenSequence | None:
    last = chain[-1]
    token_ids = np.concatenate([last.prompt, last.token_ids])
    trainable = np.zeros(len(token_ids), np.bool_)
    logprobs = np.full(len(token_ids), np.nan, np.float32)
    known = any(turn.policy_versions is not None for turn in chain)
    versions = np.full(len(token_ids), -1, np.int32) if known else None
    for turn in chain:
        start, stop = len(turn.prompt), len(turn.prompt) + len(turn.token_ids)
        trainable[start:stop] = True
        logprobs[start:stop] = turn.logprobs
        if versions is not None and turn.policy_versions is not None:
            versions[start:stop] = turn.policy_versions
    trainable[:1] = False  # nothing predicts the first token
    if not trainable.any():
        return None
    return TokenSequence(token_ids=token_ids, trainable=trainable, logprobs=logprobs, policy_versions=versions)
