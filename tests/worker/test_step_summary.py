"""What the worker logs of a step: its numbers, and why it trained nothing."""

from tests.core.ledgers import record

from headrace.consumers.worker.ledger_record import step_summary, why_nothing_trained

METRICS = {"tokens": 2000.0, "reward_mean": 0.25, "entropy": 1.5, "groups_zero_variance": 1.0}


def test_a_line_has_reward_groups_without_variance_entropy_loss_and_tokens_a_second() -> None:
    line = step_summary("solver", record(3, offsets=[7, 8], metrics=METRICS, loss=0.125), 2.0)
    assert line == ("step 3 of solver: 2 groups, 1 of them without variance, reward 0.25, entropy 1.5, loss 0.125, 1,000 tokens/s, 2.000 s")


def test_a_step_whose_rewards_are_all_equal_says_so() -> None:
    flat = record(1, offsets=[7], metrics={"groups_zero_variance": 1.0})
    assert "all rewards are equal in each of its 1 groups" in str(why_nothing_trained(flat))
    assert why_nothing_trained(record(1, offsets=[7, 8], metrics={"groups_zero_variance": 1.0})) is None


def test_a_step_without_an_update_says_so_and_a_rebased_one_does_not() -> None:
    assert "no trajectory of it can be trained on" in str(why_nothing_trained(record(2, offsets=[7], updates=0)))
    assert why_nothing_trained(record(2, cut="rebased", updates=0)) is None
