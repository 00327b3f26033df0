"""What is logged while Kafka is away."""

import asyncio
import logging

import pytest

from headrace.core import kafka_outage
from headrace.core.kafka import KafkaUnavailableError
from headrace.core.kafka_outage import folding, is_away, kafka_back, log_trouble

AIOKAFKA = logging.getLogger("aiokafka.conn")
OURS = logging.getLogger("headrace.test")


class Kafka:
    """Answers as the test says; each question waits until the test lets it be answered."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[str | None] = asyncio.Queue()

    async def ask(self, _options: object) -> str | None:
        AIOKAFKA.error("what the question's own client says")
        return await self.answers.get()

    async def until_asked_again(self) -> None:
        while not self.answers.empty():  # noqa: ASYNC110 - as below
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
def kafka_double(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    double = Kafka()
    monkeypatch.setattr(kafka_outage, "kafka_problem", double.ask)
    monkeypatch.setattr(kafka_outage, "_PAUSE_SECONDS", 0)
    return double


def options() -> dict[str, str]:
    return {"bootstrap_servers": "somewhere:9092"}


async def test_an_outage_is_one_warning_when_it_begins_and_one_when_it_ends(kafka_double: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    with folding(options):
        for _ in range(100):
            AIOKAFKA.error("Unable connect to node with id %s", 1)
        kafka_double.answers.put_nowait("it is away")
        while not is_away():  # noqa: ASYNC110 - the loop runs the task that finds out
            await asyncio.sleep(0)
        for lane in range(12):
            AIOKAFKA.error("Unable connect to node with id %s", 1)
            log_trouble(OURS, logging.ERROR, KafkaUnavailableError("away"), "lane %d ended", lane)
            kafka_double.answers.put_nowait("it is away")
        await kafka_double.until_asked_again()
        kafka_double.answers.put_nowait(None)
        await kafka_back()
    began, ended = [record.getMessage() for record in caplog.records]
    assert began.startswith("Waiting for Kafka since 20")
    assert began.endswith("UTC: it is away")
    assert ended == "Kafka at somewhere:9092 answers again after 0 s; 12 messages about failures in between are not logged"


async def test_while_it_lasts_there_is_a_line_a_minute(
    kafka_double: Kafka, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_outage, "_EVERY_SECONDS", 0)  # each question is a minute after the one before
    with folding(options):
        AIOKAFKA.error("Unable connect")
        for answer in ["away", "away", "still away", None]:
            kafka_double.answers.put_nowait(answer)
        while not is_away():  # noqa: ASYNC110 - the loop runs the task that finds out
            await asyncio.sleep(0)
        await kafka_back()
    messages = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert messages[:3] == ["away", "away", "still away"]
    assert len(messages) == 4


async def test_what_fails_while_kafka_answers_is_logged_each_kind_of_the_clients_once(
    kafka_double: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    with folding(options):
        for node in range(3):
            AIOKAFKA.error("Unable connect to node with id %s", node)
            log_trouble(OURS, logging.WARNING, KafkaUnavailableError("no topic"), "lane %d has no topic", node)
        kafka_double.answers.put_nowait(None)
        await kafka_double.until_asked_again()
        log_trouble(OURS, logging.WARNING, ValueError("a defect"), "at once")
    expected = {"Unable connect to node with id 0", *(f"lane {lane} has no topic" for lane in range(3)), "at once"}
    assert {record.getMessage() for record in caplog.records} == expected
    assert len(caplog.records) == len(expected)


async def test_other_clients_of_the_process_log_as_they_did(kafka_double: Kafka, caplog: pytest.LogCaptureFixture) -> None:
    with folding(options):
        pass
    AIOKAFKA.error("another client's")
    with folding(options):
        AIOKAFKA.info("no trouble")
    assert [record.getMessage() for record in caplog.records] == ["another client's"]
