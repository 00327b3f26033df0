"""A tiny causal LM that always says the same: after each word comes a certain next one. What it says is written into its weights."""

from itertools import pairwise
from pathlib import Path

from tests.consumers.tiny_model import save_word_tokenizer

SAYS = 'well <tool_call> {"name": "look", "arguments": {"key": "a"}} </tool_call>'
_WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "<tool>", "<system>", "<tools>", "<unk>", "hello", "look", "b"]
_TEMPLATE = (
    "{% if tools %}<tools> {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.key }} {% endfor %}<end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
_SURE = 40.0
"""Logits of the next word: its probability is 1 but for a hair."""


def save_speaking_model(folder: Path, says: str = SAYS) -> Path:
    """Write a model of one layer that adds nothing to the embeddings, so that the head sees the last word alone; returns the folder."""
    import torch  # noqa: PLC0415 - a test that needs no model waits for no torch
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - as said

    spoken = says.split()
    vocabulary = list(dict.fromkeys([*_WORDS, *spoken]))
    size = 64
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    chain = ["<assistant>", *spoken, "<end>"]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for word, following in pairwise(chain):
            model.lm_head.weight[vocabulary.index(following), vocabulary.index(word)] = _SURE / size**0.5
    model.save_pretrained(folder)
    save_word_tokenizer(folder, vocabulary, _TEMPLATE)
    return folder
