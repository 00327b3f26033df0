"""Passes that train nothing: an evaluation set, a forward-only step, log-probabilities as a reference, and a model that begins warm."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson
import pytest
import torch
from safetensors import safe_open
from tests.trainer.tiny import ONE_THREAD, group, random_groups, sequence

from headrace.core.errors import HeadraceError
from headrace.schemas.training import TrainConfig
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.evaluation import NAMES
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.logprobs_file import LogprobsFileError, matched, read_logprobs
from headrace.trainer.plan import BaseSource, KlReference, StateKey, StepPlan, StepResult

Plans = Callable[..., StepPlan]
Floats = npt.NDArray[np.float64]
BASE = KlReference(kind="base")
KL = TrainConfig(learning_rate=1e-2, kl_penalty_coef=0.1)
ADAPTATIONS: list[Literal["full", "lora"]] = ["full", "lora"]


@pytest.fixture(scope="module")
def engine() -> TrainingEngine:
    return TrainingEngine(ONE_THREAD)


def as_text(groups: tuple[TokenizedGroup, ...]) -> tuple[TokenizedGroup, ...]:
    """Without what a sampler said."""
    return tuple(
        group(
            [t.reward for t in g.trajectories],
            [replace(s, logprobs=np.full_like(s.logprobs, np.nan)) for t in g.trajectories for s in t.sequences],
            g.group_id,
        )
        for g in groups
    )


def files_of(plan: StepPlan, *folders: str) -> dict[str, bytes]:
    return {f"{name}/{path.name}": path.read_bytes() for name in folders for path in Path(plan.out_dir, name).iterdir()}


def logprobs_of(plan: StepPlan) -> dict[tuple[str, int], Floats]:
    """By (group id, trajectory): the log-probabilities of the sampled tokens, read as the module says that they lie."""
    with safe_open(Path(plan.out_dir, "logprobs", "logprobs.safetensors"), "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        ids = orjson.loads(file.metadata()["groups"])
    found = {}
    for s, (start, stop) in enumerate(zip(arrays["sequence_tokens"][:-1], arrays["sequence_tokens"][1:], strict=True)):
        assert np.isnan(arrays["logprobs"][start:stop][~arrays["trainable"][start:stop]]).all()
        own = arrays["logprobs"][start:stop][arrays["trainable"][start:stop]]
        found[ids[arrays["sequence_groups"][s]], int(arrays["sequence_trajectories"][s])] = own.astype(np.float64)
    return found


def scored(
    engine: TrainingEngine, make_plan: Plans, state: StateKey | None, groups: tuple[TokenizedGroup, ...], **options: object
) -> dict[tuple[str, int], Floats]:
    """The log-probabilities of groups under a state that the engine holds."""
    plan = replace(make_plan(state, attempt=f"scored-{uuid.uuid4()}", groups=groups, **options), forward_only=True)
    engine.run(plan)
    return logprobs_of(plan)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_an_evaluation_changes_no_bit_of_training(engine: TrainingEngine, make_plan: Plans, adaptation: str):
    sets = {"plain": (), "evaluated": (*random_groups(50), *as_text(random_groups(51)))}
    kept: dict[str, list[tuple[dict[str, bytes], float | None]]] = {name: [] for name in sets}
    for name, evaluation in sets.items():
        state = None
        for _ in range(2):
            plan = replace(make_plan(state, attempt="one", adaptation=adaptation, config=KL, reference=BASE), evaluation=evaluation)
            plan = replace(plan, out_dir=f"{plan.out_dir}-{name}")
            result = engine.run(plan)
            kept[name].append((files_of(plan, "weights", "snapshot"), result.loss))
            assert {f"eval/{number}" for number in NAMES if evaluation} == {m for m in result.metrics if m.startswith("eval/")}
            state = result.key
    assert kept["plain"] == kept["evaluated"]


def test_what_an_evaluation_says_is_what_the_new_versions_own_logprobs_come_to(engine: TrainingEngine, make_plan: Plans):
    flat = group([0.5, 0.5], [sequence([1, 2], [3, 4], [-1, -2]), sequence([1, 2], [5], [-3])], "flat")
    evaluation = (*random_groups(60), flat)
    plan = replace(make_plan(config=KL, reference=BASE), evaluation=evaluation)
    before = scored(engine, make_plan, None, evaluation)
    result = engine.run(plan)
    new = scored(engine, make_plan, result.key, evaluation)
    old = {
        (g.group_id, t): x.sequences[0].logprobs[x.sequences[0].trainable].astype(np.float64)
        for g in evaluation
        for t, x in enumerate(g.trajectories)
    }
    d = {key: (new[key] - old[key]).clip(-20, 20) for key in new}
    every_d = np.concatenate([d[key] for key in sorted(d)])
    u = np.concatenate([before[key] - new[key] for key in sorted(d)])
    weighted = []
    for g in evaluation:
        ratios = np.array([np.exp(d[g.group_id, t].sum()) for t in range(len(g.trajectories))])
        weighted.append(float((ratios * [x.reward for x in g.trajectories]).sum() / ratios.sum()))
    said = {name.removeprefix("eval/"): value for name, value in result.metrics.items() if name.startswith("eval/")}
    assert said["reward_weighted"] == pytest.approx(np.mean(weighted), rel=1e-4)
    assert said["ratio_mean"] == pytest.approx(np.exp(every_d).mean(), rel=1e-4)
    assert said["kl_behaviour"] == pytest.approx((np.expm1(every_d) - every_d).mean(), rel=1e-4)
    assert said["kl_reference"] == pytest.approx((np.expm1(u) - u).mean(), rel=1e-3)
    assert said["reward_mean"] == pytest.approx(np.mean([x.reward for g in evaluation for x in g.trajectories]))
    assert (said["groups"], said["trajectories"], said["trainable_tokens"]) == (4, 14, len(every_d))


def test_of_text_the_ratio_is_to_the_version_before_the_step(engine: TrainingEngine, make_plan: Plans):
    evaluation = as_text(random_groups(70))
    nothing = (group([1.0, 1.0], [sequence([1], [2], [-1]), sequence([1], [3], [-1])]),)
    unmoved = engine.run(replace(make_plan(groups=nothing, attempt="unmoved"), evaluation=evaluation)).metrics
    assert unmoved["updates"] == 0
    assert unmoved["eval/ratio_mean"] == 1
    assert unmoved["eval/reward_weighted"] == pytest.approx(unmoved["eval/reward_mean"], rel=1e-12)
    moved = engine.run(replace(make_plan(config=TrainConfig(learning_rate=1e-2), attempt="moved"), evaluation=evaluation)).metrics
    assert abs(moved["eval/ratio_mean"] - 1) > 1e-3
    assert moved["eval/kl_old"] > 1e-6


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_a_forward_only_step_leaves_the_weights_and_says_what_the_model_itself_does(
    engine: TrainingEngine, make_plan: Plans, tiny: BaseSource, adaptation: str
):
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    same = group([1.0, 1.0], [sequence([7, 8], [9, 10, 11]), sequence([7, 8], [9, 12])], "without variance")
    groups = (*random_groups(80), same)
    plan = replace(make_plan(groups=groups, adaptation=adaptation, attempt="forward"), forward_only=True)
    result = engine.run(plan)
    nothing = make_plan(groups=(same,), adaptation=adaptation, attempt="nothing")
    engine.run(nothing)
    assert files_of(plan, "weights") == files_of(nothing, "weights")
    assert (result.updates, result.loss, result.scalars.updates, result.scalars.reward_trend.n) == (0, None, 0, 0)
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    found = logprobs_of(plan)
    for g in groups:
        for t, trajectory in enumerate(g.trajectories):
            (own,) = trajectory.sequences
            ids = torch.tensor(own.token_ids, dtype=torch.int64)
            with torch.no_grad():
                every = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            assert found[g.group_id, t] == pytest.approx(every[torch.tensor(own.trainable[1:])].numpy(), abs=1e-4)


def test_logprobs_of_the_base_model_are_the_base_model_as_a_reference(engine: TrainingEngine, make_plan: Plans):
    first = engine.run(make_plan(config=TrainConfig(learning_rate=1e-2), attempt="first"))
    start = make_plan(attempt="first")
    groups, evaluation = random_groups(1), random_groups(90)
    forward = replace(make_plan(groups=(*groups, *evaluation[:2]), attempt="forward"), forward_only=True)
    engine.run(forward)
    known = read_logprobs(Path(forward.out_dir, "logprobs", "logprobs.safetensors").read_bytes())
    renamed = tuple(replace(g, group_id=f"renamed {g.group_id}") for g in groups)
    of_groups, missing = matched(renamed, known)
    assert missing == []
    of_evaluation, unknown = matched(evaluation, known)
    assert unknown == [f"group g2, trajectory {t}" for t in range(4)]
    config = TrainConfig(learning_rate=1e-2, kl_penalty_coef=0.1, kl_loss_coef=0.1)
    snapshot = Path(start.out_dir, "snapshot")
    results: list[StepResult] = []
    for reference in (BASE, KlReference(kind="logprobs", logprobs=of_groups, evaluation=of_evaluation)):
        plan = make_plan(first.key, groups=groups, config=config, reference=reference, load_from=snapshot, attempt="second")
        results.append(engine.run(replace(plan, evaluation=evaluation)))
    base, stored = (result.metrics for result in results)
    assert base["kl_reference"] > 1e-4
    for name in ("kl_reference", "kl_loss", "loss", "grad_norm"):
        assert stored[name] == pytest.approx(base[name], rel=1e-4), name
    assert stored["eval/kl_reference"] != base["eval/kl_reference"], "of the sequences that are known"


@pytest.mark.parametrize(
    "content",
    [b"no safetensors", None],
    ids=["no safetensors", "others"],
)
def test_what_is_no_file_of_logprobs_is_refused(content: bytes | None, engine: TrainingEngine, make_plan: Plans):
    if content is None:
        plan = make_plan()
        engine.run(plan)
        content = Path(plan.out_dir, "weights", "model.safetensors").read_bytes()
    with pytest.raises(LogprobsFileError, match="no file of log-probabilities"):
        read_logprobs(content)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_a_model_that_begins_with_stored_weights_has_them_at_version_0(engine: TrainingEngine, make_plan: Plans, adaptation: str):
    first = make_plan(adaptation=adaptation, config=TrainConfig(learning_rate=1e-2), attempt="first")
    trained = engine.run(first).key
    groups = random_groups(5)
    expected = scored(engine, make_plan, trained, groups, adaptation=adaptation)
    cold = scored(engine, make_plan, None, groups, adaptation=adaptation)
    other = StateKey(model_id="warm", incarnation="i", step=0)
    stored = Path(first.out_dir, "weights")
    warm = scored(engine, make_plan, other, groups, adaptation=adaptation, load_from=stored)
    assert max(float(np.abs(warm[key] - cold[key]).max()) for key in cold) > 1e-3
    for key, values in expected.items():
        assert warm[key].tolist() == values.tolist(), key


def test_an_adapter_of_another_rank_is_no_start(engine: TrainingEngine, make_plan: Plans):
    plan = make_plan(adaptation="lora", attempt="first")
    engine.run(plan)
    config = Path(plan.out_dir, "weights", "adapter_config.json")
    config.write_bytes(orjson.dumps(orjson.loads(config.read_bytes()) | {"r": 8}))
    with pytest.raises(HeadraceError, match=r"r is 8 in the warm start adapter_config\.json, the model's is 4"):
        engine.run(make_plan(adaptation="lora", load_from=config.parent))
