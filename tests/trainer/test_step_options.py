"""What options of a config do to a whole step: updates, rates, references, supervised jobs, plots."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.tiny import ONE_THREAD, group, random_groups, sequence

from headrace.core.errors import HeadraceError
from headrace.schemas.state import RewardTrend, TrainingScalars
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.model import load_base
from headrace.trainer.plan import BaseSource, KlReference, StepPlan, StepResult
from headrace.trainer.reward_trend import reward_deviation
from headrace.trainer.world import WorldSettings

Plans = Callable[..., StepPlan]
BASE = KlReference(kind="base")


@pytest.fixture(scope="module")
def engine() -> TrainingEngine:
    return TrainingEngine(ONE_THREAD)


def weights_of(plan: StepPlan) -> dict[str, torch.Tensor]:
    (path,) = Path(plan.out_dir, "weights").glob("*.safetensors")
    return dict(load_file(path))


def moved(one: StepPlan, other: StepPlan) -> float:
    a, b = weights_of(one), weights_of(other)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def logprobs_under(model: torch.nn.Module, plan: StepPlan) -> list[torch.Tensor]:
    """Of each trajectory's sampled tokens, one sequence at a time."""
    found = []
    with torch.no_grad():
        for g in plan.groups:
            for t in g.trajectories:
                ids = torch.from_numpy(t.sequences[0].token_ids).long()
                scores = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
                found.append(scores[torch.from_numpy(t.sequences[0].trainable)[1:]])
    return found


def test_rows_per_update_make_several_updates_inside_one_step(engine: TrainingEngine, make_plan: Plans):
    config = TrainConfig(learning_rate=1e-3, packed_sequence_length=32, grad_accumulation_sequences=2)
    many = engine.run(make_plan(config=config, attempt="many"))
    one = engine.run(make_plan(config=config.model_copy(update={"grad_accumulation_sequences": None}), attempt="one"))
    assert one.updates == 1
    assert many.updates == math.ceil(one.num_sequences / 2) > 1
    assert many.key.step == one.key.step == 1
    assert many.scalars.updates == many.updates
    assert many.metrics["trainable_tokens"] == one.metrics["trainable_tokens"]


def test_rows_per_update_that_ranks_cannot_share_are_refused_with_both_numbers(make_plan: Plans):
    from headrace.trainer.batches import RowShape, policy_updates  # noqa: PLC0415 - next to its use
    from headrace.trainer.options import resolve  # noqa: PLC0415 - as above

    options = resolve(TrainConfig(grad_accumulation_sequences=3))
    with pytest.raises(HeadraceError, match="grad_accumulation_sequences is 3, but this world has 2 ranks"):
        policy_updates(make_plan().groups, options, RowShape(tokens=64, ranks=2, alone=False), 0)


def test_an_update_has_as_many_rows_as_its_tokens_allow_and_at_least_one_a_rank(make_plan: Plans):
    from headrace.trainer.batches import RowShape, policy_updates  # noqa: PLC0415 - next to its use
    from headrace.trainer.options import resolve  # noqa: PLC0415 - as above

    groups = make_plan().groups
    for ranks in (1, 2):
        shape = RowShape(tokens=64, ranks=ranks, alone=False)
        (whole,) = policy_updates(groups, resolve(TrainConfig(packed_sequence_length=32)), shape, 0)
        rows = [len(row) for row in whole.rows]
        for most, count in ((8, len(whole.micro_steps)), (2 * max(rows) * ranks, None), (sum(rows), 1)):
            options = resolve(TrainConfig(packed_sequence_length=32, max_tokens_per_update=most))
            updates = policy_updates(groups, options, shape, 0)
            assert [len(row) for update in updates for row in update.rows] == rows
            assert all(len(update.micro_steps) == 1 or sum(map(len, update.rows)) <= most for update in updates)
            assert len(updates) == count or (count is None and 1 < len(updates) < len(whole.micro_steps))


