"""The local broker: what survives, how it ends, and what it says when something is wrong. Each test has a broker of its own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import UnknownTopicOrPartitionError

from headrace.core.local import LocalBroker, LocalServiceError, ensure_broker
from headrace.core.local.broker import QUICK_RESTART, new_cluster_id
from headrace.core.local.probe import ask

TP = TopicPartition("kept", 0)

OWNER = """
import sys
from headrace.core.local import LocalBroker
broker = LocalBroker(sys.argv[1]).start()
print(broker.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path) as running:
        yield running


def create_topic(bootstrap_servers: str) -> None:
    async def create() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
        await admin.start()
        await admin.create_topics([NewTopic(TP.topic, 1, 1)])
        await admin.close()

    asyncio.run(create())


def send(bootstrap_servers: str, *values: bytes) -> None:
    async def run() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers, enable_idempotence=True) as producer:
            for value in values:
                await producer.send_and_wait(TP.topic, value, partition=0)

    asyncio.run(run())


def read_and_commit(bootstrap_servers: str, count: int) -> list[bytes]:
    """`count` values from where the group stands."""

    async def run() -> list[bytes]:
        consumer = AIOKafkaConsumer(
            TP.topic,
            bootstrap_servers=bootstrap_servers,
            group_id="readers",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        async with consumer:
            values = [(await asyncio.wait_for(consumer.getone(), 20)).value for _ in range(count)]
            await consumer.commit()
        return values

    return asyncio.run(run())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_records_offsets_and_the_port_survive_a_restart(tmp_path: Path) -> None:
    with LocalBroker(tmp_path) as broker:
        where, pid = broker.bootstrap_servers, broker.pid
        create_topic(where)
        send(where, b"one", b"two")
        assert read_and_commit(where, 1) == [b"one"]
    assert not is_running(pid)
    with LocalBroker(tmp_path) as broker:
        assert broker.bootstrap_servers == where
        send(where, b"three")
        assert read_and_commit(where, 2) == [b"two", b"three"]


def test_after_sigkill_it_starts_again_and_acknowledged_records_are_there(tmp_path: Path) -> None:
    broker = LocalBroker(tmp_path, overrides=QUICK_RESTART).start()
    create_topic(broker.bootstrap_servers)
    send(broker.bootstrap_servers, b"one", b"two")
    os.kill(broker.pid, signal.SIGKILL)
    assert broker.wait(10) == 128 + signal.SIGKILL
    broker.stop()
    broker.start()
    assert read_and_commit(broker.bootstrap_servers, 2) == [b"one", b"two"]
    broker.stop()


def test_a_machine_that_stands_still_for_seconds_does_not_fence_the_broker(broker: LocalBroker) -> None:
    create_topic(broker.bootstrap_servers)
    os.kill(broker.pid, signal.SIGSTOP)
    time.sleep(5)  # the fault itself: longer than the session that a start after SIGKILL would like
    os.kill(broker.pid, signal.SIGCONT)
    send(broker.bootstrap_servers, b"one")
    assert "fenc" not in broker.log_file.read_text().rpartition("Kafka Server started")[2].lower()


def test_two_brokers_at_once_do_not_meet(kafka: str, tmp_path: Path) -> None:
    with LocalBroker(tmp_path) as broker:
        assert broker.bootstrap_servers != kafka


def test_no_java_is_left_after_the_parent_is_killed_and_the_folder_can_be_used_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        java = int(owner.stdout.readline())
        owner.kill()
    with LocalBroker(tmp_path) as broker:  # waits for the old one's end
        assert not is_running(java)
        assert ask("127.0.0.1", int(broker.bootstrap_servers.partition(":")[2]), 1.0) is not None


def test_a_parent_that_ends_without_stopping_it_leaves_no_java(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
    )
    with LocalBroker(tmp_path):
        assert not is_running(int(done.stdout))


def test_a_second_start_on_the_folder_says_where_the_first_is(broker: LocalBroker, tmp_path: Path) -> None:
    with pytest.raises(LocalServiceError, match=f"already runs on the folder {tmp_path}/kafka: at {broker.bootstrap_servers}") as caught:
        LocalBroker(tmp_path).start()
    assert f"Java process {broker.pid}" in str(caught.value)
    assert f"started by process {os.getpid()}" in str(caught.value)
    with pytest.raises(LocalServiceError, match="started already"):
        broker.start()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LocalServiceError, match=f"port {port} is taken by another program"):
            LocalBroker(tmp_path, port).start()


