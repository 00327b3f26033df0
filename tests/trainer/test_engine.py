"""The engine: states, restarts, updates."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.tiny import ONE_THREAD, group, random_groups, sequence

from headrace.core.errors import HeadraceError
from headrace.schemas.training import TrainConfig
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.loss import LossOutput, policy_loss
from headrace.trainer.plan import BaseSource, StateKey, StepPlan, StepResult
from headrace.trainer.training_state import DivergedError, _check

Plans = Callable[..., StepPlan]


@pytest.fixture(scope="module")
def engine() -> TrainingEngine:
    return TrainingEngine(ONE_THREAD)


def weights_of(plan: StepPlan) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(plan.out_dir, "weights").iterdir()}


def run_steps(engine: TrainingEngine, make_plan: Plans, steps: int, **options: object) -> tuple[list[StepResult], StepPlan]:
    state, results, plan = None, [], None
    for _ in range(steps):
        plan = make_plan(state, **options)
        results.append(engine.run(plan))
        state = results[-1].key
    assert plan is not None
    return results, plan


@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_a_step_from_a_snapshot_in_a_new_engine_continues_bit_for_bit(make_plan: Plans, adaptation: str):
    straight, last = run_steps(TrainingEngine(ONE_THREAD), make_plan, 3, adaptation=adaptation, attempt="straight")
    first, plan = run_steps(TrainingEngine(ONE_THREAD), make_plan, 1, adaptation=adaptation, attempt="broken")
    resumed = TrainingEngine(ONE_THREAD)
    second = make_plan(first[0].key, adaptation=adaptation, attempt="broken", load_from=Path(plan.out_dir, "snapshot"))
    results = [*first, resumed.run(second)]
    third = make_plan(results[-1].key, adaptation=adaptation, attempt="broken")
    results.append(resumed.run(third))
    assert [(r.loss, r.grad_norm, r.plan_digest, r.seed) for r in results] == [
        (r.loss, r.grad_norm, r.plan_digest, r.seed) for r in straight
    ]
    assert weights_of(third) == weights_of(last)


def test_a_state_that_was_never_committed_is_not_trained_on(engine: TrainingEngine, make_plan: Plans):
    first = make_plan(attempt="committed")
    committed = engine.run(first).key
    engine.run(make_plan(committed, attempt="lost"))  # its commit was fenced: the rank holds a step 2 that nobody knows
    again = make_plan(committed, attempt="again", load_from=Path(first.out_dir, "snapshot"))
    engine.run(again)
    reference, last = run_steps(TrainingEngine(ONE_THREAD), make_plan, 2, attempt="reference")
    assert reference[-1].key.step == 2
    assert weights_of(again) == weights_of(last)


def test_a_plan_without_the_state_it_starts_from_is_refused(engine: TrainingEngine, make_plan: Plans):
    with pytest.raises(HeadraceError, match="does not hold"):
        engine.run(make_plan(StateKey(model_id="m", incarnation="i", step=4, attempt="elsewhere")))


def test_a_snapshot_of_another_attempt_is_refused(engine: TrainingEngine, make_plan: Plans):
    plan = make_plan()
    key = engine.run(plan).key
    with pytest.raises(HeadraceError, match="needed is"):
        engine.run(make_plan(replace(key, attempt="other"), load_from=Path(plan.out_dir, "snapshot")))


def test_a_truncated_snapshot_fails_the_step_and_nothing_is_resident(engine: TrainingEngine, make_plan: Plans):
    plan = make_plan(attempt="whole")
    key = engine.run(plan).key
    engine.run(make_plan(key, attempt="next"))
    damaged = Path(plan.out_dir, "snapshot", "moments.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid|header|truncat"):
        engine.run(make_plan(key, attempt="retry", load_from=Path(plan.out_dir, "snapshot")))
    with pytest.raises(HeadraceError, match="does not hold"):
        engine.run(make_plan(key, attempt="retry"))


def test_a_step_that_broke_off_between_micro_batches_leaves_nothing_behind(make_plan: Plans, monkeypatch: pytest.MonkeyPatch):
    """Neither the gradients of the first half nor the state that they belong to."""
    _, last = run_steps(TrainingEngine(ONE_THREAD), make_plan, 2, attempt="reference")
    engine = TrainingEngine(ONE_THREAD)
    first = make_plan(attempt="first")
    key = engine.run(first).key
    calls = []

    def breaks_at_the_second(*arguments: Any) -> LossOutput:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room")
        return policy_loss(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("headrace.trainer.update.policy_loss", breaks_at_the_second)
        with pytest.raises(MemoryError):
            engine.run(make_plan(key, attempt="broken", config=TrainConfig(learning_rate=1e-3, packed_sequence_length=32)))
    with pytest.raises(HeadraceError, match="does not hold"):
        engine.run(make_plan(key, attempt="without"))
    again = make_plan(key, attempt="again", load_from=Path(first.out_dir, "snapshot"))
    engine.run(again)
    assert weights_of(again) == weights_of(last)


def test_a_batch_without_variance_changes_no_weight_and_still_writes_files(engine: TrainingEngine, make_plan: Plans, tiny: BaseSource):
    constant = group([0.1, 0.1, 0.1], [sequence([1, 2], [3, 4], [-1, -1])] * 3)
    plan = make_plan(groups=(constant,))
    result = engine.run(plan)
    assert (result.updates, result.loss, result.grad_norm, result.num_sequences) == (0, None, None, 0)
    assert result.key.step == 1
    assert result.metrics["groups_zero_variance"] == 1
    before, after = load_file(Path(tiny.path, "model.safetensors")), load_file(Path(plan.out_dir, "weights", "model.safetensors"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    following = make_plan(result.key)
    assert engine.run(following).updates == 1


def test_groups_without_variance_change_neither_gradient_nor_denominators(engine: TrainingEngine, make_plan: Plans):
    groups = random_groups(5)
    constant = group([0.97] * 4, [sequence([1, 2], [3, 4, 5, 6], [-1, -1, -1, -1])] * 4)
    alone = engine.run(make_plan(groups=groups, attempt="alone"))
    mixed = engine.run(make_plan(groups=(*groups, constant), attempt="mixed"))
    assert (alone.loss, alone.grad_norm, alone.plan_digest) == (mixed.loss, mixed.grad_norm, mixed.plan_digest)


def test_the_step_is_adamw_on_the_clipped_mean_gradient(make_plan: Plans, tiny: BaseSource):
    """One step against plain torch: the loss written out, one sequence at a time, torch's own clip and AdamW."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds

    groups = random_groups(11, groups=2)
    plan = make_plan(groups=groups, max_grad_norm=0.05, weight_decay=0.2, beta2=0.9)
    result = TrainingEngine(ONE_THREAD).run(plan)
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    trajectories = [trajectory for g in groups for trajectory in g.trajectories]
    raw = []
    for g in groups:
        rewards = torch.tensor([t.reward for t in g.trajectories], dtype=torch.float64)
        raw += ((rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-6)).tolist()
    n = [t.trainable_tokens for t in trajectories]
    total = sum(n)
    weights = [1 / (k + 1e-6) for k in n]
    mean = sum(w * k for w, k in zip(weights, n, strict=True)) / total
    weights = [w / mean for w in weights]
    size = sum(abs(a) * w * k for a, w, k in zip(raw, weights, n, strict=True)) / total
    loss = torch.zeros(())
    for t, a, w in zip(trajectories, raw, weights, strict=True):
        (s,) = t.sequences
        ids = torch.from_numpy(s.token_ids).long()
        new = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][torch.from_numpy(s.trainable)[1:]]
        old = torch.from_numpy(s.logprobs[s.trainable])
        loss = loss - ((new - old).exp().detach().clamp(0, 5) * a / size * new * w).sum() / total
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.2).step()
    assert result.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    got = load_file(Path(plan.out_dir, "weights", "model.safetensors"))
    # Adam's first step divides a gradient by its own size: where it is nearly 0, rounding decides its sign.
    close = torch.cat([(got[name] - p).abs().flatten() for name, p in model.named_parameters()]) < 2e-6
    assert float(close.float().mean()) > 0.995


