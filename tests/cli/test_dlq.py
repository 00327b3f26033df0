"""`headrace dlq` against the real broker."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.consumers.worker.outgoing import dead_letter
from headrace.core.kafka import client_options
from headrace.core.models import model_id_of
from headrace.core.settings import KafkaSettings
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.topics import Topics

Headrace = Callable[..., Any]
MODEL = model_id_of("default", "maze", "solver")


@pytest.fixture
def cli(headrace: Headrace, kafka: str, topic_prefix: str) -> Headrace:
    """With topics, and three letters: 0:0 is no JSON, 0:1 has an unknown model and no value, 1:0 can't be sent again."""
    environment = {"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka, "HEADRACE_TOPICS__PREFIX": topic_prefix, "HEADRACE_TOPICS__PARTITIONS": "2"}
    assert headrace("topics", "apply", **environment).code == 0

    async def write() -> None:
        producer = AIOKafkaProducer(**client_options(KafkaSettings(bootstrap_servers=kafka), "test"))
        await producer.start()
        for partition, key, value, notes in [
            (0, MODEL.encode(), b'{"a\x1b[31m": \xff', {"reason": "not_json", "path": "groups[0].\x1b[2J", "detail": "no JSON"}),
            (0, b"nobody", None, {"reason": "unknown_model", "detail": "no model", "value": "null"}),
            (1, None, b"", {"reason": "unreadable_headers", "detail": "no UTF-8", "value": "null"}),
        ]:
            notes |= {"topic": topic_prefix + "trajectory-groups", "partition": str(partition), "offset": "7", "time": "1700000000000"}
            headers = [("x", b"1"), *((f"headrace-error-{name}", text.encode()) for name, text in notes.items())]
            await producer.send_and_wait(topic_prefix + "dead-letters", value, key=key, partition=partition, headers=headers)
        await producer.stop()

    asyncio.run(write())
    return headrace


def listed(cli: Headrace, *options: str) -> list[str]:
    return [letter["letter"] for letter in cli("dlq", "list", "--json", *options).json]


def test_letters_are_listed_filtered_sent_again_once_and_dropped(cli: Headrace, topic_prefix: str) -> None:
    table = cli("dlq", "list").out
    assert all(word in table for word in ("0:0", "not_json", "trajectory-groups 0:7", MODEL, "no JSON", "unknown_model", "null"))
    assert "\x1b" not in table
    assert listed(cli) == ["0:0", "0:1", "1:0"]
    assert listed(cli, "--reason", "unknown_model") == listed(cli, "--model", "nobody") == ["0:1"]
    assert listed(cli, "--model", "solver", "-p", "maze") == listed(cli, "--model", MODEL) == ["0:0"]
    assert listed(cli, "--since", "1h") == ["0:0", "0:1", "1:0"]
    assert listed(cli, "--since", "2099-01-01") == []

    sent = cli("dlq", "retry", "0:1", "1:0", "--by", "ada")
    assert (sent.code, sent.out) == (1, f"0:1 retried to {topic_prefix}trajectory-groups partition 0 offset 0\n")
    assert sent.err.startswith("1:0: its bytes are not in the letter")
    again = cli("dlq", "retry", "0:1")
    assert (again.code, again.out) == (1, "")
    assert again.err.startswith("0:1: it was retried by ada at ")
    dropped = cli("dlq", "drop", "--all", "--reason", "not_json", "--json")
    assert dropped.code == 0
    assert [(outcome["letter"], outcome["resolved"]["action"]) for outcome in dropped.json] == [("0:0", "dropped")]
    assert listed(cli) == ["1:0"]
    assert listed(cli, "--all") == ["0:0", "0:1", "1:0"]
    fates = cli("dlq", "list", "--all").out
    assert all(text in fates for text in ("waits", f"retried to {topic_prefix}trajectory-groups 0:0 by ada", "dropped by "))
    nothing = cli("dlq", "retry", "--all", "--reason", "not_json")
    assert (nothing.code, nothing.out) == (0, "no dead letter waits that fits\n")


def test_a_letter_is_shown_with_its_value_and_without_what_a_terminal_would_obey(cli: Headrace) -> None:
    shown = cli("dlq", "show", "0:0")
    assert shown.code == 0
    assert "\x1b" not in shown.out
    lines = ("reason: not_json", f"key: {MODEL}", "header x: 1", "became of it: waits", r"path: groups[0].\x1b[2J", r'{"a\x1b[31m": \xff')
    assert {*lines} <= {*shown.out.splitlines()}
    document = cli("dlq", "show", "0:0", "--json").json
    assert (document["key"], document["value_base64"], document["headers"]) == (
        MODEL,
        "eyJhG1szMW0iOiD/",
        [{"name": "x", "value": "1"}],
    )
    assert cli("dlq", "show", "0:1", "--json").json["value"] is None
    assert cli("dlq", "show", "0:1", "--raw").err == "the original has no value\n"


def test_raw_gives_the_bytes(cli: Headrace) -> None:
    assert CliRunner().invoke(app, ["dlq", "show", "0:0", "--raw"]).stdout_bytes == b'{"a\x1b[31m": \xff'


def test_what_can_not_be_is_said_and_changes_nothing(cli: Headrace) -> None:
    for arguments, code, message in [
        (("show", "0:99"), 1, "error: no dead letter stands at 0:99"),
        (("show", "7:0"), 1, "error: there is no partition 7"),
        (("show", "x"), 1, "error: 'x' names no dead letter: write PARTITION:OFFSET"),
        (("show", "0:0", "--raw", "--json"), 2, "leave one of them out"),
        (("retry",), 2, "name letters, or say --all"),
        (("drop", "0:0", "--all"), 2, "name letters, or say --all"),
        (("drop", "0:0", "--reason", "not_json"), 2, "choose among --all"),
        (("list", "--reason", "bad"), 2, "not_json"),
        (("list", "--since", "soon"), 1, "error: 'soon' is no time"),
        (("retry", "0:99"), 1, "0:99: no dead letter stands at 0:99"),
    ]:
        ran = cli("dlq", *arguments)
        assert (ran.code, ran.out) == (code, ""), arguments
        assert message in ran.err
    assert listed(cli) == ["0:0", "0:1", "1:0"]


def test_without_topics_the_error_says_what_to_do(headrace: Headrace, kafka: str) -> None:
    ran = headrace("dlq", "list", HEADRACE_KAFKA__BOOTSTRAP_SERVERS=kafka, HEADRACE_TOPICS__PREFIX="nowhere.")
    assert ran.code == 1
    assert "has no topic nowhere.dead-letters: run `headrace topics apply`" in ran.err


def test_a_letter_that_is_cut_says_so_and_raw_reads_the_record_where_it_is(cli: Headrace, kafka: str, topic_prefix: str) -> None:
    value, topic = b"first " + bytes(2_000_000), topic_prefix + "trajectory-groups"

    async def write() -> None:
        options = client_options(KafkaSettings(bootstrap_servers=kafka), "test")
        async with AIOKafkaProducer(**options, compression_type="zstd", max_request_size=4_000_000) as producer:
            sent = await producer.send_and_wait(topic, value, key=b"k", partition=1)
            where = {"topic": topic, "partition": 1, "offset": sent.offset, "timestamp": 1}
            record = SimpleNamespace(**where, key=b"k", value=value, headers=())
            letter = dead_letter(Topics(prefix=topic_prefix), record, CodecError(DeadLetterReason.NOT_JSON, "", "no JSON"), 1)
            await producer.send_and_wait(letter.topic, letter.value, key=letter.key, partition=1, headers=list(letter.headers))

    asyncio.run(write())
    shown = cli("dlq", "show", "1:1").out
    assert "value: 2000006 bytes" in shown
    assert (
        "cut: the record is too large for a letter, which has 1 bytes of 1 of the key, 0 of 0 headers and 65536 bytes of the value" in shown
    )
    document = cli("dlq", "show", "1:1", "--json").json
    assert (document["bytes"], document["cut"]["key_bytes"]) == (2_000_006, 1)
    assert CliRunner().invoke(app, ["dlq", "show", "1:1", "--raw"]).stdout_bytes == value
    assert cli("dlq", "retry", "1:1").out == f"1:1 retried to {topic} partition 1 offset 1\n"
