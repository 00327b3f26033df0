"""The tiny language of the vault task as an ordinary Hugging Face tokenizer: 32 whole words and a chat template.

Guarantees: rendering a conversation and encoding it gives one token a word, and a well-formed turn renders to exactly the tokens
that a sampler draws for it (`vault amber <|end|>`), so each turn's prompt is a prefix of the next. Gives up: any other text; a word
outside the vocabulary is `<|unk|>`.
"""

from pathlib import Path

from headrace.demo.vault import ANSWER, CALL, END, KEYS, QUESTION, SECRETS

PAD, UNKNOWN, USER, ASSISTANT, TOOL = "<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL = (PAD, UNKNOWN, USER, ASSISTANT, TOOL, END)
WORDS = (*SPECIAL, *QUESTION, CALL, ANSWER, *KEYS, *SECRETS)
IDS = {word: i for i, word in enumerate(WORDS)}

# A tool call is said as the call's word and its key; every turn ends with the end marker, which is also the stop token.
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
