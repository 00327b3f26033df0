"""The configuration of the local broker: one node that is broker and controller, tuned for starting and for tests.

Limitations: durability against power loss (Kafka's default: replication instead of fsync, and there is one replica) and
speed of the last few percent (serial collector, first JIT tier, 512 MB heap).
"""

from collections.abc import Mapping
from pathlib import Path

from headrace.core.local.ports import HOST

JVM_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")
"""340 MB resident after a start, 450 MB after a few GB of traffic."""

QUICK_RESTART = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "400"}
"""Overrides for a broker that is killed on purpose: it starts again within 4 s, and fences itself on a busy machine."""

# Without `shutdownHook = disable` log4j stops when Kafka starts to stop, and the log of the shutdown is lost.
LOG4J2 = """\
status = error
shutdownHook = disable
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %m (%c)%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


def server_properties(*, data: Path, port: int, controller_port: int, overrides: Mapping[str, str]) -> str:
    """The text of `server.properties`; `overrides` has the last word."""
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"CLIENT://{HOST}:{port}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "controller.listener.names": "CONTROLLER",
        # A static quorum: its address lives in this file alone, so that the port may change between starts.
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "log.dirs": str(data),
        # One node: every internal topic has one replica; few partitions keep the start and the first join short.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "4",
        "default.replication.factor": "1",
        "min.insync.replicas": "1",
        # Topics are made on purpose, with their settings; a mistyped name must not make one.
        "auto.create.topics.enable": "false",
        # A group starts with its first member instead of waiting 3 s for others.
        "group.initial.rebalance.delay.ms": "0",
        # A broker whose heartbeats a busy machine delays for longer than a session is fenced, and serves no client until they are in time
        # again. After SIGKILL a start waits for the old session to end: 11 s in all; see `QUICK_RESTART`.
        "broker.session.timeout.ms": "9000",
        "broker.heartbeat.interval.ms": "1000",
        **overrides,
    }
    return "".join(f"{key}={_escaped(value)}\n" for key, value in settings.items())


def _escaped(value: str) -> str:
    """Java's properties format takes a backslash and a line break for itself."""
    return value.replace("\\", "\\\\").replace("\n", "\\n")
