"""What topics there are and how many partitions each has.

Asks for all topics, never for one by name: aiokafka lets a broker create the topic that it asks for, and an auto-created topic has
the wrong partition count.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import LeaderNotAvailableError, for_code

from headrace.core.kafka import ClientOptions, KafkaUnavailableError, plain_errors


@asynccontextmanager
async def open_admin(options: ClientOptions) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started admin client; its failures are `KafkaUnavailableError`."""
    with plain_errors(options):
        admin = AIOKafkaAdminClient(**options)
        try:
            await admin.start()
            yield admin
        finally:
            await admin.close()


async def partition_counts(options: ClientOptions) -> dict[str, int]:
    """Partition count of every topic that the broker shows us.

    Raises:
        KafkaUnavailableError: the broker can't be reached.
    """
    async with open_admin(options) as admin:
        return await counts_of(admin)


async def cluster_id(options: ClientOptions) -> str:
    """The id that a cluster was formatted with: another one means other logs, whatever their topics are called.

    Raises:
        KafkaUnavailableError: the broker can't be reached.
    """
    async with open_admin(options) as admin:
        return str((await admin.describe_cluster())["cluster_id"])


async def counts_of(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """As `partition_counts`, through a client that is open."""
    counts: dict[str, int] = {}
    for topic in await admin.describe_topics():
        error = for_code(topic["error_code"])
        # A topic made a moment ago has no leader yet, but all its partitions.
        if topic["error_code"] and error is not LeaderNotAvailableError:
            continue
        counts[topic["topic"]] = len(topic["partitions"])
    return counts


async def partition_count(options: ClientOptions, topic: str) -> int:
    """Partition count of one topic.

    Raises:
        KafkaUnavailableError: the broker can't be reached, or has no such topic.
    """
    count = (await partition_counts(options)).get(topic)
    if count is None:
        raise KafkaUnavailableError(
            f"Kafka at {options['bootstrap_servers']} has no topic {topic}: run `headrace topics apply`, or correct topics.prefix"
        )
    return count
