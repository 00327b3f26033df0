"""Completions of an engine that serves the tiny model, driven by the real OpenAI client and by plain HTTP."""

import asyncio
import math
from typing import Any

import orjson
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "a b"}]
PROMPT = [2, 7, 8, 1, 3]
END = 1


@pytest.fixture(scope="module")
def client(engine) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=str(engine.base_url), api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(tiny_model) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def forced(model: torch.nn.Module, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [N, V] at the places of the tokens, by the model's own forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + token_ids]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]


async def asked(engine, path: str = "chat/completions", **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 8} | ({"messages": ASK} if path.startswith("chat") else {}) | fields
    answer = await engine.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(engine, path: str = "chat/completions", **fields: Any) -> list[Any]:
    body = {"model": "tiny", "max_tokens": 8, "stream": True} | ({"messages": ASK} if path.startswith("chat") else {}) | fields
    answer = await engine.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [orjson.loads(event) for event in events]


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


async def test_logprobs_are_the_models_own_at_temperature_one_however_the_tokens_were_drawn(engine, model):
    for temperature, top_p in ((1, 1), (0, 1), (0.5, 0.9), (2, 1)):
        answer = await asked(
            engine, n=4, logprobs=True, top_logprobs=2, return_token_ids=True, temperature=temperature, top_p=top_p, seed=3
        )
        assert answer["prompt_token_ids"] == PROMPT
        for choice in answer["choices"]:
            ids, entries = choice["token_ids"], choice["logprobs"]["content"]
            expected_NV = forced(model, PROMPT, ids)
            assert [entry["logprob"] for entry in entries] == pytest.approx([expected_NV[n, i].item() for n, i in enumerate(ids)], abs=1e-5)
            best = expected_NV.topk(2).values.tolist()
            assert [[other["logprob"] for other in entry["top_logprobs"]] for entry in entries] == [
                pytest.approx(b, abs=1e-5) for b in best
            ]
            if temperature == 0:
                assert ids == expected_NV.argmax(dim=-1).tolist()


async def test_what_top_p_leaves_out_is_never_drawn_and_temperature_sharpens(engine, model):
    logprobs_V = forced(model, PROMPT, [7])[0]
    order = logprobs_V.argsort(descending=True).tolist()
    sums = logprobs_V.exp().sort(descending=True).values.cumsum(dim=0).tolist()
    nucleus = set(order[: next(i for i, s in enumerate(sums) if s >= 0.5) + 1])
    fields = {"n": 128, "max_tokens": 1, "return_token_ids": True, "seed": 5}
    drawn = [choice["token_ids"][0] for choice in (await asked(engine, top_p=0.5, **fields))["choices"]]
    assert set(drawn) <= nucleus
    assert len(set(drawn)) > 1
    plain = [choice["token_ids"][0] for choice in (await asked(engine, **fields))["choices"]]
    assert not set(plain) <= nucleus
    sharp = [choice["token_ids"][0] for choice in (await asked(engine, temperature=0.3, **fields))["choices"]]
    assert sharp.count(order[0]) > plain.count(order[0])


async def test_tokens_follow_the_softmax(engine, model):
    draws = 16 * 128
    answers = await asyncio.gather(*[asked(engine, n=128, max_tokens=1, return_token_ids=True, seed=seed) for seed in range(draws // 128)])
    counts_V = torch.bincount(torch.tensor([c["token_ids"][0] for answer in answers for c in answer["choices"]]), minlength=32)
    expected_V = forced(model, PROMPT, [7])[0].double().exp()
    spread_V = (draws * expected_V * (1 - expected_V)).sqrt()
    assert ((counts_V - draws * expected_V).abs() <= 5 * spread_V + 1).all()


async def test_a_seed_gives_the_same_answer_again_and_its_choices_differ(engine):
    first, again, other = [
        [choice["token_ids"] for choice in (await asked(engine, n=3, return_token_ids=True, seed=seed))["choices"]] for seed in (7, 7, 8)
    ]
    assert first == again
    assert first != other
    assert len({tuple(ids) for ids in first}) == 3


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stop", [None, "c", ["q r", "x"]])
async def test_a_stream_put_together_is_the_whole_answer(engine, path, stop):
    fields = {
        "n": 4,
        "seed": 11,
        "logprobs": True if path.startswith("chat") else 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "max_tokens": 24,
        "stop": stop,
    } | ({"top_logprobs": 2} if path.startswith("chat") else {"prompt": PROMPT})
    whole = await asked(engine, path, **fields)
    chunks = await streamed(engine, path, **fields, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and chunk["policy_version"] == 0 for chunk in chunks[:-1])
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        ids = [token for part in parts for token in part["token_ids"]]
        assert ids == choice["token_ids"]
        assert [v for part in parts for v in part["policy_versions"]] == choice["policy_versions"] == [0] * len(ids)
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"] == PROMPT
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if path.startswith("chat"):
            assert parts[0]["delta"]["role"] == "assistant"
            assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
            assert [e for part in parts for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
            assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [e for part in parts for e in part["logprobs"][name]] == choice["logprobs"][name]


async def test_the_openai_client_reads_the_stream(client):
    fields = {"model": "tiny", "messages": ASK, "max_tokens": 12, "seed": 2}
    whole = await client.chat.completions.create(**fields)
    text, finish = "", None
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (text, finish) == (whole.choices[0].message.content, whole.choices[0].finish_reason)


async def test_a_stop_string_ends_the_text_before_it_and_keeps_the_tokens_that_made_it(engine):
    plain = (await asked(engine, max_tokens=24, seed=21, return_token_ids=True))["choices"][0]
    words = plain["message"]["content"].split()
    assert len(words) > 3
    (choice,) = (await asked(engine, max_tokens=24, seed=21, return_token_ids=True, stop=f"{words[1]} {words[2]}"))["choices"]
    assert choice["message"]["content"] == f"{words[0]} "
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == f"{words[1]} {words[2]}"
    assert choice["token_ids"] == plain["token_ids"][:3]


async def test_a_turn_ends_with_its_stop_token_or_at_the_limit(engine):
    answer = await asked(engine, n=64, max_tokens=12, return_token_ids=True, seed=2)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop", "length"}
    for choice in answer["choices"]:
        stopped = choice["finish_reason"] == "stop"
        assert (choice["token_ids"][-1] == END) is stopped
        assert END not in choice["token_ids"][:-1]
        assert stopped or len(choice["token_ids"]) == 12
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    early = await asked(engine, n=64, max_tokens=12, return_token_ids=True, seed=2, stop_token_ids=list(range(7, 20)))
    assert all(choice["token_ids"][-1] in {END, *range(7, 20)} for choice in early["choices"] if choice["finish_reason"] == "stop")
    assert early["usage"]["completion_tokens"] < answer["usage"]["completion_tokens"]


async def test_without_a_limit_the_context_is_the_limit(engine):
    answer = (await engine.post("chat/completions", json={"model": "tiny", "messages": ASK, "n": 32, "seed": 1})).json()
    longest = max(answer["choices"], key=lambda choice: len(choice["message"]["content"]))
    assert longest["finish_reason"] == "stop" or len(longest["message"]["content"].split()) <= 128 - len(PROMPT)


async def test_max_completion_tokens_is_the_same_limit(engine):
    answer = await engine.post("chat/completions", json={"model": "tiny", "messages": ASK, "max_completion_tokens": 2, "seed": 1})
    assert answer.json()["usage"]["completion_tokens"] <= 2


async def test_the_version_stands_in_the_answer_and_in_a_header(engine):
    for stream in (False, True):
        answer = await engine.post("chat/completions", json={"model": "tiny", "messages": ASK, "max_tokens": 2, "stream": stream})
        assert answer.headers["x-headrace-policy-version"] == "0"
    assert (await asked(engine))["policy_version"] == 0


@pytest.mark.parametrize("prompt", ["a b", ["a b", "c"], [7, 8], [[7, 8], [9]]])
async def test_completions_take_prompts_as_text_or_token_ids_one_or_several(engine, prompt):
    answer = await asked(engine, "completions", prompt=prompt, n=2, return_token_ids=True, temperature=0.0)
    prompts = [[7, 8], [9]] if isinstance(prompt[0], list) or prompt == ["a b", "c"] else [[7, 8]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [p for p in prompts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_the_warm_up_of_the_rlor_client_is_answered(engine):
    answer = await asked(engine, "completions", prompt=[1, 2], max_tokens=4, temperature=0.0)
    assert answer["object"] == "text_completion"
    assert 1 <= answer["usage"]["completion_tokens"] <= 4


async def test_parts_of_text_are_read_as_text(engine):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert (await asked(engine, messages=parts, return_token_ids=True))["prompt_token_ids"] == PROMPT


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "a " * 200}]}, "128 positions"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 124}, "128 positions"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 2}, "set logprobs to true"),
    ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    ({"top_k": 5}, "top_k"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"model": None}, "model"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "says"), BAD, ids=[",".join(fields) + str(i) for i, (fields, _) in enumerate(BAD)])
