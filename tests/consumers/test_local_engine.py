import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace.engine.sampling import local_engine
from headrace.engine.sampling.engine_weights import WeightsMismatchError
from headrace.engine.sampling.generation import Generation
from headrace.engine.sampling.local_engine import LocalEngine
from headrace.schemas.codec import SampledGroup, decode_group, encode_safetensors, sampled
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

PROMPTS = [[7, 8], [9, 10, 11, 12, 13, 14, 15], [20], [7, 8, 9, 10]]
END = 1
MANY_STOPS = [END, *range(7, 13)]  # rows end early and often


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forced_logprobs(model: torch.nn.Module, generation: Generation) -> list[float]:
    """Teacher forcing, one row, no cache, no padding."""
    ids = torch.tensor([generation.prompt_token_ids + generation.token_ids])
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
    start = len(generation.prompt_token_ids)
    return [logprobs_TV[start - 1 + n, token].item() for n, token in enumerate(generation.token_ids)]


def changed(tiny_model: Path, folder: Path, scale: float = 1.5) -> Path:
    """A folder of full weights that differ from the base."""
    folder.mkdir()
    tensors = {name: tensor * scale for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def adapter(tiny_model: Path, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).save_pretrained(folder)
    return folder


def test_logprobs_are_those_of_teacher_forcing_whatever_the_padding(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    generations = LocalEngine(tiny_model, seed=1).generate(PROMPTS * 6, max_tokens=24, stop_token_ids=MANY_STOPS)
    lengths = sorted(len(g.token_ids) for g in generations)
    assert lengths[len(lengths) // 2] < lengths[len(lengths) * 3 // 4] < lengths[-1]  # the batch is halved twice on the way
    for generation in generations:
        assert generation.logprobs == pytest.approx(forced_logprobs(model, generation), abs=1e-5)


def test_tokens_follow_the_softmax_at_temperature_one(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    draws = 4000
    generations = LocalEngine(tiny_model, seed=5).generate([[7, 8, 9]] * draws, max_tokens=1)
    with torch.no_grad():
        expected_V = torch.softmax(model(input_ids=torch.tensor([[7, 8, 9]])).logits[0, -1].double(), dim=-1)
    counts_V = torch.bincount(torch.tensor([g.token_ids[0] for g in generations]), minlength=expected_V.numel())
    spread_V = (draws * expected_V * (1 - expected_V)).sqrt()
    assert ((counts_V - draws * expected_V).abs() <= 5 * spread_V + 1).all()


def test_a_turn_ends_with_its_stop_token_or_at_the_limit(tiny_model):
    generations = LocalEngine(tiny_model, seed=2).generate([[7, 8, 9]] * 64, max_tokens=12)
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    for generation in generations:
        stopped = generation.finish_reason == "stop"
        assert (generation.token_ids[-1] == END) is stopped
        assert END not in generation.token_ids[:-1]
        assert len(generation.token_ids) == 12 or stopped
    for generation in LocalEngine(tiny_model, seed=2).generate([[7, 8, 9]] * 64, max_tokens=12, stop_token_ids=MANY_STOPS):
        assert not set(MANY_STOPS) & set(generation.token_ids[:-1])


def test_stop_token_ids_replace_the_models_own(tiny_model):
    generations = LocalEngine(tiny_model, seed=2).generate([[7, 8, 9]] * 64, max_tokens=12, stop_token_ids=[8, 9, 10])
    assert any(END in g.token_ids[:-1] for g in generations)
    assert all(g.token_ids[-1] in {8, 9, 10} for g in generations if g.finish_reason == "stop")


def test_the_same_seed_and_calls_give_the_same_tokens(tiny_model):
    first, second, other = (LocalEngine(tiny_model, seed=seed) for seed in (3, 3, 4))
    runs = [[engine.generate(PROMPTS, max_tokens=16) for _ in range(2)] for engine in (first, second, other)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]  # the generator continues from call to call


def test_full_weights_change_the_policy_and_mark_the_tokens(tiny_model, tmp_path):
    engine = LocalEngine(tiny_model, seed=1)
    assert engine.policy_version == 0
    assert set(engine.generate(PROMPTS, max_tokens=4)[0].policy_versions) == {0}
    folder = changed(tiny_model, tmp_path / "v3")
    engine.load(folder, 3)
    generations = engine.generate(PROMPTS, max_tokens=16)
    assert engine.policy_version == 3
    assert {v for g in generations for v in g.policy_versions} == {3}
    served = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    served.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    served.tie_weights()
    for generation in generations:
        assert generation.logprobs == pytest.approx(forced_logprobs(served, generation), abs=1e-5)


def test_adapters_take_turns_and_full_weights_may_follow_them(tiny_model, tmp_path):
    engine = LocalEngine(tiny_model, seed=1)
    folders = [adapter(tiny_model, tmp_path / f"a{seed}", seed) for seed in (1, 2)]
    full = changed(tiny_model, tmp_path / "full")

    def base() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def with_adapter(folder: Path) -> torch.nn.Module:
        return PeftModel.from_pretrained(base(), folder).eval()

    served = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    served.load_state_dict(load_file(full / "model.safetensors"), strict=False)
    served.tie_weights()
    steps = [(folders[0], with_adapter(folders[0])), (folders[1], with_adapter(folders[1])), (full, served)]
    for version, (folder, expected) in enumerate([*steps, steps[0]], start=1):
        engine.load(folder, version)
        for generation in engine.generate(PROMPTS, max_tokens=8):
            assert generation.logprobs == pytest.approx(forced_logprobs(expected, generation), abs=1e-5), version
    engine.reset()
    assert engine.policy_version == 0
    generation = engine.generate(PROMPTS, max_tokens=8)[0]
    assert generation.logprobs == pytest.approx(forced_logprobs(base(), generation), abs=1e-5)


@pytest.mark.parametrize("fault", ["truncated", "missing tensor", "foreign tensor", "other shape", "empty"])
def test_weights_that_do_not_fit_leave_the_engine_as_it_was(tiny_model, tmp_path, fault):
    engine = LocalEngine(tiny_model, seed=1)
    engine.load(changed(tiny_model, tmp_path / "good"), 1)
    folder = changed(tiny_model, tmp_path / "bad", scale=9.0)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    match fault:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        case "missing tensor":
            tensors.pop("model.norm.weight")
            save_file(tensors, file)
        case "foreign tensor":
            save_file({**tensors, "model.other": torch.zeros(1)}, file)
        case "other shape":
            save_file({**tensors, "model.norm.weight": torch.zeros(3)}, file)
        case "empty":
            file.unlink()
    probe = LocalEngine(tiny_model, seed=1)
    probe.load(tmp_path / "good", 1)
    with pytest.raises(WeightsMismatchError, match="bad"):
        engine.load(folder, 2)
    assert engine.policy_version == 1
    assert engine.generate(PROMPTS, max_tokens=8) == probe.generate(PROMPTS, max_tokens=8)


@pytest.mark.parametrize("first", [True, False])
def test_an_adapter_that_does_not_fit_leaves_the_engine_as_it_was(tiny_model, tmp_path, first):
    good = adapter(tiny_model, tmp_path / "good", 1)
    bad = adapter(tiny_model, tmp_path / "bad", 2)
    tensors = load_file(bad / "adapter_model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, bad / "adapter_model.safetensors")
    engine, probe = LocalEngine(tiny_model, seed=1), LocalEngine(tiny_model, seed=1)
    for each in (engine, probe) if not first else ():
        each.load(good, 1)
    with pytest.raises(WeightsMismatchError, match="does not fit"):
        engine.load(bad, 2)
    assert engine.policy_version == (0 if first else 1)
    assert engine.generate(PROMPTS, max_tokens=8) == probe.generate(PROMPTS, max_tokens=8)
    engine.load(good, 3)
    assert engine.policy_version == 3


def test_a_swap_waits_for_the_call_that_is_running(tiny_model, tmp_path, monkeypatch):
    engine = LocalEngine(tiny_model, seed=1)
    folder = changed(tiny_model, tmp_path / "v1")
    inside, go_on = threading.Event(), threading.Event()
    decode = local_engine.decode

    def held(*args, **kwargs):
        inside.set()
        assert go_on.wait(30)
        return decode(*args, **kwargs)

    monkeypatch.setattr(local_engine, "decode", held)
    results: list[Generation] = []
    call = threading.Thread(target=lambda: results.extend(engine.generate(PROMPTS, max_tokens=4)))
    call.start()
    assert inside.wait(30)
    swap = threading.Thread(target=engine.load, args=(folder, 1))
    swap.start()
    swap.join(0.2)
    assert swap.is_alive()
    assert engine.policy_version == 0
    go_on.set()
    call.join(30)
    swap.join(30)
    assert {v for g in results for v in g.policy_versions} == {0}
    assert engine.policy_version == 1


def test_messages_go_through_the_chat_template_and_turns_extend_token_for_token(tiny_model):
    engine = LocalEngine(tiny_model, seed=1)
    before = engine.generate([[{"role": "user", "content": "a b"}]] * 32, max_tokens=8)
    assert before[0].prompt_token_ids == [2, 7, 8, END, 3]
    assert {g.finish_reason for g in before} == {"stop", "length"}
    for generation in before:
        after = engine.prompt_after(generation, [{"role": "tool", "content": "c"}])
        said = generation.prompt_token_ids + generation.token_ids
        assert after[: len(said)] == said
        closing = [] if generation.finish_reason == "stop" else [END]
        assert after[len(said) :] == [*closing, 4, 9, END, 3]


def test_switches_reach_the_template_in_first_and_later_turns(tiny_model):
    engine = LocalEngine(tiny_model, chat_template_kwargs={"quiet": True})
    engine.tokenizer.chat_template = f"{engine.tokenizer.chat_template}{{% if quiet %}}x {{% endif %}}"
    x = engine.tokenizer.convert_tokens_to_ids("x")
    (first,) = engine.generate([[{"role": "user", "content": "a"}]], max_tokens=3)
    assert first.prompt_token_ids[-1] == x
    assert engine.prompt_after(first, [{"role": "user", "content": "b"}])[-1] == x


def test_text_leaves_special_tokens_out(tiny_model):
    generation = LocalEngine(tiny_model, seed=1).generate([[{"role": "user", "content": "a"}]], max_tokens=8, stop_token_ids=[END])[0]
    assert "<end>" not in generation.text
    assert generation.text


def test_a_generation_becomes_a_choice_in_both_forms(tiny_model):
    generation = LocalEngine(tiny_model, seed=1).generate([PROMPTS[0]], max_tokens=8)[0]
    choice, tokens = generation.to_choice()
    assert choice.message.content == generation.text
    assert choice.prompt_token_ids == generation.prompt_token_ids
    assert choice.finish_reason == generation.finish_reason
    assert tokens.token_ids.tolist() == generation.token_ids
    assert tokens.policy_versions is not None
    assert tokens.policy_versions.tolist() == generation.policy_versions
    beside = SampledGroup(group=TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[choice])]), turns=(tokens,))
    inside = sampled(TrajectoryGroup(trajectories=[Trajectory(messages_and_choices=[generation.inline_choice()])]))
    assert beside == inside
    assert decode_group(encode_safetensors(beside), "application/vnd.headrace.group+safetensors") == inside


@pytest.mark.parametrize(
    ("requests", "max_tokens", "says"),
    [
        ([[7], []], 4, r"requests\[1\] is empty"),
        ([[7, 32]], 4, "token id 32 is outside the vocabulary of 32"),
        ([[7] * 125], 4, "more than the model's 128 positions"),
        ([[7]], 0, "max_tokens must be at least 1"),
        ([[7, {"role": "user", "content": "a"}]], 4, "not both"),
    ],
)
def test_a_bad_request_is_refused_with_its_place(tiny_model, requests, max_tokens, says):
    with pytest.raises(ValueError, match=says):
        LocalEngine(tiny_model).generate(requests, max_tokens=max_tokens)


def test_importing_consumers_brings_no_torch():
    code = "import sys, headrace.consumers; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_adapter_names_are_never_used_twice(tiny_model, tmp_path):
    engine = LocalEngine(tiny_model, seed=1)
    names = []
    for seed in (1, 2, 1):
        folder = tmp_path / f"a{seed}"
        if not folder.exists():
            adapter(tiny_model, folder, seed)
        engine.load(folder, 5)
        names.append(engine._held)
    assert all(a != b for a, b in pairwise(names))
    assert len(set(names)) == 3
