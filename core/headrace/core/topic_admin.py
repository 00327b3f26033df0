"""Creating the topics of `headrace.schemas.topics`, and saying where a cluster differs from them.

Guarantees: nothing is changed unless every existing lane topic has the configured partition count; a partition count is never changed
(keyed order depends on it); settings of a topic that are not ours stay. Limitations: replication of existing topics is left as it is.

What topics there are and how many partitions each has.

Asks for all topics, never for one by name: aiokafka lets a broker create the topic that it asks for, and an auto-created topic has
the wrong partition count.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import LeaderNotAvailableError, TopicAlreadyExistsError, for_code

from headrace.core.errors import HeadraceError
from headrace.core.kafka import ClientOptions, KafkaUnavailableError, client_options, plain_errors
from headrace.core.settings import Settings
from headrace.schemas.topics import TOPICS, Topics, TopicSpec


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


_DYNAMIC_TOPIC_CONFIG = 1
_VISIBLE_SECONDS = 30


class TopicsDifferError(HeadraceError):
    """The topics are not as Headrace needs them; names each and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDifference:
    """One setting of a topic."""

    name: str
    found: str | None
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicReport:
    """One topic: what it should be, what it is."""

    topic: str
    spec: TopicSpec
    partitions: int | None
    """None: the topic was not there."""
    wanted_partitions: int
    differences: tuple[ConfigDifference, ...]
    """Before `apply`; afterwards there are none."""

    @property
    def state(self) -> Literal["missing", "differs", "equal"]:
        """In a word."""
        if self.partitions is None:
            return "missing"
        wrong_count = self.spec.lane and self.partitions != self.wanted_partitions
        return "differs" if self.differences or wrong_count else "equal"


async def show(settings: Settings) -> list[TopicReport]:
    """Every topic of Headrace next to what the cluster has.

    Raises:
        KafkaUnavailableError: no broker.
    """
    async with open_admin(client_options(settings.kafka, "headrace-topics")) as admin:
        return await _compare(admin, settings)


async def apply(settings: Settings) -> list[TopicReport]:
    """Create what is missing and set what differs; returns the reports from before.

    Raises:
        TopicsDifferError: an existing lane topic has another partition count (nothing was changed), or the broker refused a topic.
        KafkaUnavailableError: no broker.
    """
    async with open_admin(client_options(settings.kafka, "headrace-topics")) as admin:
        reports = await _compare(admin, settings)
        _refuse_other_counts(reports)
        if missing := [report for report in reports if report.state == "missing"]:
            await _create(admin, settings, missing)
        # Someone else may have created them at the same moment, in another way.
        again = await _seen(admin, settings, "missing")
        _refuse_other_counts(again)
        if differing := [report for report in again if report.differences]:
            await _set(admin, differing)
            await _seen(admin, settings, "missing", "differs")
        return reports


async def lane_count(options: ClientOptions, topics: Topics, groups_topic: str | None = None) -> int:
    """The one partition count of all lane topics (exactly-once rule 6).

    Args:
        options: From `client_options`.
        topics: Topic names.
        groups_topic: Of a shadow, the topic under another prefix that it trains on: its count must be the same.

    Raises:
        TopicsDifferError: a lane topic is missing, or counts differ.
        KafkaUnavailableError: no broker.
    """
    counts = await partition_counts(options)
    names = [topics.full(spec.name) for spec in TOPICS if spec.lane]
    lanes = {name: counts.get(name) for name in (*names, groups_topic or names[0])}
    if missing := [name for name, count in lanes.items() if count is None]:
        raise TopicsDifferError(
            f"Kafka at {options['bootstrap_servers']} lacks the topics {', '.join(missing)}: "
            "run `headrace topics apply`, or correct topics.prefix (worker.shadow_prefix for those of the group that is shadowed)"
        )
    found = {count for count in lanes.values() if count is not None}
    if len(found) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in lanes.items())
        raise TopicsDifferError(
            f"topics keyed by model id must have one partition count, found {listed}. Partitions can't be taken away: "
            "use another topics.prefix, or delete and re-create the topics that were changed"
        )
    return found.pop()


async def retention_ms(options: ClientOptions, topic: str) -> int | None:
    """For how long a topic keeps a record, at least; None: for ever.

    Raises:
        TopicsDifferError: there is no such topic.
        KafkaUnavailableError: no broker.
    """
    async with open_admin(options) as admin:
        value, _ = (await _configs(admin, [topic]))[topic].get("retention.ms", (None, False))
    return None if value is None or int(value) < 0 else int(value)


