"""Groups on their way between processes."""

import pickle

import numpy as np

from headrace.schemas.reasons import RejectionReason
from headrace.trainer.groups import RejectedTrajectory, TokenizedGroup, TokenizedTrajectory, TokenSequence


def sequence(*ids: int, versions: bool) -> TokenSequence:
    n = len(ids)
    return TokenSequence(
        token_ids=np.array(ids, np.int32),
        trainable=np.arange(n) > 0,
        logprobs=np.array([np.nan, *[-0.1 * i for i in ids[1:]]], np.float32),
        policy_versions=np.arange(n, dtype=np.int32) if versions else None,
    )


def content(group: TokenizedGroup) -> list[object]:
    arrays = [
        (
            s.token_ids.tolist(),
            s.trainable.tolist(),
            s.logprobs.tobytes(),
            None if s.policy_versions is None else s.policy_versions.tolist(),
        )
        for trajectory in group.trajectories
        for s in trajectory.sequences
    ]
    members = [(len(t.sequences), t.reward, t.initial_policy_version, t.final_policy_version, t.truncated) for t in group.trajectories]
    return [group.group_id, group.rejected, group.exceptions, group.sft, arrays, members]


def test_a_group_comes_out_of_a_pickle_as_it_went_in() -> None:
    lost = RejectedTrajectory(index=1, reason=RejectionReason.TOO_LONG, detail="d")
    two = TokenizedTrajectory(reward=0.5, sequences=(sequence(1, 2, versions=True), sequence(3, 4, 5, versions=False)), truncated=1)
    one = TokenizedTrajectory(reward=-1.0, sequences=(sequence(6, 7, versions=True),), initial_policy_version=0, final_policy_version=2)
    for group in (
        TokenizedGroup(group_id="g", trajectories=(two, one), rejected=(lost,), exceptions=2, sft=True),
        TokenizedGroup(group_id="without", trajectories=(), rejected=(lost,)),
    ):
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            again = pickle.loads(pickle.dumps(group, protocol))  # noqa: S301 - our own
            assert content(again) == content(group)
            assert (again.tokens, again.trainable_tokens, again.nbytes) == (group.tokens, group.trainable_tokens, group.nbytes)


def test_a_pickle_does_not_grow_with_the_number_of_arrays() -> None:
    """A plan of a thousand short rollouts would else be thousands of small arrays, 5 µs each on either side."""
    members = tuple(TokenizedTrajectory(reward=float(i), sequences=(sequence(1, 2, 3, versions=True),)) for i in range(100))
    group = TokenizedGroup(group_id="g", trajectories=members)
    assert len(pickle.dumps(group, pickle.HIGHEST_PROTOCOL)) < 2 * group.nbytes + 4000
