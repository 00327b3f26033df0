"""The vault task, its tokenizer and its base model: the task can't be guessed, turns stay one row, the base model hardly knows it."""

import random
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.demo import base_model
from headrace.demo.base_model import WORDS, save_tokenizer
from headrace.demo.tasks import VaultTask
from headrace.demo.vault import END, KEYS, SECRETS, draw_episode
from headrace.engine.sampling.local_engine import LocalEngine
from headrace.schemas.chat import Choice, Message


def test_a_reward_needs_the_secret_of_the_key_that_was_asked_for():
    episode = draw_episode(random.Random(1), "amber")
    secret = episode.secrets["amber"]
    assert episode.reward(["answer", secret, END]) == 1.0
    others = [word for word in SECRETS if word != secret]
    assert not any(episode.reward(["answer", word, END]) for word in others)
    assert episode.reward(["answer", secret]) == 0.0, "an unfinished turn is no answer"
    assert episode.reward([secret, END]) == 0.0, "no credit for half of the form"


def test_only_a_well_formed_call_reaches_the_tool():
    episode = draw_episode(random.Random(1))
    assert episode.call(["vault", "amber", END]) == "amber"
    for words in (["vault", "amber"], ["vault", "heron", END], ["answer", "amber", END], ["vault", "amber", "<|user|>", END]):
        assert episode.call(words) is None


def test_secrets_are_new_in_every_episode_and_differ_between_keys():
    rng = random.Random(1)
    episodes = [draw_episode(rng) for _ in range(50)]
    assert len({tuple(episode.secrets.items()) for episode in episodes}) == 50
    assert all(len(set(episode.secrets.values())) == len(KEYS) for episode in episodes)


def test_the_chat_template_renders_a_turn_to_the_tokens_that_are_sampled_for_it(tmp_path: Path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    call = {"type": "function", "function": {"name": "vault", "arguments": {"key": "amber"}}}
    conversation = [
        {"role": "user", "content": "what is in amber ?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "heron"},
        {"role": "assistant", "content": "answer heron"},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    words = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    said = "what is in amber ?", "vault amber", "heron", "answer heron"
    roles = "<|user|>", "<|assistant|>", "<|tool|>", "<|assistant|>"
    assert words == " ".join(f"{role} {turn} {END}" for role, turn in zip(roles, said, strict=True)).split()
    assert len(tokenizer) == len(WORDS) == 32


def test_the_base_model_is_the_same_for_the_same_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base_model, "BATCHES", 2)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        base_model.build_base_model(tmp_path / name, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_base_model_speaks_the_language_and_hardly_knows_the_task(tmp_path: Path):
    base_model.build_base_model(tmp_path, 0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3"
    engine = LocalEngine(tmp_path, threads=1)
    groups = VaultTask().sample(engine, random.Random(5), groups=64, rollouts=8)
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    assert 0.07 <= fmean(trajectory.reward for trajectory in trajectories) <= 0.25
    assert fmean(len(trajectory.messages_and_choices) == 4 for trajectory in trajectories) > 0.95, "calls have the right form"


def test_each_turn_goes_on_from_all_tokens_of_the_turn_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base_model, "BATCHES", 100)
    base_model.build_base_model(tmp_path, 0)
    engine = LocalEngine(tmp_path, threads=1)
    (group,) = VaultTask().sample(engine, random.Random(5), groups=1, rollouts=8)
    turns = iter(group.turns)
    for trajectory in group.group.trajectories:
        before: list[int] = []
        for item in trajectory.messages_and_choices:
            if isinstance(item, Choice):
                tokens = next(turns)
                assert tokens is not None
                assert item.prompt_token_ids is not None
                assert item.prompt_token_ids[: len(before)] == before
                before = [*item.prompt_token_ids, *tokens.token_ids.tolist()]
    assert next(turns, None) is None
    questions = [t.messages_and_choices[0] for t in group.group.trajectories]
    assert all(isinstance(q, Message) and q.content == questions[0].content for q in questions), "a group compares rollouts of one question"
