"""Base models of several architectures: packed rows are isolated, or one sequence gets one row; what is written loads again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.tiny import random_groups

from headrace.schemas.training import ModelSettings
from headrace.trainer.advantages import batch_credits
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.forward import logits_at, micro_batches, sampled_logprobs
from headrace.trainer.model import BaseModelError, RowLayout, adapt, load_base, row_layout
from headrace.trainer.options import AdvantageOptions
from headrace.trainer.packing import pack
from headrace.trainer.plan import BaseSource, StepPlan

Bases = Callable[..., BaseSource]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 4, "query_pre_attn_scalar": 8}),
        ("gpt2", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_packed_rows_give_the_log_probabilities_of_one_sequence_at_a_time(make_base: Bases, architecture: str, changes: dict[str, object]):
    model = load_base(make_base(architecture, **changes)).eval()
    assert row_layout(model) is RowLayout.PACKED
    groups = random_groups(4, groups=2, length=8)
    found = batch_credits(groups, AdvantageOptions())
    packed, alone = (pack(groups, found, 32, alone=one) for one in (False, True))
    assert packed.rows < alone.rows
    with torch.no_grad():
        got: dict[int, torch.Tensor] = {}
        expected: dict[int, torch.Tensor] = {}
        for rows, into in ((packed, got), (alone, expected)):
            for batch in micro_batches(rows, torch.device("cpu"), 70):
                new_N, _ = sampled_logprobs(model, batch)
                for branch in batch.tokens.branches_N.unique().tolist():
                    into[branch] = new_N[batch.tokens.branches_N == branch]
        # And against the plain model, one sequence, no packing, no hook.
        plain = [s for g in groups for t in g.trajectories for s in t.sequences]
        for branch, s in enumerate(plain):
            ids = torch.from_numpy(s.token_ids).long()
            logits = model(ids[None], use_cache=False).logits[0].float()
            whole = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][torch.from_numpy(s.trainable)[1:]]
            torch.testing.assert_close(expected[branch], whole, atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(got[branch], whole, atol=2e-6, rtol=1e-5)


def test_a_model_that_lets_packed_sequences_see_each_other_gets_one_sequence_a_row(make_base: Bases):
    """A mask of ones stands for every architecture that can't isolate."""
    model = load_base(make_base()).eval()
    forward = model.forward
    model.forward = lambda **inputs: forward(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
    assert row_layout(model) is RowLayout.ALONE


def test_a_model_that_sees_what_comes_is_refused(make_base: Bases):
    model = load_base(make_base()).eval()
    inner = model.model.forward

    def leaking(**inputs: object) -> object:
        output = inner(**inputs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    model.model.forward = leaking
    with pytest.raises(BaseModelError, match="not causal"):
        row_layout(model)


def test_a_model_without_position_ids_is_refused_in_words(make_base: Bases):
    model = load_base(make_base()).eval()
    forward = model.forward
    model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    with pytest.raises(BaseModelError, match="position ids"):
        row_layout(model)


def test_only_chosen_positions_are_projected_to_the_vocabulary(tiny: BaseSource):
    model = load_base(tiny).eval()
    shapes: list[torch.Size] = []
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: shapes.append(output.shape))
    ids = torch.arange(24).reshape(2, 12)
    positions = torch.arange(12).expand(2, 12)
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 11])
    logits = logits_at(model, ids, positions, rows, columns)
    assert shapes == [(1, 3, 264)]
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits[rows, columns])


def test_dropout_is_off(make_base: Bases, make_plan: Callable[..., StepPlan]):
    """A base model whose config asks for dropout trains as if it did not: a learner with dropout is another policy than the sampler."""
    plans = [make_plan(base=make_base(attention_dropout=rate), attempt=f"dropout{rate}") for rate in (0.0, 0.5)]
    losses = [TrainingEngine(threads=1).run(plan).loss for plan in plans]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("tied", [True, False])
def test_full_weights_are_a_base_model_folder(make_base: Bases, make_plan: Callable[..., StepPlan], *, tied: bool):
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    base = make_base(tie_word_embeddings=tied)
    plan = make_plan(base=base, attempt=f"tied{tied}")
    TrainingEngine(threads=1).run(plan)
    folder = Path(plan.out_dir, "weights")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    again = load_base(BaseSource(path=str(folder)))
    before = load_base(base)
    moved = [float((a - b).detach().abs().max()) for a, b in zip(again.parameters(), before.parameters(), strict=True)]
    assert all(0 < m < 3e-3 for m in moved)
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    follow = make_plan(base=BaseSource(path=str(folder)), attempt=f"again{tied}")
    assert TrainingEngine(threads=1).run(follow).updates == 1


def test_lora_weights_load_over_the_base_and_give_the_trained_model(tiny: BaseSource, make_plan: Callable[..., StepPlan]):
    from peft import PeftModel  # noqa: PLC0415 - seconds

    plan = make_plan(adaptation="lora", config=None)
    engine = TrainingEngine(threads=1)
    result = engine.run(plan)
    assert result.weights_format == "lora"
    folder = Path(plan.out_dir, "weights")
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(load_base(tiny), str(folder)).eval()
    ids = torch.arange(10)[None]
    trained = engine._loaded.engine.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trained(ids).logits)
        assert not torch.equal(loaded(ids).logits, load_base(tiny)(ids).logits)


def test_adapters_say_nothing_of_this_machine_and_are_equal_byte_for_byte(tiny: BaseSource, make_plan: Callable[..., StepPlan]):
    plan = make_plan(adaptation="lora")
    TrainingEngine(threads=1).run(plan)
    text = Path(plan.out_dir, "weights", "adapter_config.json").read_text()
    assert tiny.path not in text
    config = json.loads(text)
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(config["target_modules"])


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(BaseModelError, match="is no folder"):
        load_base(BaseSource(path=str(tmp_path / "nowhere")))


def test_lora_leaves_the_base_alone(tiny: BaseSource):
    model = adapt(load_base(tiny), ModelSettings(base_model="tiny"))
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
