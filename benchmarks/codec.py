"""Decoding a group of 8 × 2,000 tokens: safetensors against the JSON of the hosted APIs. Both end in the same `SampledGroup`."""

import gc
import time

from benchmarks.groups import hosted_json
from benchmarks.measuring import Comparison, Rates

from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, decode_group, encode_safetensors

TARGET = 50.0


def _rate(body: bytes, content_type: str, repeats: int) -> float:
    """Groups a second."""
    gc.collect()
    start = time.perf_counter()
    for _ in range(repeats):
        decode_group(body, content_type)
    return repeats / (time.perf_counter() - start)


def run(rounds: int) -> list[Comparison]:
    """Measure."""
    as_json = hosted_json(8, 2000)
    as_safetensors = encode_safetensors(decode_group(as_json))
    ours: list[float] = []
    reference: list[float] = []
    for _ in range(rounds):
        reference.append(_rate(as_json, JSON_TYPE, 20))
        ours.append(_rate(as_safetensors, SAFETENSORS_TYPE, 1000))
    return [
        Comparison(
            title="Decode: safetensors group vs hosted-API JSON, 8 × 2,000 tokens",
            command="python benchmarks/run.py codec",
            ours=Rates(name=f"safetensors, {len(as_safetensors):,} bytes", unit="groups/s", per_round=ours),
            reference=Rates(name=f"hosted-API JSON, {len(as_json):,} bytes", unit="groups/s", per_round=reference),
            target=TARGET,
        )
    ]
