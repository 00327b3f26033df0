"""The lane of a model: murmur2 of its id, as Kafka's Java client and aiokafka choose the partition of a key.

Other clients hash in other ways (librdkafka's default is CRC32); what they put elsewhere is dead-lettered as `wrong_lane`.
"""

from aiokafka.partitioner import murmur2


def lane_of(model_id: str, partitions: int) -> int:
    """The partition, in 0 to `partitions` - 1, of every record with this key."""
    if partitions < 1:
        raise ValueError(f"a topic has at least one partition, not {partitions}")
    return (int(murmur2(model_id.encode())) & 0x7FFFFFFF) % partitions
