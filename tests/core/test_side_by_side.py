"""Two ledgers side by side: which numbers is next to each other, and what is said of them."""

import orjson
import pytest
from tests.core.ledgers import record

from headrace.core.ledger import ranges_text
from headrace.core.side_by_side import METRICS, option_differences, side_by_side
from headrace.schemas.training import ModelSettings, SftConfig, TrainConfig


def test_numbers_of_a_step_stand_beside_each_other_with_b_minus_a():
    a = [record(1, loss=0.5, metrics={"reward_mean": 1.0, "ratio_mean": 1.0}), record(2, loss=0.25)]
    b = [record(1, loss=0.75, metrics={"reward_mean": 0.5}), record(2, loss=None)]
    first, second = side_by_side(a, b).steps
    assert [(m.name, m.a, m.b, m.difference) for m in first.metrics] == [
        ("loss", 0.5, 0.75, 0.25),
        ("grad_norm", 1.0, 1.0, 0.0),
        ("reward_mean", 1.0, 0.5, -0.5),
        ("ratio_mean", 1.0, None, None),
    ]
    assert [(m.name, m.a, m.b, m.difference) for m in second.metrics] == [("loss", 0.25, None, None), ("grad_norm", 1.0, 1.0, 0.0)]


def test_a_step_that_only_one_has_is_there_without_numbers_of_the_other():
    table = side_by_side([record(1), record(2)], [record(2), record(3, cut="job")])
    assert [(pair.step, pair.cut_a, pair.cut_b) for pair in table.steps] == [
        (1, "groups_per_step", None),
        (2, "groups_per_step", "groups_per_step"),
        (3, None, "job"),
    ]
    assert {m.b for m in table.steps[0].metrics} == {None}


def test_digests_and_offsets_say_what_is_equal_and_up_to_where():
    a = [record(step, weights=f"w{step}", plan=f"p{step}", offsets=[step]) for step in (1, 2, 3, 4)]
    b = [
        record(1, weights="w1", plan="p1", offsets=[1]),
        record(2, weights="w2", plan="p2", offsets=[2]),
        record(3, weights="other", plan="p3", offsets=[3]),
        record(4, weights="w4", plan="other", offsets=[9]),
    ]
    table = side_by_side(a, b)
    assert [(pair.same_groups, pair.same_plan, pair.same_weights) for pair in table.steps] == [
        (True, True, True),
        (True, True, True),
        (True, True, False),
        (False, False, True),
    ]
    assert table.same_weights_through == 2
    assert side_by_side(a[2:], b[2:]).same_weights_through is None


def test_the_summary_is_over_the_steps_where_both_have_the_metric():
    a = [record(1, loss=1.0), record(2, loss=3.0), record(3, loss=100.0)]
    b = [record(1, loss=1.5), record(2, loss=1.0), record(3, loss=None)]
    summary = next(each for each in side_by_side(a, b).summary if each.name == "loss")
    assert (summary.steps, summary.mean_a, summary.mean_b, summary.mean_difference) == (2, 2.0, 1.25, -0.75)
    assert (summary.largest_difference, summary.largest_at) == (-2.0, 2)


def test_options_that_differ_come_with_the_steps_where_they_do():
    slow, fast, ppo = TrainConfig(learning_rate=1e-5), TrainConfig(learning_rate=1e-4), TrainConfig(learning_rate=1e-5, ppo=True)
    a = [record(step, config=slow) for step in (1, 2, 3, 4)]
    b = [record(1, config=fast), record(2, config=slow), record(3, config=fast), record(4, config=ppo)]
    assert [(d.name, d.a, d.b, d.steps) for d in side_by_side(a, b).config] == [
        ("config.learning_rate", 1e-5, 1e-4, "1, 3"),
        ("config.ppo", None, True, "4"),
    ]
    throughout = side_by_side(a, [record(step, config=fast) for step in (1, 2, 3, 4, 5)]).config
    assert [(d.name, d.steps) for d in throughout] == [("config.learning_rate", None)]


def test_supervised_settings_are_compared_too():
    a, b = [record(1, sft=SftConfig())], [record(1, sft=SftConfig(epochs=3))]
    assert [(d.name, d.a, d.b) for d in side_by_side(a, b).config] == [("sft.epochs", 1, 3)]
    (whole,) = side_by_side(a, [record(1)]).config
    assert (whole.name, whole.a["epochs"], whole.b) == ("sft", 1, None)


def test_settings_of_models_differ_by_path():
    a, b = (
        ModelSettings(base_model="t"),
        ModelSettings.model_validate({"base_model": "t", "lora": {"r": 4}, "chat_template_kwargs": {"x": 1}}),
    )
    assert [(d.name, d.a, d.b) for d in option_differences(a, b)] == [("lora.r", 16, 4), ("chat_template_kwargs.x", "absent", 1)]


def test_metrics_that_are_asked_for_are_those_compared():
    a = [record(1, metrics={"tokens": 10.0, "reward_mean": 1.0})]
    (pair,) = side_by_side(a, a, ["tokens", "nobody_has_it"]).steps
    assert [m.name for m in pair.metrics] == ["tokens"]
    assert "tokens" not in METRICS


def test_nothing_beside_nothing_is_nothing():
    table = side_by_side([], [])
    assert (table.steps, table.summary, table.config, table.same_weights_through) == ((), (), (), None)


def test_the_table_is_written_as_json():
    table = side_by_side([record(1, loss=0.5)], [record(1, loss=0.25)])
    read = orjson.loads(orjson.dumps(table))
    assert read["steps"][0]["metrics"][0] == {"name": "loss", "a": 0.5, "b": 0.25, "difference": -0.25}


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([1, 2, 3, 7], "1..3, 7"), ([4], "4"), ([2, 1], "1..2")])
def test_numbers_are_said_in_few_words(numbers: list[int], text: str):
    assert ranges_text(numbers) == text