def test_an_update_has_at_most_so_many_trajectories_and_all_weigh_alike(make_plan: Plans):
    from headrace.trainer.batches import RowShape, policy_updates  # noqa: PLC0415 - next to its use
    from headrace.trainer.options import resolve  # noqa: PLC0415 - as above

    groups = make_plan().groups
    shape = RowShape(tokens=64, ranks=1, alone=False)
    (whole,) = policy_updates(groups, resolve(TrainConfig(packed_sequence_length=32)), shape, 0)
    total = sum(float(row.weights_N.sum()) for row in whole.rows)
    for tokens in (None, 32):
        options = resolve(TrainConfig(packed_sequence_length=32, max_trajectories_per_update=3, max_tokens_per_update=tokens))
        updates = policy_updates(groups, options, shape, 0)
        owners = [
            {
                (update.owners[branch].group, update.owners[branch].trajectory)
                for row in update.rows
                for branch in set(row.branches_N.tolist())
            }
            for update in updates
        ]
        assert [len(found) for found in owners] == [update.trajectories for update in updates]
        assert max(map(len, owners)) == 3 if tokens is None else max(map(len, owners)) <= 3
        # Each is in one update, in the order of the groups.
        assert sorted(set.union(*owners)) == sorted({(owner.group, owner.trajectory) for owner in whole.owners})
        if tokens is None:
            assert [place for found in owners for place in sorted(found)] == sorted(set.union(*owners))
            assert len(updates) == math.ceil(whole.trajectories / 3) > 1
        assert all(sum(float(row.weights_N.sum()) for row in update.rows) == pytest.approx(total, rel=1e-5) for update in updates)


def test_the_rate_warms_up_over_the_updates_of_a_models_life(engine: TrainingEngine, make_plan: Plans):
    first = engine.run(make_plan(warmup_updates=3))
    second = engine.run(make_plan(first.key, warmup_updates=3, scalars=first.scalars))
    assert [first.scalars.updates, second.scalars.updates] == [1, 2]
    assert [first.metrics["learning_rate"], second.metrics["learning_rate"]] == pytest.approx([0.25e-3, 0.5e-3])


def test_the_rate_follows_the_deviation_of_rewards_and_the_trend_goes_on(engine: TrainingEngine, make_plan: Plans):
    groups = random_groups(1)
    # Deviations 0.4 and 0.3 at steps 1 and 2: the line is 0.5 - 0.1 step, so at step 2 the rate is 0.3 / 0.5 of itself.
    trend = RewardTrend(n=2, x=3.0, y=0.7, xx=5.0, xy=1.0, last_x=2.0)
    scalars = TrainingScalars(updates=2, reward_trend=trend)
    config = TrainConfig(learning_rate=1e-3, scale_learning_rate_by_reward_std_dev=True)
    result = engine.run(make_plan(groups=groups, config=config, scalars=scalars))
    assert result.metrics["learning_rate"] == pytest.approx(0.6e-3)
    after = result.scalars.reward_trend
    assert (after.n, after.last_x) == (3, 1.0)
    assert after.y == pytest.approx(0.7 + (reward_deviation(groups) or 0))
    unscaled = engine.run(make_plan(groups=groups, config=TrainConfig(learning_rate=1e-3), scalars=scalars))
    assert unscaled.metrics["learning_rate"] == 1e-3


def test_the_rate_grows_with_the_trajectories_of_the_whole_update(engine: TrainingEngine, make_plan: Plans):
    """Counted over all rows, and a trajectory of several histories once."""
    from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory  # noqa: PLC0415 - next to its use

    trajectories = tuple(
        TokenizedTrajectory(reward=float(r), sequences=(sequence([1, r], [3, 4], [-1, -1]), sequence([9, r], [7], [-1]))) for r in range(4)
    )
    plan = make_plan(
        groups=(TokenizedGroup(group_id="g", trajectories=trajectories),),
        config=TrainConfig(learning_rate=1e-3, num_trajectories_learning_rate_multiplier_power=0.5, packed_sequence_length=8),
    )
    result = engine.run(plan)
    assert result.num_sequences > 1
    assert result.metrics["learning_rate"] == pytest.approx(1e-3 * 4**0.5)


