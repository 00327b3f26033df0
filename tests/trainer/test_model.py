"""Base models of several architectures: packed rows are isolated, or one sequence gets one row; what is written loads again."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.tiny import ONE_THREAD, families, group, save_gguf, sequence

from headrace.schemas.training import LoraSettings, ModelSettings
from headrace.trainer.engine import TrainingEngine
from headrace.trainer.forward import RowTensors, logits_at
from headrace.trainer.groups import TokenSequence
from headrace.trainer.model import BaseModelError, adapt, load_base, self_test
from headrace.trainer.packing import pack
from headrace.trainer.plan import BaseSource, StepPlan
from headrace.trainer.rows import CreditedSequence

Bases = Callable[..., BaseSource]


@pytest.mark.parametrize(
    ("architecture", "changes", "tree", "chunked"),
    [
        ("qwen3", {}, True, True),
        ("llama", {}, True, True),
        ("mistral", {"sliding_window": 4}, True, True),
        ("granite", {"logits_scaling": 2.0}, True, False),
        # Soft caps inside the attention: its own attention, one sequence a row.
        ("gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 4, "query_pre_attn_scalar": 8}, False, False),
        ("gpt2", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}, True, True),
        ("bloom", {}, False, True),
    ],
)
def test_packed_rows_give_the_log_probabilities_of_one_sequence_at_a_time(
    make_base: Bases, architecture: str, changes: dict[str, object], *, tree: bool, chunked: bool
):
    base = make_base(architecture, **changes)
    model = load_base(base).eval()
    scorer = self_test(model)
    assert (scorer.width is not None, scorer.chunked) == (tree, chunked)
    sequences = families(3, groups=2, answers=4)
    update = pack(sequences, capacity=80, alone=not tree, min_shared=1)
    plain = load_base(base).eval()
    with torch.no_grad():
        for row in update.rows:
            new_N, _ = scorer.score(model, RowTensors.of(row, torch.device("cpu"), scorer.width), chunk=5)
            for branch in np.unique(row.branches_N):
                ids = torch.from_numpy(sequences[branch].sequence.token_ids).long()
                chosen = torch.from_numpy(sequences[branch].sequence.trainable)[1:]
                logits = plain(ids[None], use_cache=False).logits[0].float()
                whole = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][chosen]
                torch.testing.assert_close(new_N[row.branches_N == branch], whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "changes", "dtype", "tolerance"),
    [
        ("qwen3", {}, torch.float32, 1e-6),
        ("llama", {}, torch.float32, 1e-6),
        # Of the architectures that transformers has, those with RMS norms compute them in float32, whatever the model's type.
        ("gpt2", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}, torch.float64, 1e-10),
    ],
)
def test_packed_with_sharing_equals_one_sequence_at_a_time_in_logits_and_gradients(
    make_base: Bases, architecture: str, changes: dict[str, object], dtype: torch.dtype, tolerance: float
):
    """Nested prefixes, shared answers with different weights: relative to the largest logit and the largest gradient."""
    base = make_base(architecture, **changes)
    sequences = families(5, groups=3, answers=5)
    update = pack(sequences, capacity=4096, min_shared=1)
    assert sum(len(row) for row in update.rows) < 0.7 * sum(len(credited.sequence) for credited in sequences)
    packed, plain = load_base(base).to(dtype).eval(), load_base(base).to(dtype).eval()
    scorer = self_test(packed)
    assert scorer.width is not None
    for row in update.rows:
        new_N, _ = scorer.score(packed, RowTensors.of(row, torch.device("cpu"), scorer.width), chunk=16)
        (new_N * torch.from_numpy(row.weights_N).to(dtype)).sum().backward()
    for credited in sequences:
        ids = torch.from_numpy(credited.sequence.token_ids).long()
        logits = plain(ids[None], use_cache=False).logits[0]
        new_N = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][torch.from_numpy(credited.sequence.trainable)[1:]]
        (new_N * float(np.float32(credited.weight))).sum().backward()
    gradients = [(a.grad, b.grad) for a, b in zip(packed.parameters(), plain.parameters(), strict=True)]
    largest = max(float(theirs.abs().max()) for _, theirs in gradients)
    assert max(float((mine - theirs).abs().max()) for mine, theirs in gradients) <= tolerance * largest
    with torch.no_grad():
        for row in update.rows:
            logits_NV = logits_at(packed, RowTensors.of(row, torch.device("cpu"), scorer.width), torch.from_numpy(row.predictors_N).long())
            for branch in np.unique(row.branches_N):
                sequence = sequences[branch].sequence
                expected = plain(torch.from_numpy(sequence.token_ids).long()[None], use_cache=False).logits[0]
                expected = expected[:-1][torch.from_numpy(sequence.trainable)[1:]]
                mine = logits_NV[torch.from_numpy(row.branches_N == branch)]
                assert float((mine - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_a_model_that_lets_packed_sequences_see_each_other_gets_one_sequence_a_row(make_base: Bases):
    """A running mean over the row stands for every layer that carries a state along it (recurrent ones, convolutions)."""
    model = load_base(make_base()).eval()
    inner = model.model.forward

    def carrying(**inputs: object) -> object:
        output = inner(**inputs)
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
        return output

    model.model.forward = carrying
    assert self_test(model).width is None


LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 16}
PHI3 = {"pad_token_id": 0, "max_position_embeddings": 64, "rope_scaling": LONG, "original_max_position_embeddings": 16}
PHIMOE = {
    "max_position_embeddings": 64,
    "rope_scaling": LONG | {"short_mscale": 1.1, "long_mscale": 1.7},
    "original_max_position_embeddings": 16,
}
QWEN_MOE = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("architecture", "changes", "tree"),
    [
        ("phi3", PHI3, False),
        ("phimoe", PHIMOE, False),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}, False),
        ("phimoe", {"sliding_window": 30}, False),
        ("qwen2_moe", QWEN_MOE | {"use_sliding_window": True, "sliding_window": 30}, False),
        ("qwen2_moe", QWEN_MOE, True),
        ("mistral", {"sliding_window": 30}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}, True),
        ("gemma3_text", {"sliding_window": 30, "query_pre_attn_scalar": 8, "head_dim": 8}, True),
        ("starcoder2", {"sliding_window": 30}, True),
    ],
)
def test_neighbours_do_not_see_each_other_where_sequences_outgrow_the_window_and_the_original_positions(
    make_base: Bases, architecture: str, changes: dict[str, object], *, tree: bool
):
    """A sequence of 60 tokens next to short ones that share its beginning, and after it: as each in a model that has seen nothing else."""
    base = make_base(architecture, **changes)
    model = load_base(base).eval()
    scorer = self_test(model)
    assert (scorer.width is not None) == tree
    rng = np.random.default_rng(1)
    stem = rng.integers(0, 264, 12).astype(np.int32)
    sequences = [np.concatenate([stem, rng.integers(0, 264, n).astype(np.int32)]) for n in (48, 3, 20)]
    update = pack([whole(ids, i) for i, ids in enumerate(sequences)], capacity=200, alone=not tree, min_shared=1)
    with torch.no_grad():
        for row in update.rows:
            new_N, _ = scorer.score(model, RowTensors.of(row, torch.device("cpu"), scorer.width), chunk=64)
            for branch in np.unique(row.branches_N):
                ids = torch.from_numpy(sequences[branch]).long()
                logits = load_base(base).eval()(ids[None], use_cache=False).logits[0].float()
                alone_N = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
                torch.testing.assert_close(new_N[row.branches_N == branch], alone_N, atol=2e-6, rtol=1e-5)


def whole(ids: np.ndarray, branch: int) -> CreditedSequence:
    """A sequence of which every token but the first is a target."""
    made = TokenSequence(token_ids=ids, trainable=np.arange(len(ids)) > 0, logprobs=np.full(len(ids), np.nan, np.float32))
    return CreditedSequence(sequence=made, tree=0, branch=branch, advantage=1.0, weight=1.0)


def test_attention_in_chunks_gets_one_sequence_a_row(make_base: Bases):
    """Chunks are longer than what a self-test can afford to compare."""
    model = load_base(make_base()).eval()
    model.config.attention_chunk_size = 8192
    assert self_test(model).width is None


def test_a_model_that_keeps_the_layout_from_its_attention_gets_one_sequence_a_row(make_base: Bases):
    model = load_base(make_base()).eval()
    forward = model.forward
    model.forward = lambda headrace_layout=None, **inputs: forward(**inputs)  # noqa: ARG005 - taken, and dropped
    assert self_test(model).width is None
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_sees_what_comes_is_refused(make_base: Bases):
    model = load_base(make_base()).eval()
    inner = model.model.forward

    def leaking(**inputs: object) -> object:
        output = inner(**inputs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    model.model.forward = leaking
    with pytest.raises(BaseModelError, match="not causal"):
        self_test(model)


def test_a_model_without_position_ids_is_refused_in_words(make_base: Bases):
    model = load_base(make_base()).eval()
    forward = model.forward
    model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    with pytest.raises(BaseModelError, match="position ids"):
        self_test(model)


def test_only_chosen_positions_are_projected_to_the_vocabulary(tiny: BaseSource):
    model = load_base(tiny).eval()
    shapes: list[torch.Size] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: shapes.append(output.shape))
    (row,) = pack(families(1, groups=1, answers=1), capacity=64).rows
    columns = torch.tensor([0, 3, 3, 11])
    logits = logits_at(model, RowTensors.of(row, torch.device("cpu"), None), columns)
    hook.remove()
    assert shapes == [(1, 4, 264)]
    ids = torch.from_numpy(row.token_ids_T).long()[None]
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits[0, columns])


def test_dropout_is_off(make_base: Bases, make_plan: Callable[..., StepPlan]):
    """A base model whose config asks for dropout trains as if it did not: a learner with dropout is another policy than the sampler."""
    plans = [make_plan(base=make_base(attention_dropout=rate), attempt=f"dropout{rate}") for rate in (0.0, 0.5)]
    losses = [TrainingEngine(ONE_THREAD).run(plan).loss for plan in plans]
    assert losses[0] == losses[1]


def test_a_model_whose_attention_dropout_is_a_module_trains(make_base: Bases, make_plan: Callable[..., StepPlan]):
    result = TrainingEngine(ONE_THREAD).run(make_plan(base=make_base("bloom", attention_dropout=0.5)))
    assert result.updates == 1


@pytest.mark.parametrize("tied", [True, False])
def test_full_weights_are_a_base_model_folder(make_base: Bases, make_plan: Callable[..., StepPlan], *, tied: bool):
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    base = make_base(tie_word_embeddings=tied)
    plan = make_plan(base=base, attempt=f"tied{tied}")
    TrainingEngine(ONE_THREAD).run(plan)
    folder = Path(plan.out_dir, "weights")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    again = load_base(BaseSource(path=str(folder)))
    before = load_base(base)
    moved = [float((a - b).detach().abs().max()) for a, b in zip(again.parameters(), before.parameters(), strict=True)]
    assert all(0 < m < 3e-3 for m in moved)
    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    follow = make_plan(base=BaseSource(path=str(folder)), attempt=f"again{tied}")
    assert TrainingEngine(ONE_THREAD).run(follow).updates == 1


def test_lora_weights_load_over_the_base_and_give_the_trained_model(tiny: BaseSource, make_plan: Callable[..., StepPlan]):
    from peft import PeftModel  # noqa: PLC0415 - seconds

    plan = make_plan(adaptation="lora", config=None)
    engine = TrainingEngine(ONE_THREAD)
    result = engine.run(plan)
    assert result.weights_format == "lora"
    folder = Path(plan.out_dir, "weights")
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(load_base(tiny), str(folder)).eval()
    ids = torch.arange(10)[None]
    trained = engine._resident._loaded.model.eval()
    with torch.no_grad():
        trained.set_attn_implementation("sdpa")
        torch.testing.assert_close(loaded(ids).logits, trained(ids).logits)
        assert not torch.equal(loaded(ids).logits, load_base(tiny)(ids).logits)


def test_adapters_say_nothing_of_this_machine_and_are_equal_byte_for_byte(tiny: BaseSource, make_plan: Callable[..., StepPlan]):
    plan = make_plan(adaptation="lora")
    TrainingEngine(ONE_THREAD).run(plan)
    text = Path(plan.out_dir, "weights", "adapter_config.json").read_text()
    assert tiny.path not in text
    config = json.loads(text)
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(config["target_modules"])


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(BaseModelError, match="is no folder"):
        load_base(BaseSource(path=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("adaptation", ["full", "lora"])
def test_a_gguf_file_is_a_base_model(tmp_path: Path, make_plan: Callable[..., StepPlan], adaptation: str):
    save_gguf(tmp_path / "m.gguf")
    groups = (group([0, 1], [sequence([1, 2], [5, 6], [-1, -1]), sequence([1, 2], [7, 8], [-1, -1])]),)
    plan = make_plan(base=BaseSource(path=str(tmp_path), gguf_file="m.gguf"), adaptation=adaptation, groups=groups)
    assert TrainingEngine(ONE_THREAD).run(plan).updates == 1
    written = {path.name for path in Path(plan.out_dir, "weights").iterdir()}
    assert {"lora": {"adapter_model.safetensors"}, "full": {"model.safetensors", "tokenizer.json"}}[adaptation] <= written


def test_a_truncated_base_model_is_named(make_base: Bases, tmp_path: Path):
    save_gguf(tmp_path / "m.gguf")
    whole = make_base()
    for base, file in ((whole, "model.safetensors"), (BaseSource(path=str(tmp_path), gguf_file="m.gguf"), "m.gguf")):
        path = Path(base.path, file)
        path.write_bytes(path.read_bytes()[:300])
        with pytest.raises(BaseModelError, match=f"base model in {base.path}: "):
            load_base(base)


def test_a_base_model_without_some_of_its_weights_is_refused(make_base: Bases):
    """Transformers would draw them at random, with a warning that nobody reads."""
    base = make_base()
    path = Path(base.path, "model.safetensors")
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"its files lack 1 weights: model\.layers\.0\.mlp\.up_proj\.weight"):
        load_base(base)


@pytest.mark.parametrize(
    ("targets", "fault"),
    [
        (("nope",), "'nope' is not there; the base model's linear layers are down_proj, .*q_proj"),
        (("q_proj", "v_prj"), "'v_prj' is not there"),
        (("embed_tokens",), "'embed_tokens' is a Embedding"),
        (("norm", "q_proj"), "'norm' is a Qwen3RMSNorm"),
        (("mlp",), "'mlp' is a Qwen3MLP"),
    ],
)
def test_a_target_that_is_no_linear_layer_is_refused_by_name(tiny: BaseSource, targets: tuple[str, ...], fault: str):
    settings = ModelSettings(base_model="tiny", lora=LoraSettings(target_modules=targets))
    with pytest.raises(BaseModelError, match=f"lora.target_modules: {fault}"):
        adapt(load_base(tiny), settings)


def test_an_architecture_that_peft_can_not_adapt_is_refused_with_its_name(make_base: Bases):
    with pytest.raises(BaseModelError, match=r"base model 'm' can't be adapted: .*Mamba"):
        adapt(load_base(make_base("mamba")), ModelSettings(base_model="m"))


def test_lora_leaves_the_base_alone(tiny: BaseSource):
    model = adapt(load_base(tiny), ModelSettings(base_model="tiny"))
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
