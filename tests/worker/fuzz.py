"""Messages that no honest producer sends, from a seed: mutated groups of both encodings, random bytes, odd headers, keys and jobs."""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from tests.worker.groups import group

from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, encode_json, encode_safetensors, sampled
from headrace.schemas.trajectory import TrajectoryGroup

_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63 - 1,
    1e308,
    -0.0,
    5e-324,
    "",
    "\x00",
    "NaN",
    "é\u202e\U0001f4a5",
    "x" * 3000,
    [],
    [[[[]]]],
    {},
    {"": {"": {}}},
    [None],
    ["a", 1, None],
)
_RAW = (
    b"",
    b"null",
    b"[" * 5000,
    b'{"trajectories":' * 2000,
    b'{"trajectories": [{"reward": 1e999}]}',
    b'{"trajectories": [{"reward": NaN}]}',
    b'{"trajectories": [{"reward": ' + b"9" * 5000 + b"}]}",
    b'{"group_id": "\\ud800", "trajectories": []}',
    b'{"trajectories": [], "trajectories": 1}',
    b"\xff\xfe{}",
    b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
    b"\xff" * 64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A record to send."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int


class Fuzzer:
    """Makes messages.

    Args:
        seed: The same seed makes the same messages.
        models: Model ids, one for each lane.
    """

    def __init__(self, seed: int, models: dict[int, str]) -> None:
        self._rng = random.Random(seed)
        self._models = models
        self._made = 0

    def groups(self, count: int) -> Iterator[Message]:
        """For `trajectory-groups`."""
        kinds = (self._group, self._group, self._mutated_json, self._mutated_json, self._broken_bytes, self._noise, self._claim, self._job)
        for _ in range(count):
            value, headers = self._rng.choice(kinds)()
            yield self._addressed(value, self._odd_headers(headers))

    def commands(self, count: int) -> Iterator[Message]:
        """For `commands`; none of them is one of ours, untouched."""
        for _ in range(count):
            model_id = self._rng.choice([*self._models.values(), "nobody"])
            fields: dict[str, Any] = {"model_id": model_id, "job_id": f"job-{self._rng.randrange(40)}", "settings": {"base_model": "tiny"}}
            self._change(fields)
            kind = self._rng.choice(("cancel-job", "pause-job", "create-model", "resume-model", "tea-pot", "cancel-job.v9"))
            value = self._broken(orjson.dumps(fields)) if self._rng.random() < 0.3 else orjson.dumps(fields)
            yield self._addressed(value, (("ce_type", f"headrace.{kind}.v1".encode()),))

    def _addressed(self, value: bytes | None, headers: tuple[tuple[str, bytes], ...]) -> Message:
        lane, model_id = self._rng.choice(sorted(self._models.items()))
        roll = self._rng.random()
        if roll < 0.9:
            return Message(key=model_id.encode(), value=value, headers=headers, partition=lane)
        if roll < 0.93:
            return Message(key=None, value=value or b"", headers=headers, partition=lane)  # aiokafka sends no record without both
        if roll < 0.96:
            return Message(key=model_id.encode(), value=value, headers=headers, partition=(lane + 1) % len(self._models))
        odd = self._rng.choice((b"\xff\xfe", b"", "é".encode(), self._rng.randbytes(20), b"nobody"))
        return Message(key=odd, value=value, headers=headers, partition=lane)

    def _odd_headers(self, headers: tuple[tuple[str, bytes], ...]) -> tuple[tuple[str, bytes], ...]:
        if self._rng.random() > 0.1:
            return headers
        odd = (
            ("ce_type", b"headrace.trajectory-group.v2"),
            ("ce_type", b"\xff\xff"),
            ("ce_type", b"headrace.step-record.v1"),
            ("content-type", b"text/plain"),
            ("content-type", SAFETENSORS_TYPE.encode()),
            ("traceparent", b"00-" + b"z" * 60),
            ("", b""),
            ("x" * 2000, b"y"),
        )
        return (*headers, *self._rng.sample(odd, self._rng.randint(1, 3)))

    def _plain(self) -> TrajectoryGroup:
        self._made += 1
        job_id = f"job-{self._rng.randrange(40)}" if self._rng.random() < 0.1 else None
        name = f"g{self._rng.randrange(self._made)}" if self._rng.random() < 0.1 else f"g{self._made}"
        return group(name, seed=self._rng.randrange(8), job_id=job_id)

    def _group(self) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        if self._rng.random() < 0.5:
            return encode_json(sampled(self._plain())), (("content-type", JSON_TYPE.encode()),)
        return encode_safetensors(sampled(self._plain())), (("content-type", SAFETENSORS_TYPE.encode()),)

    def _mutated_json(self) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        fields = orjson.loads(encode_json(sampled(self._plain())))
        for _ in range(self._rng.randint(1, 3)):
            self._change(fields)
        return orjson.dumps(fields), ()

    def _change(self, tree: Any) -> None:
        """Put something odd somewhere into a JSON tree, or take something out."""
        while True:
            places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
            if not places:
                return
            at = self._rng.choice(places)
            if isinstance(tree[at], (dict, list)) and tree[at] and self._rng.random() < 0.8:
                tree = tree[at]
                continue
            if self._rng.random() < 0.2:
                del tree[at]
            else:
                tree[at] = copy.deepcopy(self._rng.choice(_ODD))
            return

    def _broken_bytes(self) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        value, headers = self._group()
        return self._broken(value), headers

    def _broken(self, value: bytes) -> bytes:
        body = bytearray(value)
        for _ in range(self._rng.randint(1, 8)):
            if not body:
                break
            at = self._rng.randrange(len(body))
            match self._rng.randrange(4):
                case 0:
                    body[at] = self._rng.randrange(256)
                case 1:
                    del body[at : at + self._rng.randint(1, 40)]
                case 2:
                    body[at:at] = self._rng.randbytes(self._rng.randint(1, 8))
                case _:
                    body[at:] = body[at : at + self._rng.randint(0, 200)]
        return bytes(body)

    def _noise(self) -> tuple[bytes | None, tuple[tuple[str, bytes], ...]]:
        choices = (None, self._rng.randbytes(self._rng.randrange(400)), self._rng.choice(_RAW))
        return self._rng.choice(choices), (("content-type", self._rng.choice((JSON_TYPE, SAFETENSORS_TYPE)).encode()),)

    def _claim(self) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        fields: dict[str, Any] = {
            "uri": self._rng.choice(("file:///nowhere", "s3://nobody/x", "file:///../../etc/passwd", "", "é")),
            "sha256": "0" * 64,
            "size": 9,
            "raw_size": self._rng.choice((1, 9, 2**40)),
            "content_type": JSON_TYPE,
            "group_id": f"claimed-{self._made}",
        }
        if self._rng.random() < 0.5:
            self._change(fields)
        return orjson.dumps(fields), (("ce_type", b"headrace.group-claim.v1"),)

    def _job(self) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
        fields: dict[str, Any] = {
            "job_id": self._rng.choice((f"job-{self._rng.randrange(40)}", "", "\x00", "é" * 100, "x" * 3000, "../../etc")),
            "group_ids": [f"g{self._rng.randrange(self._made + 1)}" for _ in range(self._rng.randrange(4))],
            "kind": self._rng.choice(("rl", "sft")),
        }
        if self._rng.random() < 0.5:
            fields["config"] = {
                "learning_rate": self._rng.choice((1e-3, 5, 1e-30)),
                "packed_sequence_length": self._rng.choice((8, 64, None)),
            }
        if self._rng.random() < 0.5:
            self._change(fields)
        return orjson.dumps(fields), (("ce_type", b"headrace.training-job.v1"),)