@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_kl_to_the_base_model_is_zero_at_the_first_step_and_not_later(engine: TrainingEngine, make_plan: Plans, adaptation: str):
    config = TrainConfig(learning_rate=1e-2, kl_penalty_coef=0.5)
    first = engine.run(make_plan(config=config, reference=BASE, adaptation=adaptation, attempt="kl"))
    plain = make_plan(config=TrainConfig(learning_rate=1e-2), adaptation=adaptation, attempt="plain")
    engine.run(plain)
    assert first.metrics["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert moved(make_plan(adaptation=adaptation, attempt="kl"), plain) < 1e-6, "a reference equal to the learner changes nothing"
    again = make_plan(config=config, reference=BASE, adaptation=adaptation, attempt="kl")
    state = engine.run(again).key
    second = engine.run(make_plan(state, config=config, reference=BASE, adaptation=adaptation, attempt="kl"))
    assert second.metrics["kl_reference"] > 1e-4


def test_the_reference_is_the_named_step_and_the_learner_is_itself_again_bit_for_bit(make_plan: Plans, tiny: BaseSource):
    engine = TrainingEngine(ONE_THREAD)
    first = make_plan(attempt="first")
    state = engine.run(first).key
    reference = KlReference(kind="weights", folder=str(Path(first.out_dir, "weights")))
    # A coefficient too small to change a bit of the update, but large enough to ask for the passes.
    config = TrainConfig(learning_rate=1e-3, kl_penalty_coef=1e-30)
    second = make_plan(state, attempt="second", config=config)
    state = engine.run(make_plan(state, attempt="second", config=TrainConfig(learning_rate=1e-3))).key
    plain = weights_of(second)
    third_plain = make_plan(state, attempt="third")
    expected = logprobs_under(load_base(BaseSource(path=str(Path(first.out_dir, "weights")))), third_plain)
    learner = logprobs_under(load_base(BaseSource(path=str(Path(second.out_dir, "weights")))), third_plain)
    result = engine.run(make_plan(state, attempt="third", config=config, reference=reference))
    k3 = torch.cat([(e - n).exp() - 1 - (e - n) for e, n in zip(expected, learner, strict=True)])
    assert result.metrics["kl_reference"] == pytest.approx(float(k3.mean()), rel=1e-3)
    unpenalised = make_plan(state, attempt="third-plain", load_from=Path(second.out_dir, "snapshot"))
    TrainingEngine(ONE_THREAD).run(unpenalised)
    assert moved(make_plan(state, attempt="third"), unpenalised) == 0.0
    assert plain.keys() == weights_of(third_plain).keys()


def test_a_reference_of_another_shape_is_refused_by_name(engine: TrainingEngine, make_plan: Plans, make_base: Callable[..., BaseSource]):
    other = make_base(intermediate_size=48)
    reference = KlReference(kind="weights", folder=other.path)
    with pytest.raises(HeadraceError, match=r"mlp\.\w+\.weight has shape \[.*48.*\] in the KL reference model.safetensors"):
        engine.run(make_plan(config=TrainConfig(kl_penalty_coef=0.1), reference=reference))


def test_a_reference_without_the_file_that_is_needed_is_refused(engine: TrainingEngine, make_plan: Plans, tmp_path: Path):
    with pytest.raises(HeadraceError, match=r"no adapter_model\.safetensors: a model trained as lora needs one"):
        engine.run(
            make_plan(
                adaptation="lora", config=TrainConfig(kl_penalty_coef=0.1), reference=KlReference(kind="weights", folder=str(tmp_path))
            )
        )


def published_adapter(engine: TrainingEngine, make_plan: Plans) -> Path:
    """The folder of the adapter that a step made."""
    plan = make_plan(adaptation="lora", attempt="reference")
    engine.run(plan)
    return Path(plan.out_dir, "weights")


def test_a_reference_adapter_of_another_scale_is_refused(engine: TrainingEngine, make_plan: Plans):
    """Its tensors fit, but the model would multiply them by a number that they were not trained with."""
    folder = published_adapter(engine, make_plan)
    path = folder / "adapter_config.json"
    config = TrainConfig(kl_penalty_coef=0.1)
    path.write_text(path.read_text().replace('"lora_alpha": 8', '"lora_alpha": 64'))
    with pytest.raises(HeadraceError, match=r"lora_alpha is 64 in the KL reference adapter_config\.json, the model's is 8"):
        engine.run(make_plan(adaptation="lora", config=config, reference=KlReference(kind="weights", folder=str(folder))))


def test_a_truncated_reference_adapter_is_refused_by_name(engine: TrainingEngine, make_plan: Plans):
    folder = published_adapter(engine, make_plan)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(HeadraceError, match=r"the KL reference adapter_model\.safetensors can't be read, it may be truncated"):
        engine.run(
            make_plan(adaptation="lora", config=TrainConfig(kl_penalty_coef=0.1), reference=KlReference(kind="weights", folder=str(folder)))
        )


def test_kl_from_the_sampler_fills_missing_log_probabilities_with_the_learners(engine: TrainingEngine, make_plan: Plans):
    groups = (group([0, 1], [sequence([1, 2], [3, 4], [-1.0, math.nan]), sequence([1, 2], [5, 6], [-2.0, -3.0])]),)
    config = TrainConfig(learning_rate=1e-3, kl_penalty_coef=0.5, kl_penalty_source="sample")
    result = engine.run(make_plan(groups=groups, config=config, reference=BASE))
    assert math.isfinite(result.loss or math.nan)
    assert result.metrics["logprobs_missing"] == 1


@pytest.mark.parametrize("value", [-math.inf, math.inf, -9999.0, math.nan])
def test_a_step_is_finite_whatever_log_probability_is_stored(engine: TrainingEngine, make_plan: Plans, value: float):
    for config in (TrainConfig(learning_rate=1e-3), TrainConfig(learning_rate=1e-3, ppo=True, importance_sampling_level="sequence")):
        groups = (group([0, 1], [sequence([1, 2], [3, 4], [value, -1.0]), sequence([1, 2], [5, 6], [-2.0, value])]),)
        plan = make_plan(groups=groups, config=config)
        result = engine.run(plan)
        assert result.loss is not None and math.isfinite(result.loss)  # noqa: PT018 - one thing
        assert result.grad_norm is not None and math.isfinite(result.grad_norm)  # noqa: PT018 - one thing
        assert all(bool(tensor.isfinite().all()) for tensor in weights_of(plan).values())


def test_recomputed_log_probabilities_anchor_the_ratio_at_the_learner_before_the_step(engine: TrainingEngine, make_plan: Plans):
    config = TrainConfig(learning_rate=1e-3, precalculate_logprobs=True)
    metrics = engine.run(make_plan(config=config)).metrics
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (1.0, 1.0)
    # In later updates of the step the learner has moved, the anchor has not.
    several = config.model_copy(update={"learning_rate": 1e-2, "packed_sequence_length": 32, "grad_accumulation_sequences": 1})
    metrics = engine.run(make_plan(config=several)).metrics
    assert metrics["ratio_max"] > 1.001


def test_an_update_that_leaves_float32_is_not_taken(engine: TrainingEngine, make_plan: Plans):
    """A finite gradient does not mean finite weights: weight decay alone may overflow."""
    plan = make_plan(weight_decay=1e300)
    with pytest.raises(HeadraceError, match="infinite or NaN: lower the learning rate or the weight decay"):
        engine.run(plan)
    assert not Path(plan.out_dir).exists()


@pytest.mark.parametrize(
    "config",
    [
        {"epsilon": 1e9, "epsilon_high": 1e9, "kimi_k2_tau": 1e6, "max_negative_advantage_importance_sampling_weight": 1e9},
        {"ppo": True, "epsilon": 1e9, "epsilon_high": 1e9, "kimi_k2_tau": -1e6},
        {"truncated_importance_sampling": 1e9, "precalculate_logprobs": True, "kl_penalty_coef": 1e6},
        {"kl_loss_coef": 1e6},
        {"loss_aggregation": "constant_norm", "loss_aggregation_constant": 1e-3},
        {"loss_aggregation": "constant_norm", "loss_aggregation_constant": 1e12, "grad_accumulation_sequences": 1},
    ],
)
def test_a_step_is_finite_at_the_ends_of_what_a_config_may_say(engine: TrainingEngine, make_plan: Plans, config: dict[str, object]):
    result = engine.run(make_plan(config=TrainConfig.model_validate({"packed_sequence_length": 32} | config), reference=BASE))
    assert result.loss is not None
    assert math.isfinite(result.loss)


def sft_groups(count: int) -> tuple[object, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        group([0.0], [sequence(rng.integers(0, 256, 4).tolist(), rng.integers(0, 256, int(n)).tolist())], f"s{i}")
        for i, n in enumerate(rng.integers(2, 9, count))
    )


@pytest.mark.parametrize("batch_size", [2, "auto", 3, 100])
def test_a_supervised_job_makes_its_updates_inside_one_step(engine: TrainingEngine, make_plan: Plans, batch_size: int | Literal["auto"]):
    config = SftConfig(batch_size=batch_size, epochs=3, learning_rate=1e-3)
    result = engine.run(make_plan(groups=sft_groups(7), sft=config))
    size = 2 if batch_size == "auto" else batch_size
    assert result.updates == 3 * math.ceil(7 / size)
    assert result.key.step == 1
    assert result.scalars.updates == 0, "a supervised job moves no schedule of the policy's"


def test_a_supervised_update_is_adamw_on_the_mean_cross_entropy(engine: TrainingEngine, make_plan: Plans, tiny: BaseSource):
    groups = sft_groups(4)
    config = SftConfig(batch_size=4, learning_rate=1e-3, max_grad_norm=0.5)
    plan = make_plan(groups=groups, sft=config, eps=1e-4)
    result = engine.run(plan)
    model = load_base(tiny)
    losses = []
    for g in groups:
        (s,) = g.trajectories[0].sequences
        ids = torch.from_numpy(s.token_ids).long()
        losses.append(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, 3:-1], ids[4:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.0).step()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    got = weights_of(plan)
    assert max(float((got[name] - p.detach()).abs().max()) for name, p in model.named_parameters()) < 1e-6


def test_supervised_training_learns_its_examples_and_ignores_what_a_sampler_said(make_plan: Plans):
    groups = sft_groups(3)
    config = SftConfig(batch_size=3, epochs=60, learning_rate=1e-2, schedule="cosine", warmup_updates=5)
    engine = TrainingEngine(ONE_THREAD)
    first = engine.run(make_plan(groups=groups, sft=SftConfig(batch_size=3, learning_rate=1e-9), attempt="before"))
    last = engine.run(make_plan(groups=groups, sft=config, attempt="after"))
    again = engine.run(make_plan(last.key, groups=groups, sft=SftConfig(batch_size=3, learning_rate=1e-9), attempt="check"))
    assert (again.loss or math.inf) < 0.3 * (first.loss or 0)
    said = tuple(group([1.0], [sequence([1, 2], [3], [-0.5])], "a") for _ in range(2))
    silent = tuple(group([0.0], [sequence([1, 2], [3])], "a") for _ in range(2))
    one, other = (engine.run(make_plan(groups=g, sft=SftConfig(), attempt=str(i))) for i, g in enumerate((said, silent)))
    assert (one.loss, one.plan_digest) == (other.loss, other.plan_digest)


def test_a_supervised_job_with_nothing_to_train_ends_well(engine: TrainingEngine, make_plan: Plans):
    result = engine.run(make_plan(groups=(), sft=SftConfig()))
    assert (result.updates, result.loss, result.key.step) == (0, None, 1)


def test_plots_are_pictures_of_the_packed_tensors(engine: TrainingEngine, make_plan: Plans):
    from PIL import Image  # noqa: PLC0415 - matplotlib brings it

    plan = make_plan(config=TrainConfig(learning_rate=1e-3, plot_tensors=True))
    with_plots = engine.run(plan)
    files = sorted(Path(plan.out_dir, "plots").iterdir())
    assert [path.name for path in files] == ["advantages.png", "logprobs.png", "positions.png", "segments.png", "tokens.png", "weights.png"]
    for path in files:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.size[0] >= 1000
            assert len(set(image.convert("RGB").getdata())) > 8, "more than one colour is drawn"
    without = engine.run(make_plan(attempt="without"))
    assert (with_plots.loss, with_plots.plan_digest) == (without.loss, without.plan_digest)


def test_nothing_is_drawn_of_a_step_without_rows(engine: TrainingEngine, make_plan: Plans):
    constant = group([1, 1], [sequence([1], [2], [-1])] * 2)
    plan = make_plan(groups=(constant,), config=TrainConfig(plot_tensors=True))
    engine.run(plan)
    assert not Path(plan.out_dir, "plots").exists()


def test_chunks_of_the_vocabulary_projection_change_no_bit_worth_mentioning(engine: TrainingEngine, make_plan: Plans):
    plans = [
        make_plan(config=TrainConfig(learning_rate=1e-3, logprob_calculation_chunk_size=size), attempt=f"chunk{size}", eps=1e-4)
        for size in (1, 7, 4096)
    ]
    results: list[StepResult] = [engine.run(plan) for plan in plans]
    assert all(moved(plan, plans[0]) < 1e-6 for plan in plans)
    assert [r.loss for r in results] == pytest.approx([results[0].loss] * 3, rel=1e-5)


def test_activations_are_computed_again_where_that_is_asked_for(make_plan: Plans, monkeypatch: pytest.MonkeyPatch):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP  # noqa: PLC0415 - seconds

    counts = []
    plain = Qwen3MLP.forward

    def counted(self: object, x: torch.Tensor) -> torch.Tensor:
        counts.append(1)
        return plain(self, x)

    monkeypatch.setattr(Qwen3MLP, "forward", counted)
    calls = {}
    for recompute in (False, True):
        engine = TrainingEngine(WorldSettings(threads=1, activation_checkpointing=recompute))
        state = engine.run(make_plan(attempt=str(recompute))).key
        counts.clear()
        engine.run(make_plan(state, attempt=str(recompute)))
        calls[recompute] = len(counts)
    assert calls[True] == 2 * calls[False]


def test_lags_are_counted_from_the_tokens_own_versions(engine: TrainingEngine, make_plan: Plans):
    from dataclasses import replace  # noqa: PLC0415 - next to its use

    groups = random_groups(0, groups=1, rollouts=2)
    trajectories = []
    for t in groups[0].trajectories:
        (s,) = t.sequences
        versions = np.where(s.trainable, 0, -1).astype(np.int32)
        trajectories.append(replace(t, sequences=(replace(s, policy_versions=versions),)))
    plan = make_plan(attempt="zero")
    state = engine.run(plan).key
    metrics = engine.run(make_plan(state, groups=(replace(groups[0], trajectories=tuple(trajectories)),))).metrics
    assert metrics["lag_tokens_1"] == metrics["trainable_tokens"]
    assert metrics["lag_max"] == 1
