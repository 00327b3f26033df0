"""Tiny base models with a byte-level tokenizer and a ChatML-like template, made on the spot, and builders of groups."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.trainer.groups import TokenizedGroup, TokenizedTrajectory, TokenSequence
from headrace.trainer.rows import CreditedSequence, PackedRow
from headrace.trainer.world import WorldSettings

ONE_THREAD = WorldSettings(threads=1)

BYTES = 256
END, PAD, START = 256, 257, 258
VOCABULARY = 264
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'poison' %}{{ raise_exception('no poison') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '[' + call.function.name + ':' }}"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    "{{ ']' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_byte_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """A tokenizer with one token a byte (id = byte), and ChatML's marks above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - tests of arithmetic start without it
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415 - as said
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as said

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert sorted(letters.values()) == sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_end|>", "<|pad|>", "<|im_start|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")  # noqa: S106 - tokens, no secrets
    fast.chat_template = template
    fast.save_pretrained(folder)


def save_model(folder: Path, architecture: str = "qwen3", **changes: Any) -> None:
    import torch  # noqa: PLC0415 - as said
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - as said

    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings | changes)).save_pretrained(folder)


def sequence(prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float] | None = None) -> TokenSequence:
    said = [np.nan] * len(answer) if logprobs is None else list(logprobs)
    return TokenSequence(
        token_ids=np.array([*prompt, *answer], np.int32),
        trainable=np.array([False] * len(prompt) + [True] * len(answer)),
        logprobs=np.array([np.nan] * len(prompt) + said, np.float32),
    )


def group(rewards: Sequence[float], sequences: Sequence[TokenSequence], group_id: str = "g") -> TokenizedGroup:
    """One sequence a trajectory."""
    return TokenizedGroup(
        group_id=group_id,
        trajectories=tuple(TokenizedTrajectory(reward=r, sequences=(s,)) for r, s in zip(rewards, sequences, strict=True)),
    )


def random_groups(seed: int, groups: int = 3, rollouts: int = 4, length: int = 12) -> tuple[TokenizedGroup, ...]:
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(0, BYTES, 5)
        answers = [rng.integers(0, BYTES, int(n)) for n in rng.integers(2, length, rollouts)]
        sequences = [sequence(prompt, answer, -rng.random(len(answer)) * 6) for answer in answers]
        made.append(group([float(r) for r in rng.random(rollouts)], sequences, f"g{g}"))
    return tuple(made)


def families(seed: int, groups: int = 3, answers: int = 4) -> list[CreditedSequence]:
    """Sequences that share prompts, and in pairs the beginnings of their answers too; weights of both signs."""
    rng = np.random.default_rng(seed)
    made: list[CreditedSequence] = []
    for tree in range(groups):
        prompt = rng.integers(0, BYTES, int(rng.integers(9, 24))).tolist()
        start: list[int] = []
        for a in range(answers):
            if a % 2 == 0:
                start = rng.integers(0, BYTES, int(rng.integers(1, 6))).tolist()
            answer = [*start, *rng.integers(0, BYTES, int(rng.integers(1, 9))).tolist()]
            made.append(
                CreditedSequence(
                    sequence=sequence(prompt, answer, (-rng.random(len(answer)) * 6).tolist()),
                    tree=tree,
                    branch=len(made),
                    advantage=float(rng.normal()),
                    weight=float(rng.normal()),
                )
            )
    return made


def save_gguf(file: Path) -> None:
    """A llama of random float32 weights with a byte vocabulary, as one GGUF file."""
    from gguf import GGUFWriter  # noqa: PLC0415 - as said

    rng = np.random.default_rng(0)
    vocabulary, hidden, inner, kv = 64, 32, 64, 16
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(vocabulary - 3))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([2, 3, 3] + [6] * (vocabulary - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd": (vocabulary, hidden),
        "output": (vocabulary, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (rng.standard_normal(shape) * 0.1 + (len(shape) == 1)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blank_row(tokens: int, targets: int, sequence_tokens: int, sequences: int) -> PackedRow:
    """A row of one segment, full of zeros."""
    ints, floats = np.zeros(targets, np.int32), np.zeros(targets, np.float32)
    return PackedRow(
        token_ids_T=np.zeros(tokens, np.int32),
        position_ids_T=np.arange(tokens, dtype=np.int32),
        starts_G=np.zeros(1, np.int32),
        parents_G=np.full(1, -1, np.int32),
        predictors_N=ints,
        targets_N=ints,
        branches_N=ints,
        logprobs_N=floats,
        advantages_N=floats,
        weights_N=floats,
        lags_N=ints,
        sequence_tokens=sequence_tokens,
        sequences=sequences,
    )
