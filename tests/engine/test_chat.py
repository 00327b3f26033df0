"""Chat completions of an engine that serves the tiny model, driven by the real OpenAI client and by plain HTTP."""

import asyncio

import pytest
import torch
from openai import AsyncOpenAI, NotFoundError
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "a b"}]
PROMPT = [2, 7, 8, 1, 3]


@pytest.fixture(scope="module")
def client(engine) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=str(engine.base_url), api_key="none", max_retries=0)


async def test_the_openai_client_gets_text_usage_and_logprobs(client):
    answer = await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=8, logprobs=True, top_logprobs=3, seed=1)
    (choice,) = answer.choices
    assert answer.model == "tiny@0"
    assert choice.message.role == "assistant"
    assert choice.finish_reason in {"stop", "length"}
    entries = choice.logprobs.content
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(entries)
    assert answer.usage.total_tokens == len(PROMPT) + len(entries)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob
        assert bytes(entry.bytes).decode() == entry.token
    words = [entry.token for entry in entries if entry.token != "<end>"]  # noqa: S105 - a token, no secret
    assert choice.message.content == " ".join(words)
