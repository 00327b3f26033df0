"""A tiny causal LM that is made on the spot (nothing is downloaded): a Qwen3 whose answers vary, and a tokenizer of one word a token."""

from pathlib import Path

WORDS = [
    "<pad>",
    "<end>",
    "<user>",
    "<assistant>",
    "<tool>",
    "<system>",
    "<unk>",
    *"abcdefghijklmnopqrstuvwxy",
]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def save_tiny_model(folder: Path) -> Path:
    """Write a Qwen3 model (hidden 64, 2 layers, vocabulary 32, tied embeddings) whose logits are not flat; returns the folder."""
    # Here, so that a test that needs no model waits for no torch.
    import torch  # noqa: PLC0415 - as said
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - as said

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_word_tokenizer(folder, WORDS, TEMPLATE)
    return folder


def save_word_tokenizer(folder: Path, vocabulary: list[str], template: str) -> None:
    """Write a tokenizer of one word a token, with `<unk>`, `<end>` and `<pad>`, and this chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - heavy
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))  # noqa: S106 - a token, no secret
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",  # noqa: S106 - a token, no secret
        eos_token="<end>",  # noqa: S106 - a token, no secret
        pad_token="<pad>",  # noqa: S106 - a token, no secret
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
