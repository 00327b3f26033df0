"""Settings of a model from a preset, a file and options."""

from pathlib import Path

import pytest

from headrace.cli.model_settings import ModelSettingsError, model_settings
from headrace.core.presets import preset


def test_a_file_wins_over_a_preset_and_options_win_over_both(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("base_model: tiny\ntrain: {epsilon: 0.1, epsilon_high: 0.5}\n")
    train = model_settings(file, {"train.epsilon_high": 0.6, "train.learning_rate": None}, preset("dapo")).train
    assert (train.loss_fn, train.loss_aggregation, train.rescale_advantages) == ("ppo", "token_mean", False)
    assert (train.epsilon, train.epsilon_high) == (0.1, 0.6)
    assert train.learning_rate is None


def test_a_file_that_contradicts_a_preset_is_refused_with_both_names(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("base_model: tiny\ntrain: {ppo: false}\n")
    with pytest.raises(ModelSettingsError, match="train: Value error, loss_fn='ppo' contradicts ppo=False"):
        model_settings(file, {}, preset("grpo"))


@pytest.mark.parametrize("content", ["base_model: tiny\ntrain: 3\n", "base_model: tiny\ntrain: [1]\n"])
def test_a_train_section_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.yaml").write_text(content)
    with pytest.raises(ModelSettingsError, match="train must be an object"):
        model_settings(tmp_path / "model.yaml", {}, preset("grpo"))
