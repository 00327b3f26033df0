"""`--where`: what an expression means, and that nothing but the whitelist passes."""

import pytest
from tests.producers.conftest import make_group

from headrace.consumers.replay.where import Where, WhereError
from headrace.schemas.codec import SampledGroup, sampled
from headrace.schemas.trajectory import TrajectoryGroup


@pytest.fixture
def group() -> SampledGroup:
    """Rewards 0 and -2, three tokens each; versions 4 to 6; the second trajectory's task is its own."""
    found: TrajectoryGroup = make_group(-2.0, group_id="g7", metadata={"task": "sums", "my task": "x", "hard": True})
    for trajectory in found.trajectories:
        trajectory.initial_policy_version, trajectory.final_policy_version = 4, 6
    found.trajectories[1].metadata["task"] = "products"
    found.trajectories[1].metrics["turns"] = 3
    return sampled(found)


@pytest.mark.parametrize(
    "text",
    [
        "reward < 0",
        "-3 < reward <= -2",
        "reward == 0",
        "max_reward == 0 and min_reward == -2 and mean_reward == -1.0",
        "tokens == 3",
        "initial_policy_version >= 4 and final_policy_version < 7",
        "group_id == 'g7'",
        "job_id == null",
        "metadata.task == 'sums'",
        "metadata['my task'] == \"x\"",
        "metadata.hard == true",
        "metrics.turns > 2",
        "metadata.absent == None",
        "trajectories == 2 and exceptions == 0",
        "not (reward > 0 or tokens > 3)",
    ],
)
def test_an_expression_holds_where_it_holds_for_one_trajectory(text: str, group: SampledGroup) -> None:
    assert Where.parse(text).fits(group)


@pytest.mark.parametrize(
    "text",
    [
        "reward > 0",
        "reward == 0 and reward == -2",  # of two different trajectories
        "reward == 0 and metadata.task == 'products'",
        "metadata.absent < 1",  # what is missing is neither less ...
        "metadata.absent >= 1",  # ... nor greater
        "metadata.task < 3",  # nor is a text, of a number
        "group_id != 'g7'",
        "job_id != null",
    ],
)
def test_an_expression_does_not_hold_where_no_single_trajectory_fits(text: str, group: SampledGroup) -> None:
    assert not Where.parse(text).fits(group)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no expression"),
        ("reward <", "is no expression"),
        ("reward\x00 < 1", "is no expression"),
        ("(" * 400, "is no expression"),
        ("reward < 1 " + "or reward < 1 " * 400, "at most 2000"),
        ("reward", "'reward' alone is no condition"),
        ("reward and tokens > 2", "'reward' alone is no condition"),
        ("rewards < 0", "there is no 'rewards'; there are reward, tokens"),
        ("task == 'sums'", "there is no 'task'"),
        ("reward.real < 0", "there is no 'reward.real'"),
        ("metadata.task.upper() == 'A'", "can't be compared"),
        ("metadata == 'sums'", "name one, as in metadata.task"),
        ("metadata[0] == 'sums'", "can't be compared"),
        ("reward < 'a'", "reward is a number and 'a' a text"),
        ("group_id == 3", "group_id is a text and 3 a number"),
        ("reward < null", "can't be compared that way"),
        ("reward is None", "compares with Is; possible are < <= > >= == !="),
        ("'g' in group_id", "compares with In"),
        ("reward + 1 < 2", "'reward + 1' can't be compared"),
        ("__import__('os').system('true') == 0", "can't be compared"),
        ("[r for r in metadata]", "can't be used"),
        ("(lambda: 1)() < 2", "can't be compared"),
        ("(reward := 1) < 2", "can't be compared"),
        ("f'{reward}' == 'a'", "can't be compared"),
        ("~(reward < 1)", "can't be used"),
        ("reward < 1j", "can't be compared"),
        ("group_id == b'g7'", "can't be compared"),
    ],
)
def test_what_is_not_in_the_language_is_refused_with_what_is(text: str, said: str) -> None:
    with pytest.raises(WhereError) as refused:
        Where.parse(text)
    assert said in str(refused.value)