def test_on_policy_ratios_are_one(engine: TrainingEngine, make_plan: Plans, tiny: BaseSource):
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds

    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    scored = []
    for g in random_groups(2):
        sequences = []
        for t in g.trajectories:
            (s,) = t.sequences
            ids = torch.from_numpy(s.token_ids).long()
            with torch.no_grad():
                new = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            sequences.append(sequence(ids[:5].tolist(), ids[5:].tolist(), new[4:].tolist()))
        scored.append(group([t.reward for t in g.trajectories], sequences))
    metrics = engine.run(make_plan(groups=tuple(scored))).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-9)
    assert metrics["clip_fraction"] == 0


def test_equal_plans_give_equal_bytes_whatever_ran_before(make_plan: Plans):
    one = make_plan(attempt="one", adaptation="lora")
    TrainingEngine(ONE_THREAD).run(one)
    busy = TrainingEngine(ONE_THREAD)
    busy.run(make_plan(attempt="other", adaptation="lora", seed=9))
    two = make_plan(attempt="two", adaptation="lora")
    busy.run(two)
    assert weights_of(one) == weights_of(two)


def test_lora_starts_as_the_base_model_and_another_seed_starts_elsewhere(engine: TrainingEngine, make_plan: Plans):
    constant = (group([1, 1], [sequence([1], [2], [-1])] * 2),)
    plans = [make_plan(attempt=f"seed{seed}", adaptation="lora", seed=seed, groups=constant) for seed in (0, 1)]
    for plan in plans:
        engine.run(plan)
    a, b = (load_file(Path(plan.out_dir, "weights", "adapter_model.safetensors")) for plan in plans)
    assert all(not tensor.any() for name, tensor in a.items() if "lora_B" in name)
    assert any(not torch.equal(a[name], b[name]) for name in a if "lora_A" in name)