def _refuse_other_counts(reports: list[TopicReport]) -> None:
    wrong = [r for r in reports if r.spec.lane and r.partitions not in {None, r.wanted_partitions}]
    if wrong:
        listed = ", ".join(f"{r.topic} has {r.partitions}" for r in wrong)
        raise TopicsDifferError(
            f"topics.partitions is {wrong[0].wanted_partitions}, but {listed}. Partition counts are fixed at creation, since the order "
            "of a model's records depends on them: set topics.partitions to what is there, or use another topics.prefix"
        )


async def _compare(admin: AIOKafkaAdminClient, settings: Settings) -> list[TopicReport]:
    counts = await counts_of(admin)
    names = {settings.topic_names.full(spec.name): spec for spec in TOPICS}
    configs = await _configs(admin, [name for name in names if name in counts])
    return [
        TopicReport(
            topic=name,
            spec=spec,
            partitions=counts.get(name),
            wanted_partitions=settings.topics.partitions,
            differences=tuple(
                ConfigDifference(name=key, found=configs[name][key][0] if key in configs[name] else None, wanted=wanted)
                for key, wanted in spec.config.items()
                if name in configs and (key not in configs[name] or configs[name][key][0] != wanted)
            ),
        )
        for name, spec in names.items()
    ]


async def _configs(admin: AIOKafkaAdminClient, topics: list[str]) -> dict[str, dict[str, tuple[str | None, bool]]]:
    """By topic and setting: (effective value, set on the topic itself)."""
    found: dict[str, dict[str, tuple[str | None, bool]]] = {}
    if not topics:
        return found
    for answer in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]):
        for code, message, _kind, name, entries in answer.resources:
            _check(code, message, f"reading the settings of {name}")
            found[name] = {key: (value, source == _DYNAMIC_TOPIC_CONFIG) for key, value, _read_only, source, *_ in entries}
    return found


async def _create(admin: AIOKafkaAdminClient, settings: Settings, missing: list[TopicReport]) -> None:
    replication = settings.topics.replication_factor
    if replication == -1:
        replication = await _default_replication(admin)
    answer = await admin.create_topics(
        [NewTopic(r.topic, r.wanted_partitions, replication, topic_configs=dict(r.spec.config)) for r in missing]
    )
    for topic, code, message, *_ in answer.topic_errors:
        if for_code(code) is not TopicAlreadyExistsError:
            _check(code, message, f"creating {topic}")


async def _seen(admin: AIOKafkaAdminClient, settings: Settings, *gone: str) -> list[TopicReport]:
    """The reports once no topic is in one of these states: the controller has acted, brokers hear of it a little later."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        reports = await _compare(admin, settings)
        waiting = [report.topic for report in reports if report.state in gone]
        if not waiting:
            return reports
        if time.monotonic() > deadline:
            raise TopicsDifferError(f"{', '.join(waiting)}: changed, but the broker does not show it within {_VISIBLE_SECONDS} s")
        await asyncio.sleep(0.02)  # there is nothing to wait on but asking


async def _default_replication(admin: AIOKafkaAdminClient) -> int:
    """Aiokafka's CreateTopics is too old to say "the broker's default" itself."""
    broker = (await admin.describe_cluster())["brokers"][0]["node_id"]
    resource = ConfigResource(ConfigResourceType.BROKER, str(broker), {"default.replication.factor": ""})
    (answer,) = await admin.describe_configs([resource])
    code, message, _kind, _name, entries = answer.resources[0]
    _check(code, message, "reading default.replication.factor (set topics.replication_factor to do without)")
    return int(entries[0][1])


async def _set(admin: AIOKafkaAdminClient, differing: list[TopicReport]) -> None:
    # AlterConfigs replaces all that is set on a topic: what others set there goes along.
    present = await _configs(admin, [report.topic for report in differing])
    resources = []
    for report in differing:
        kept = {key: value for key, (value, own) in present[report.topic].items() if own and value is not None}
        resources.append(ConfigResource(ConfigResourceType.TOPIC, report.topic, kept | dict(report.spec.config)))
    for answer in await admin.alter_configs(resources):
        for code, message, _kind, name in answer.resources:
            _check(code, message, f"setting the configuration of {name}")


def _check(code: int, message: Any, doing: str) -> None:  # noqa: ANN401 - the client's answers carry no types
    if code:
        raise TopicsDifferError(f"{doing}: {message or for_code(code).__name__}")
