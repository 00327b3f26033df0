"""Groups for tests: two rollouts of a few tokens, one right, one wrong."""

from headrace.schemas.chat import Choice, ChoiceMessage, Message
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup


def trajectory(reward: float, tokens: list[int], *, version: int | None = 0, prompt: list[int] | None = None) -> Trajectory:
    """One rollout that sampled `tokens` (ids of the tiny model, below 32)."""
    choice = Choice(
        finish_reason="stop",
        message=ChoiceMessage(content="a"),
        token_ids=tokens,
        token_logprobs=[-1.0 - 0.1 * i for i in range(len(tokens))],
        prompt_token_ids=prompt or [2, 7, 8, 1, 3],
    )
    return Trajectory(
        messages_and_choices=[Message(role="user", content="a b"), choice],
        reward=reward,
        initial_policy_version=version,
        final_policy_version=version,
    )


def group(name: str | None, *, seed: int = 0, version: int | None = 0, job_id: str | None = None) -> TrajectoryGroup:
    """A group with variance; `seed` varies its tokens."""
    return TrajectoryGroup(
        trajectories=[
            trajectory(1.0, [9 + seed % 8, 10, 1], version=version),
            trajectory(0.0, [11, 12 + seed % 8, 13, 1], version=version),
        ],
        group_id=name,
        job_id=job_id,
    )
