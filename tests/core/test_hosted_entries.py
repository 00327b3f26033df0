"""Entries by columns are the entries that the codec reads, or are left to it."""

import random
from typing import Any

import orjson
import pytest

from headrace.core.hosted_entries import decode_hosted
from headrace.schemas.codec import SampledGroup, decode_group
from headrace.schemas.reasons import CodecError

OPENAI = ("token", "bytes", "logprob", "top_logprobs")
VLLM = ("token", "logprob", "bytes", "top_logprobs")


def entry(token: int, logprob: object, said: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    values = {"token": f"token_id:{token}", "logprob": logprob, "bytes": list(said), "top_logprobs": []}
    return {key: values[key] for key in keys}


def body_of(turns: list[list[dict[str, Any]]]) -> bytes:
    trajectories = [
        {
            "messages_and_choices": [
                {"role": "user", "content": 'say "content":[{"token":"token_id:1"'},
                {"finish_reason": "stop", "message": {"content": "a"}, "logprobs": {"content": entries, "refusal": None}},
            ],
            "reward": float(i),
        }
        for i, entries in enumerate(turns)
    ]
    return orjson.dumps({"metadata": {"before": "x" * 300}, "trajectories": trajectories, "logs": ["x" * 1200]})


def drawn_body(rng: random.Random, keys: tuple[str, ...]) -> bytes:
    """One to three turns of one to six tokens, as different as servers write them."""

    def drawn() -> dict[str, Any]:
        logprob = rng.choice([0.0, -rng.random(), -rng.random() * 1e-7, -30 * rng.random(), -rng.randrange(10_000)])
        return entry(rng.choice([rng.randrange(10), rng.randrange(10**7)]), logprob, rng.randbytes(rng.choice([0, 1, 3, 20, 65])), keys)

    return body_of([[drawn() for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 3))])


def read(body: bytes) -> SampledGroup | None:
    try:
        return decode_group(body)
    except CodecError:
        return None


@pytest.mark.parametrize("keys", [OPENAI, VLLM])
def test_entries_as_servers_write_them_are_read_by_columns(keys: tuple[str, ...]) -> None:
    for seed in range(150):
        body = drawn_body(random.Random(seed), keys)
        found = decode_hosted(body)
        assert found is not None, seed
        assert found == decode_group(body), seed


@pytest.mark.parametrize("keys", [OPENAI, VLLM])
def test_a_changed_byte_is_read_alike_or_left_to_the_codec(keys: tuple[str, ...]) -> None:
    by_columns = 0
    for seed in range(1500):
        rng = random.Random(seed)
        body = bytearray(drawn_body(rng, keys))
        first, last = body.index(b'"content":[{"t') - 60, body.rindex(b"}]") + 60
        for _ in range(rng.randint(1, 2)):
            at, new = rng.randint(first, last), rng.choice(b'0159,-.e"[]{}: x\\tn')
            if rng.random() < 0.5:
                body[at] = new
            else:
                body.insert(at, new)
        found = decode_hosted(bytes(body))
        by_columns += found is not None
        assert found is None or found == read(bytes(body)), seed
    assert by_columns > 50, "most changes make it unusual, some only change a digit"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"bytes":[97]', b'"bytes":[097]'),
        (b'"bytes":[97]', b'"bytes":[97,]'),
        (b'"bytes":[97]', b'"bytes":[9 7]'),
        (b'"logprob":-0.5', b'"logprob":true'),
        (b'"logprob":-0.5', b'"logprob":1e39'),
        (b'"logprob":-0.5', b'"logprob":-00.5'),
        (b'"top_logprobs":[]', b'"top_logprobs":[{"token":"a"}]'),
        (b"token_id:77", b"token_id:7 7"),
        (b"token_id:77", b"token_id:-77"),
        (b"token_id:77", b"word"),
        (b'"finish_reason"', b'"token_ids":[77],"finish_reason"'),
        (b'"finish_reason"', b'"policy_versions":[1],"finish_reason"'),
        (b'"refusal":null', b'"refusal":[{"token":"token_id:1","logprob":-1}]'),
        (b'"logs"', b'"x":{"content":[{"token":"token_id:77","bytes":[97],"logprob":-0.5,"top_logprobs":[]}]},"logs"'),
    ],
)
def test_what_is_not_just_so_is_left_to_the_codec(old: bytes, new: bytes) -> None:
    body = body_of([[entry(77, -0.5, b"a", OPENAI)]])
    assert decode_hosted(body) is not None
    assert body.count(old) >= 1
    assert decode_hosted(body.replace(old, new, 1)) is None
