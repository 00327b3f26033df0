"""The demo's base model: a Qwen3 of 100 thousand parameters that speaks the vault's language and hardly knows the task.

It is trained for 300 batches of 64 on transcripts of the right form without aim: the key and the secret are copied rightly one
time in five, otherwise they are any. So it is like an instruct model before reinforcement learning: fluent, and
right 7 to 20 % of the time. (From random weights with credit for form alone, the call's words are reinforced everywhere and the
answer is never explored; and with transformers' default `initializer_range` of 0.02 a model this narrow never learns to copy.)

Guarantees: an ordinary Hugging Face causal LM folder, the same bits for the same seed on the same machine.
Shapes: B transcripts, T tokens.

Its tokenizer is an ordinary Hugging Face tokenizer of 32 whole words with a chat template. Rendering a conversation and encoding it gives
one token a word, and a well-formed turn renders to exactly the tokens that a sampler draws for it (`vault amber <|end|>`), so that each
turn's prompt is a prefix of the next. A word outside the vocabulary is `<|unk|>`.
"""

import random
import sys
from pathlib import Path

from headrace.demo.vault import ANSWER, CALL, END, KEYS, QUESTION, SECRETS

PAD, UNKNOWN, USER, ASSISTANT, TOOL = "<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL = (PAD, UNKNOWN, USER, ASSISTANT, TOOL, END)
WORDS = (*SPECIAL, *QUESTION, CALL, ANSWER, *KEYS, *SECRETS)
IDS = {word: i for i, word in enumerate(WORDS)}

# A tool call is rendered as the call's word and its key; every turn ends with the end marker, which is also the stop token.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|> ' -}}
{%- if message.content -%}{{ message.content + ' ' -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}{{ call.function.name + ' ' + call.function.arguments.key + ' ' -}}{%- endfor -%}
{{ '<|end|> ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' -}}{%- endif -%}
"""


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template into the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - the command line must start without them
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers' constructor has no types
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, TOOL],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


BATCHES = 300
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
COPIED = 0.2
"""Share of transcripts in which the key (and, apart from that, the secret) is copied rightly."""


def aimless_transcript(rng: random.Random) -> list[str]:
    """The words of one whole episode of the right form."""
    key, secret = rng.choice(KEYS), rng.choice(SECRETS)
    called = key if rng.random() < COPIED else rng.choice(KEYS)
    said = secret if rng.random() < COPIED else rng.choice(SECRETS)
    *words, mark = QUESTION
    question = [USER, *words, key, mark, END]
    return [*question, ASSISTANT, CALL, called, END, TOOL, secret, END, ASSISTANT, ANSWER, said, END]


def assistant_mask(words: list[str]) -> list[bool]:
    """Which words the assistant says, its end markers included: the only ones with a loss, the rest cannot be predicted."""
    mask, speaker = [], ""
    for word in words:
        mask.append(speaker == ASSISTANT)
        speaker = word if word in {USER, ASSISTANT, TOOL} else speaker
    return mask


def build_base_model(folder: Path, seed: int) -> None:
    """Train the base model (about 5 s on one core) and save it with its tokenizer into `folder`."""
    import torch  # noqa: PLC0415 - the command line must start without torch
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    torch.set_num_threads(1)  # its matrices are too small for more
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=IDS[END],
        pad_token_id=IDS[PAD],
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    rng = random.Random(seed)
    spoken_T = torch.tensor(assistant_mask(aimless_transcript(rng)))
    for _ in range(BATCHES):
        words = [aimless_transcript(rng) for _ in range(BATCH_SIZE)]
        ids_BT = torch.tensor([[IDS[word] for word in transcript] for transcript in words])
        labels_BT = torch.where(spoken_T, ids_BT, -100)
        loss = model(input_ids=ids_BT, labels=labels_BT, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    save_tokenizer(folder)


if __name__ == "__main__":
    build_base_model(Path(sys.argv[1]), int(sys.argv[2]))
