"""Tokenized groups: what the tokenizing process hands to the rank.

Guarantees: numpy and the standard library only (no torch), so the type crosses a process boundary by pickle protocol 5 and a process that
only tokenizes stays small; a group is pickled as four flat arrays, however many sequences it has; arrays of a sequence have one length; a
group knows which of its members were refused, and why. Limitations: immutability of the arrays' content, which no one writes. Shapes: T
tokens of one sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.reasons import RejectionReason
from headrace.trainer.user_metrics import NO_METRICS, UserMetrics

REWARD_TOLERANCE = 1e-9
"""Rewards that differ by less, relative to their size (at least 1), are equal."""


def without_variance(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by rounding at most: max - min <= 1e-9 * max(1, the largest |r|). The one place that judges this.

    Judged on the raw float64 values, never by a standard deviation: 0.1 + 0.2 + 0.3 is not 0.6 there, and three rewards of 0.1 have a
    deviation of 1e-17. Fewer than two rewards have no variance.
    """
    if len(rewards) < 2:
        return True
    least, most = min(rewards), max(rewards)
    return bool(most - least <= REWARD_TOLERANCE * max(1.0, abs(least), abs(most)))


NO_LOGPROB = -9984.0
"""Engines write -9999 (which is -9984 in bfloat16), or the lowest float, for a log-probability that they do not know."""
POSITIVE_TOLERANCE = 0.1
"""A log-probability may be above 0 by the rounding of half-precision logits, and by no more."""


