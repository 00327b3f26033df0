"""What tests of consumers share: topics of their own, and a tiny causal LM that is made on the spot (nothing is downloaded)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply

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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 model (hidden 64, 2 layers, vocabulary 32, tied embeddings) whose answers vary: its logits are not flat."""
    # Here, so that a test that needs no model waits for no torch.
    import torch  # noqa: PLC0415 - as said
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - as said
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - as said

    folder = tmp_path_factory.mktemp("tiny-model")
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
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))  # noqa: S106 - a token, no secret
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",  # noqa: S106 - a token, no secret
        eos_token="<end>",  # noqa: S106 - a token, no secret
        pad_token="<pad>",  # noqa: S106 - a token, no secret
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
async def settings(kafka: str, topic_prefix: str) -> Settings:
    """Settings of the test's own topics (3 lanes), which exist."""
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=3))
    await apply(settings)
    return settings


@pytest.fixture
async def producer(kafka: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        yield producer
