"""Lanes agree with Kafka's Java client."""

import pytest
from aiokafka.partitioner import DefaultPartitioner

from headrace.core.lanes import lane_of

# Hashes from Kafka's own UtilsTest.testMurmur2 (signed 32 bit).
JAVA_HASHES = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.mark.parametrize(("key", "java_hash"), JAVA_HASHES.items())
@pytest.mark.parametrize("partitions", [1, 12, 4096, 1_000_003])
def test_lane_is_javas_positive_hash_modulo_partitions(key: str, java_hash: int, partitions: int) -> None:
    assert lane_of(key, partitions) == (java_hash & 0x7FFFFFFF) % partitions


def test_lane_is_where_an_aiokafka_producer_sends_the_key() -> None:
    partitions = list(range(12))
    for i in range(200):
        key = f"model-ü-{i}"
        assert lane_of(key, 12) == DefaultPartitioner()(key.encode(), partitions, partitions)


def test_a_topic_without_partitions_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        lane_of("m", 0)
