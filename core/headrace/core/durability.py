"""Whether a power loss can take back what was committed (exactly-once rule 20).

A broker that has acknowledged a record may not have synced it. One machine that loses its power can come up with a ledger that ends
before the weights that it has published; with 3 replicas, 2 of them in sync at each commit, that takes two machines at once.

Guarantees: what the cluster says of the least safe of our topics. Limitations: whether the replicas share a power supply.
"""

from dataclasses import dataclass

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions
from headrace.core.topic_admin import open_admin
from headrace.schemas.topics import TOPICS, Topics

_REPLICAS, _IN_SYNC = 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """Of the least safe topic."""

    topic: str
    replicas: int
    min_in_sync: int

    @property
    def safe(self) -> bool:
        """Whether one machine may lose its power."""
        return self.replicas >= _REPLICAS and self.min_in_sync >= _IN_SYNC

    @property
    def text(self) -> str:
        """For people."""
        found = f"{self.topic} has replication {self.replicas} and min.insync.replicas {self.min_in_sync}"
        if self.safe:
            return found
        needed = f"safety against that needs replication {_REPLICAS} and min.insync.replicas {_IN_SYNC}"
        return f"{found}: a power loss can take back committed steps whose weights are published; {needed}"


async def durability(options: ClientOptions, topics: Topics) -> Durability:
    """What the cluster keeps our topics with.

    Raises:
        HeadraceError: none of our topics exists, or the broker does not tell.
        KafkaUnavailableError: no broker.
    """
    ours = {topics.full(spec.name) for spec in TOPICS}
    async with open_admin(options) as admin:
        replicas = {
            topic["topic"]: min(len(partition["replicas"]) for partition in topic["partitions"])
            for topic in await admin.describe_topics()
            if topic["topic"] in ours and topic["partitions"]
        }
        if not replicas:
            raise HeadraceError(f"no topic with prefix {topics.prefix!r} exists: run `headrace topics apply`")
        wanted = [ConfigResource(ConfigResourceType.TOPIC, name, {"min.insync.replicas": ""}) for name in sorted(replicas)]
        found = []
        for answer in await admin.describe_configs(wanted):
            for code, message, _kind, name, entries in answer.resources:
                if code:
                    raise HeadraceError(f"reading the settings of {name}: {message or for_code(code).__name__}")
                found.append(Durability(topic=name, replicas=replicas[name], min_in_sync=int(entries[0][1])))
    return min(found, key=lambda each: (each.safe, each.replicas, each.min_in_sync))