async def test_a_wrong_request_is_refused_with_what_is_wrong(engine, fields, says):
    answer = await engine.post("chat/completions", json={"model": "tiny", "messages": ASK, "max_tokens": 4} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("prompt", "says"),
    [([], "at least one"), ("", "empty"), ([7, 99], "outside the vocabulary"), ([[7]] * 129, "at most 128"), ([7, "a"], "prompt")],
)
async def test_a_wrong_prompt_is_refused(engine, prompt, says):
    answer = await engine.post("completions", json={"model": "tiny", "prompt": prompt})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "tiny", "messages": [], "temperature": NaN}'])
async def test_what_is_no_json_object_is_refused(engine, body):
    answer = await engine.post("chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_fields_that_change_nothing_are_ignored(engine):
    neutral = {"user": "me", "metadata": {"a": "b"}, "top_k": -1, "frequency_penalty": 0, "logit_bias": {}, "parallel_tool_calls": True}
    assert await asked(engine, **neutral, response_format={"type": "text"}, store=False)


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(engine):
    answer = await engine.post("chat/completions", content=b"x" * (17 * 1024 * 1024))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


async def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(NotFoundError, match="there is no model 'nobody'"):
        await client.chat.completions.create(model="nobody", messages=ASK)
    with pytest.raises(BadRequestError, match="presence_penalty"):
        await client.chat.completions.create(model="tiny", messages=ASK, presence_penalty=1)


async def test_other_routes_answer_in_the_same_shape(engine):
    for method, path, status in (("GET", "chat/completions", 405), ("GET", "nothing", 404)):
        answer = await engine.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    root = str(engine.base_url).removesuffix("/v1/")
    assert (await engine.get(f"{root}/health")).json() == {"status": "ok"}
    assert (await engine.get(f"{root}/version")).json()["version"]


async def test_a_client_that_leaves_disturbs_nobody(engine):
    whole = await asked(engine, max_tokens=100, seed=4)
    body = {"model": "tiny", "messages": ASK, "max_tokens": 100, "n": 16}
    leaving = [asyncio.create_task(engine.post("chat/completions", json=body | {"stream": stream})) for stream in (False, True)]
    staying = asyncio.create_task(asked(engine, max_tokens=100, seed=4))
    await asyncio.wait(leaving, timeout=0.02)
    for task in leaving:
        task.cancel()
    assert (await staying)["choices"][0]["message"] == whole["choices"][0]["message"]
    assert (await asked(engine, max_tokens=100, seed=4))["choices"][0]["message"] == whole["choices"][0]["message"]


async def test_no_logprob_is_infinite_or_null(engine):
    answer = await asked(engine, n=8, logprobs=True, max_tokens=32)
    assert all(math.isfinite(entry["logprob"]) for choice in answer["choices"] for entry in choice["logprobs"]["content"])


async def test_a_page_that_a_browser_has_open_can_not_call(engine):
    own = f"{engine.base_url.host}:{engine.base_url.port}"
    assert (await engine.get("models", headers={"Origin": f"http://{own}"})).status_code == 200
    for headers in ({"Host": "evil.example"}, {"Host": "evil.example", "Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "["}):
        answer = await engine.get("models", headers=headers)
        assert answer.status_code in {400, 403}, headers
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_nested_body_is_refused_as_any_other_that_is_wrong(engine):
    deep = "1"
    for _ in range(900):
        deep = f'{{"a":{deep}}}'
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}'
    said = '"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":1'
    for body in (f'{{{said},"tools":[{tool}]}}', f'{{{said},"x":{deep}}}', f'{{{said},"stop":"\\ud800"}}', "[" * 5000):
        answer = await engine.post("chat/completions", content=body)
        assert answer.status_code < 500, (body[:80], answer.text)