def known_logprobs(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Log-probabilities as an engine sent them, with NaN for those that it did not know: a sentinel is not a number to compute with."""
    sentinel_N = values_N <= NO_LOGPROB
    return np.where(sentinel_N, np.float32(np.nan), values_N) if sentinel_N.any() else values_N


def first_positive(values_N: npt.NDArray[np.float32]) -> int | None:
    """Index of the first value that is no log-probability, since it is above 0 by more than rounding; None where all are fine."""
    found = np.flatnonzero(values_N > POSITIVE_TOLERANCE)
    return int(found[0]) if len(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One stretch of tokens that a model reads from its start; several per trajectory where its context was rewritten.

    Example: a prompt of two tokens and an answer of one: `TokenSequence(token_ids=[5, 6, 9], trainable=[False, False, True], logprobs=[nan,
    nan, -0.1])` (as arrays).

    Raises:
        ValueError: the arrays differ in length, there is no token, or the first token is trainable (nothing predicts it).
    """

    token_ids: npt.NDArray[np.int32]
    """int32[T]."""
    trainable: npt.NDArray[np.bool_]
    """bool[T]: the policy sampled this token."""
    logprobs: npt.NDArray[np.float32]
    """float32[T]: the behaviour policy's log-probability, natural log at temperature 1; NaN where not sampled or missing."""
    policy_versions: npt.NDArray[np.int32] | None = None
    """int32[T]: the version that sampled each token, -1 where not sampled or unknown; None where the sampler said none."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        versions = n if self.policy_versions is None else len(self.policy_versions)
        if not 0 < n == len(self.trainable) == len(self.logprobs) == versions:
            lengths = sorted({n, len(self.trainable), len(self.logprobs), versions})
            raise ValueError(f"the arrays of a sequence must have one length of at least 1, not {lengths}")
        if self.trainable[0]:
            raise ValueError("the first token of a sequence can't be trainable: nothing predicts it")

    def __len__(self) -> int:
        return len(self.token_ids)

    def head(self, tokens: int) -> "TokenSequence":
        """The sequence cut after so many tokens; itself where it is no longer."""
        if len(self) <= tokens:
            return self
        return TokenSequence(
            token_ids=self.token_ids[:tokens],
            trainable=self.trainable[:tokens],
            logprobs=self.logprobs[:tokens],
            policy_versions=None if self.policy_versions is None else self.policy_versions[:tokens],
        )

    @property
    def trainable_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return int(np.count_nonzero(self.trainable))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        versions = 0 if self.policy_versions is None else self.policy_versions.nbytes
        return self.token_ids.nbytes + self.trainable.nbytes + self.logprobs.nbytes + versions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedTrajectory:
    """One rollout as tokens, with what it was worth."""

    reward: float
    """float64, compared inside its group only."""
    sequences: tuple[TokenSequence, ...]
    """At least one; a history that is no token-for-token extension of the turn before continues in a new sequence."""
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    truncated: int = 0
    """How many of its sequences were cut to the longest that is trained on."""
    metrics: UserMetrics = NO_METRICS
    """What the rollout measured itself."""
    turns_without_end: int = 0
    """Turns of text that the model ended, and whose end the chat template does not tell."""
    turns_as_context: int = 0
    """Choices without log-probabilities, and assistant messages, that are context although the model may have sampled them."""

    @property
    def policy_versions(self) -> tuple[int, int] | None:
        """The oldest and the newest version that took part, of the rollout and of its sampled tokens; None where none is known."""
        said = [version for version in (self.initial_policy_version, self.final_policy_version) if version is not None]
        for sequence in self.sequences:
            if sequence.policy_versions is not None:
                known = sequence.policy_versions[sequence.trainable & (sequence.policy_versions >= 0)]
                said += [int(known.min()), int(known.max())] if len(known) else []
        return (min(said), max(said)) if said else None

    @property
    def tokens(self) -> int:
        """All tokens, context included."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def trainable_tokens(self) -> int:
        """Sampled tokens over all sequences."""
        return sum(sequence.trainable_tokens for sequence in self.sequences)


_OF_MEMBER = tuple(field.name for field in fields(TokenizedTrajectory) if field.name != "sequences")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTrajectory:
    """A member that can't be trained on."""

    index: int
    """In the group as it was sent."""
    reason: RejectionReason
    detail: str
    """What, where (from `trajectories[i]` on) and what to do."""


# No slots: a group is asked for its counts at admission, at the cut and in the metrics, and `cached_property` needs a dict.
@dataclass(frozen=True, kw_only=True)
class TokenizedGroup:
    """Rollouts of one task, compared with each other; or examples to imitate."""

    group_id: str
    trajectories: tuple[TokenizedTrajectory, ...]
    """Those that fit, in the order they were sent."""
    rejected: tuple[RejectedTrajectory, ...] = ()
    """Those that don't, by index."""
    exceptions: int = 0
    """Rollouts that failed: counted, never part of a baseline."""
    sft: bool = False
    """Examples: every assistant turn is trainable, rewards and versions mean nothing, and log-probabilities may be NaN."""

    def __reduce__(self) -> "tuple[Callable[..., TokenizedGroup], tuple[object, ...]]":
        sequences = [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]
        versions = [sequence.policy_versions for sequence in sequences if sequence.policy_versions is not None]
        arrays = (
            _flat([sequence.token_ids for sequence in sequences], np.int32),
            _flat([sequence.trainable for sequence in sequences], np.bool_),
            _flat([sequence.logprobs for sequence in sequences], np.float32),
            _flat(versions, np.int32),
        )
        spans = [(len(sequence), sequence.policy_versions is not None) for sequence in sequences]
        members = [(len(member.sequences), {name: getattr(member, name) for name in _OF_MEMBER}) for member in self.trajectories]
        return _unpickled, (self.group_id, self.rejected, self.exceptions, self.sft, arrays, spans, members)

    @property
    def indices(self) -> list[int]:
        """For each of `trajectories`, its index in the group as it was sent."""
        lost = {member.index for member in self.rejected}
        return [index for index in range(len(self.trajectories) + len(lost)) if index not in lost]

    @property
    def truncated(self) -> int:
        """Trajectories with a sequence that was cut."""
        return sum(trajectory.truncated > 0 for trajectory in self.trajectories)

    @cached_property
    def tokens(self) -> int:
        """All tokens, context included."""
        return sum(trajectory.tokens for trajectory in self.trajectories)

    @cached_property
    def trainable_tokens(self) -> int:
        """Sampled tokens."""
        return sum(trajectory.trainable_tokens for trajectory in self.trajectories)

    @property
    def zero_variance(self) -> bool:
        """Whether the rewards are equal but for rounding; see `without_variance`."""
        return without_variance([trajectory.reward for trajectory in self.trajectories])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays: what the group costs in memory."""
        return sum(sequence.nbytes for trajectory in self.trajectories for sequence in trajectory.sequences)


def _flat(arrays: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _unpickled(  # noqa: PLR0917 - the order of a pickle
    group_id: str,
    rejected: tuple[RejectedTrajectory, ...],
    exceptions: int,
    sft: bool,
    arrays: tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.int32]],
    spans: list[tuple[int, bool]],
    members: list[tuple[int, dict[str, Any]]],
) -> TokenizedGroup:
    """A group whose sequences are stretches of its flat arrays."""
    token_ids, trainable, logprobs, versions = arrays
    made: list[TokenSequence] = []
    at = at_versions = 0
    for length, has_versions in spans:
        stop = at + length
        made.append(
            TokenSequence(
                token_ids=token_ids[at:stop],
                trainable=trainable[at:stop],
                logprobs=logprobs[at:stop],
                policy_versions=versions[at_versions : at_versions + length] if has_versions else None,
            )
        )
        at, at_versions = stop, at_versions + length * has_versions
    sequences = iter(made)
    trajectories = tuple(TokenizedTrajectory(sequences=tuple(islice(sequences, count)), **of_member) for count, of_member in members)
    return TokenizedGroup(group_id=group_id, trajectories=trajectories, rejected=rejected, exceptions=exceptions, sft=sft)