def test_if_its_last_ports_are_taken_it_starts_elsewhere_with_the_same_data(tmp_path: Path) -> None:
    with LocalBroker(tmp_path) as broker:
        create_topic(broker.bootstrap_servers)
        send(broker.bootstrap_servers, b"one")
        before = int(broker.bootstrap_servers.partition(":")[2])
    text = (tmp_path / "kafka" / "server.properties").read_text()
    controller = int(text.partition("controller.quorum.voters=1@127.0.0.1:")[2].split()[0])
    with socket.socket() as first, socket.socket() as second:
        for other, port in ((first, before), (second, controller)):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
        with LocalBroker(tmp_path) as broker:
            assert broker.bootstrap_servers != f"127.0.0.1:{before}"
            assert read_and_commit(broker.bootstrap_servers, 1) == [b"one"]


def test_a_wanted_port_and_server_properties_are_used(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with LocalBroker(tmp_path, port, overrides={"auto.create.topics.enable": "true"}) as broker:
        assert broker.bootstrap_servers == f"127.0.0.1:{port}"
        send(broker.bootstrap_servers, b"made by sending")


async def test_a_topic_that_nobody_made_is_not_made_by_reading_it(kafka: str, topic_prefix: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    (topic,) = await admin.describe_topics([f"{topic_prefix}mistyped"])
    await admin.close()
    assert topic["error_code"] == UnknownTopicOrPartitionError.errno


def test_a_broker_that_dies_while_starting_gives_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(LocalServiceError, match=r"(?s)Kafka 4.4.0 could not prepare .*num.network.threads"):
        LocalBroker(tmp_path, overrides={"num.network.threads": "many"}).start()
    with LocalBroker(tmp_path):  # the folder is not spoilt by it
        pass
    with pytest.raises(LocalServiceError, match=r"(?s)ended with status 1 while it started.*server.log:.*num.network.threads"):
        LocalBroker(tmp_path, overrides={"num.network.threads": "many"}).start()


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalServiceError, match=f"data folder {tmp_path}/file/kafka cannot be written: Not a directory"):
        LocalBroker(tmp_path / "file").start()


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "service.json").write_text("{")
    with pytest.raises(LocalServiceError, match=r"service.json is damaged .* delete that file"):
        LocalBroker(tmp_path).start()


def test_before_its_start_it_has_no_address(tmp_path: Path) -> None:
    with pytest.raises(LocalServiceError, match="not running"):
        _ = LocalBroker(tmp_path).bootstrap_servers


def test_it_keeps_its_log_in_its_folder(broker: LocalBroker, tmp_path: Path) -> None:
    assert broker.log_file == tmp_path / "kafka" / "server.log"
    assert "Kafka Server started" in broker.log_file.read_text()


def test_a_configured_kafka_is_used_instead_of_a_local_one(kafka: str, tmp_path: Path) -> None:
    with ensure_broker(kafka, tmp_path) as servers:
        assert servers == kafka
    assert not list(tmp_path.iterdir())
    with ensure_broker(None, tmp_path) as servers:
        assert ask("127.0.0.1", int(servers.partition(":")[2]), 1.0) is not None


def test_what_is_no_kafka_gets_no_answer_from_the_probe() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        assert ask("127.0.0.1", port, 0.1) is None
    assert ask("127.0.0.1", port, 0.1) is None  # nobody listens any more


def test_a_cluster_id_never_starts_with_a_dash_which_the_storage_tool_takes_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([uuid.UUID(bytes=b"\xf8" + bytes(15)), uuid.UUID(bytes=bytes(16))])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(drawn))
    assert new_cluster_id() == "A" * 22
