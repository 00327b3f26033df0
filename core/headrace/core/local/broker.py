"""A real Apache Kafka on this machine, without Docker and without an installed Java.

    with LocalBroker(".headrace") as broker:
        print(broker.bootstrap_servers)

Guarantees: ready when `start` returns (it answered a metadata request as itself); topics, offsets and, if free, ports
survive a restart on the same folder, also after SIGKILL; the broker ends with this process, however that ends.
Limitations: other machines (it listens on the loopback address), security, more than one node.
Blocks: everything here is synchronous, for the command line, fixtures and the demo's parent; not for an event loop.

The configuration of the local broker: one node that is broker and controller, tuned for starting and for tests.

Limitations: durability against power loss (Kafka's default: replication instead of fsync, and there is one replica) and
speed of the last few percent (serial collector, first JIT tier, 512 MB heap).
"""

import base64
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.core.local import probe
from headrace.core.local.class_archive import sharing_options
from headrace.core.local.distribution import KAFKA
from headrace.core.local.errors import LocalServiceError
from headrace.core.local.folder import ServiceFolder
from headrace.core.local.launch import Program, Running, corrupt_jars, launch
from headrace.core.local.probe import HOST
from headrace.core.local.process import run_java

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


FORMAT_TIMEOUT_S = 60.0


@contextmanager
def ensure_broker(bootstrap_servers: str | None, data_dir: Path | str) -> Iterator[str]:
    """The configured Kafka if there is one, else a local broker for as long as the context lasts; yields bootstrap servers."""
    if bootstrap_servers:
        yield bootstrap_servers
        return
    with LocalBroker(data_dir) as broker:
        yield broker.bootstrap_servers


class LocalBroker:
    """One Kafka node with its data under `data_dir`/kafka.

    Args:
        data_dir: Folder for the data, the configuration and the log (`kafka/server.log`); made if missing.
        port: Port for clients; None or 0 takes the one of the last start if it is free, else any free one.
        overrides: Kafka server properties that replace or add to ours, e.g. `{"message.max.bytes": "20971520"}`.
    """

    label = KAFKA.label
    """Name and version for people."""

    def __init__(self, data_dir: Path | str, port: int | None = None, *, overrides: Mapping[str, str] | None = None) -> None:
        self._path = Path(data_dir).absolute() / "kafka"
        self._port = port or None
        self._overrides = dict(overrides or {})
        self._cluster_id = ""
        self._sharing: list[str] | None = None
        self._service: Running | None = None

    def start(self) -> Self:
        """Fetch what is missing (only the first time), start, and wait until the broker answers.

        Raises:
            LocalServiceError: already running on the folder, port taken, no network for the first download, no
                space, no right to write, no Java or one too old, or the broker ended (with its last words).
        """
        if self._service is not None:
            raise LocalServiceError(f"this broker was started already, at {self._service.address}")
        program = Program(
            distribution=KAFKA,
            port_count=2,
            address=lambda port: f"{HOST}:{port}",
            prepare=self._prepare,
            is_ready=self._is_ready,
        )
        self._service = launch(program, self._path, self._port)
        return self

    def stop(self) -> None:
        """Shut down cleanly (0.4 s) and return when the process is gone; nothing if it does not run."""
        if self._service is not None:
            self._service.process.stop()
            self._service = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the broker ends by itself and give its exit status.

        Raises:
            TimeoutError: it still runs.
            LocalServiceError: it was not started.
        """
        return self._running().process.wait(timeout)

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` for clients. Raises LocalServiceError if the broker was not started."""
        return self._running().address

    @property
    def log_file(self) -> Path:
        """The broker's log; older ones lie next to it."""
        return self._path / "server.log"

    @property
    def pid(self) -> int:
        """Process id of the broker's Java. Raises LocalServiceError if the broker was not started."""
        return self._running().process.pid

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _running(self) -> Running:
        if self._service is None:
            raise LocalServiceError("this broker is not running; call start() or use it as a context manager")
        return self._service

    def _is_ready(self, port: int) -> bool:
        answer = probe.ask(HOST, port, timeout_s=1.0)
        return answer is not None and answer.cluster_id == self._cluster_id and port in answer.ports

    def _prepare(self, java: Path, jars: list[Path], ports: list[int]) -> list[str]:
        folder = ServiceFolder(self._path, KAFKA.label)
        logging = folder.write("log4j2.properties", LOG4J2.format(log=folder.log_file))
        text = server_properties(data=folder.data, port=ports[0], controller_port=ports[1], overrides=self._overrides)
        properties = folder.write("server.properties", text)
        sharing = self._sharing
        if sharing is None:
            sharing = sharing_options(java, jars, JVM_OPTIONS, _start_once)
        run = [*JVM_OPTIONS, *sharing, f"-Dlog4j2.configurationFile={logging}"]
        self._cluster_id = _format(folder, [str(java), *run], jars, properties)
        return [*run, "kafka.Kafka", str(properties)]


def _start_once(jvm_option: str) -> None:
    """Start a broker on a folder of its own with one more JVM option, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        broker = LocalBroker(folder)
        broker._sharing = [jvm_option]
        with broker:
            pass


def _format(folder: ServiceFolder, run: list[str], jars: list[Path], properties: Path) -> str:
    """Give a new data folder its cluster id (1.2 s, once); returns the id.

    The id is written down last: a folder without one was never used, so a half done formatting is started over.
    """
    known = folder.path / "cluster-id"
    if known.exists():
        return known.read_text(encoding="ascii").strip()
    shutil.rmtree(folder.data, ignore_errors=True)
    cluster_id = new_cluster_id()
    command = [*run, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
    status, printed = run_java(command, jars=jars, timeout_s=FORMAT_TIMEOUT_S)
    if status != 0:
        words = "\n".join(f"  {line}" for line in printed.strip().splitlines()[-15:])
        raise LocalServiceError(f"{KAFKA.label} could not prepare {folder.data}:\n{words}{corrupt_jars(KAFKA)}")
    folder.write("cluster-id", cluster_id)
    return cluster_id


def new_cluster_id() -> str:
    """A random id as Kafka makes them: never with a leading dash, which its storage tool takes for an option (one id in 64)."""
    while True:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id