def test_a_gradient_that_is_not_finite_fails_the_step(make_plan: Plans, make_base: Callable[..., BaseSource]):
    base = make_base()
    from safetensors.torch import save_file  # noqa: PLC0415 - next to its use

    path = Path(base.path, "model.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 1e38
    save_file(tensors, path, metadata={"format": "pt"})
    engine = TrainingEngine(ONE_THREAD)
    with pytest.raises(HeadraceError, match="not finite"):
        engine.run(make_plan(base=base))


@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_an_update_that_makes_the_weights_many_times_larger_is_not_taken(make_plan: Plans, adaptation: str):
    """Finite and huge: said with the numbers. The state before it is loaded again, and a healthy rate trains on from it."""
    engine = TrainingEngine(ONE_THREAD)
    first = make_plan(adaptation=adaptation, config=TrainConfig(learning_rate=1e-2), attempt="healthy")
    healthy = engine.run(first)
    snapshot = Path(first.out_dir, "snapshot")
    wild = make_plan(healthy.key, adaptation=adaptation, config=TrainConfig(learning_rate=10), attempt="wild")
    with pytest.raises(
        DivergedError, match=r"update 1 of 1, at rate 10, takes the weights' norm from [\d.]+ to [\d.e+]+, above [\d.]+ \(opt"
    ):
        engine.run(wild)
    assert not Path(wild.out_dir).exists()
    again = make_plan(healthy.key, adaptation=adaptation, attempt="again", load_from=snapshot)
    assert engine.run(again).updates == 1


@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_a_rate_of_0_leaves_every_weight_as_it_was(engine: TrainingEngine, make_plan: Plans, adaptation: str):
    first = make_plan(adaptation=adaptation, attempt="first")
    result = engine.run(first)
    still = make_plan(result.key, adaptation=adaptation, config=TrainConfig(learning_rate=0), attempt="still")
    stood = engine.run(still)
    assert (stood.updates, stood.metrics["learning_rate"], stood.key.step) == (1, 0, 2)
    assert weights_of(still) == weights_of(first)


def test_metrics_are_finite_and_named(engine: TrainingEngine, make_plan: Plans):
    metrics = engine.run(make_plan()).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics.keys() >= {"loss", "grad_norm", "reward_mean", "reward_std", "ratio_mean", "ess", "entropy", "tokens", "rows"}
    assert metrics["tokens"] > metrics["trainable_tokens"] > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_found_and_named_wherever_it_stands(value: float):
    tensors = {f"w{i}": torch.randn(7, 5) for i in range(4)} | {"empty": torch.empty(0)}
    _check(tensors.items())
    for at in (0, 17, 34):
        tensors["w2"].view(-1)[at] = value
        with pytest.raises(DivergedError, match="the update made w2 infinite or NaN"):
            _check(tensors.items())
        tensors["w2"].view(-1)[at] = 0.0
    _check({}.items())
