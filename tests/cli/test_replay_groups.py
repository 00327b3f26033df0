"""`headrace replay groups`: which groups are copied, where to, and what is refused. The log is written once for all tests."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord
from tests.core.ledgers import record as step_record
from tests.core.ledgers import write
from tests.producers.conftest import make_group, make_topic, read_topic

from headrace.core.kafka import client_options
from headrace.core.models import create_model
from headrace.core.reading import read_to_end
from headrace.core.settings import BaseModelEntry, KafkaSettings, ProducerSettings, Settings, StoreSettings, TopicSettings
from headrace.core.topic_admin import apply
from headrace.producers import TrajectoryProducer
from headrace.schemas.training import ModelSettings

Headrace = Callable[..., Any]
CLAIMED = "large"
GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What stands in the log: groups `good`, `bad` (a reward of -1), one without an id, `large` and `gone` (claims)."""

    settings: Settings
    model_id: str
    other_id: str
    records: list[ConsumerRecord]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": str(self.settings.kafka.bootstrap_servers),
            "HEADRACE_TOPICS__PREFIX": self.settings.topics.prefix,
            "HEADRACE_STORE__URL": self.settings.store.url,
            "HEADRACE_BASE_MODELS": '{"tiny": {"path": "/m"}}',
        }


@pytest.fixture(scope="module")
def log(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Log:
    folder = tmp_path_factory.mktemp("replay-groups")
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka),
        topics=TopicSettings(prefix=f"t{uuid.uuid4().hex[:10]}.", partitions=1),  # one lane: all models stand in it
        store=StoreSettings(url=f"file://{folder}/store"),
        producer=ProducerSettings(inline_limit_bytes=8192),
        base_models={"tiny": BaseModelEntry(path="/m")},
    )
    return asyncio.run(_written(settings, folder / "store"))


async def _written(settings: Settings, store: Path) -> Log:
    await apply(settings)
    model, other = [
        (await create_model(settings, project="default", name=name, model=ModelSettings(base_model="tiny"))).model_id
        for name in ("agent", "other")
    ]
    async with TrajectoryProducer(settings, model_id=model) as producer:
        await producer.send(make_group(1.0, group_id="good", metadata={"task": "sums"}))
        await producer.send(make_group(-1.0, group_id="bad"))
        await producer.send(make_group(5.0, group_id="of another model"), model_id=other)
        plain = AIOKafkaProducer(**client_options(settings.kafka, "test"))
        await plain.start()
        try:
            topic, key = settings.topic_names.trajectory_groups, model.encode()
            await plain.send_and_wait(topic, make_group(2.0).model_dump_json().encode(), key=key, headers=[("made-by", b"kcat")])
            await plain.send_and_wait(topic, b"{", key=key)
        finally:
            await plain.stop()
        await asyncio.sleep(0.01)  # the broker's clock counts milliseconds: what follows is later
        await producer.send(make_group(3.0, tokens=4000, group_id=CLAIMED))
        await producer.send(make_group(4.0, tokens=4001, group_id=GONE))
    records = await read_to_end(client_options(settings.kafka, "test"), settings.topic_names.trajectory_groups)
    payload = orjson.loads(records[-1].value)["sha256"]
    (store / "payloads" / payload[:2] / f"{payload}.zst").unlink()
    ledger = [step_record(1, model_id=model, offsets=[0, 3]), step_record(2, model_id=model, offsets=[1, 77])]
    await write(settings, ledger, key=model)
    return Log(settings=settings, model_id=model, other_id=other, records=records)


def names(path: Path) -> list[str]:
    return [orjson.loads(line)["group_id"] for line in path.read_bytes().splitlines()]


ALL = ["good", "bad", "0-3", CLAIMED]


def test_groups_of_one_model_become_lines_with_the_payloads_of_claims_and_what_cant_be_read_is_named(
    headrace: Headrace, log: Log, tmp_path: Path
) -> None:
    ran = headrace("replay", "groups", "--model", "agent", "--to", "all.jsonl", **log.environment)
    assert (ran.code, ran.out) == (1, "copied 4 of 6 groups\n")
    said = ran.err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["offset 4", "offset 6"]
    assert "not JSON" in said[0]
    assert "does not exist: the payload was deleted" in said[1]
    assert names(tmp_path / "all.jsonl") == ALL
    assert (
        len(orjson.loads((tmp_path / "all.jsonl").read_bytes().splitlines()[3])["trajectories"][0]["messages_and_choices"][1]["token_ids"])
        == 4000
    )
    again = headrace("produce", "all.jsonl", "--model", "other")
    assert again.out == "sent 4, bad 0, failed 0\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--where", "reward < 0"], ["bad"]),
        (["--where", "max_reward > 1 and tokens < 10"], ["0-3"]),
        (["--where", "metadata.task == 'sums'"], ["good"]),
        (["--group", "good", "--group", "0-3"], ["good", "0-3"]),
        (["--group", "good", "--where", "reward < 0"], []),
        (["--until", "{before 5}"], ["good", "bad", "0-3"]),
        (["--since", "{before 5}"], [CLAIMED]),
        (["--since", "1d"], ALL),
        (["--until", "1d"], []),
        (["--steps", "1"], ["good", "0-3"]),
        (["--steps", "1..2"], ["good", "bad", "0-3"]),
    ],
)
def test_what_is_chosen_is_copied_and_nothing_else(
    options: list[str], expected: list[str], headrace: Headrace, log: Log, tmp_path: Path
) -> None:
    time = datetime.fromtimestamp(log.records[5].timestamp / 1000, tz=UTC).isoformat()
    said = [option.replace("{before 5}", time) for option in options]
    ran = headrace("replay", "groups", "--model", log.model_id, "--to", "some.jsonl", *said, **log.environment)
    assert names(tmp_path / "some.jsonl") == expected
    assert ran.out.startswith(f"copied {len(expected)} of ")


def test_a_group_that_a_step_trained_on_and_the_log_lost_is_named(headrace: Headrace, log: Log) -> None:
    ran = headrace("replay", "groups", "--model", "agent", "--steps", "2", "--to", "-", **log.environment)
    assert ran.code == 1
    assert "offset 77: a step trained on it, and the log does not have it any more" in ran.err
    assert [orjson.loads(line)["group_id"] for line in ran.out.splitlines()] == ["bad"]


def test_a_topic_gets_the_original_bytes_keys_and_headers(headrace: Headrace, log: Log, kafka: str) -> None:
    topic = f"{log.settings.topics.prefix}copy"
    asyncio.run(make_topic(kafka, topic))
    ran = headrace("replay", "groups", "--model", "agent", "--to", f"topic:{topic}", **log.environment)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "copied 6 of 6 groups; 2 of them are claims, whose payloads stay in this object store\n"
    copies = asyncio.run(read_topic(kafka, topic))
    originals = [record for record in log.records if record.key == log.model_id.encode()]
    assert [(c.key, c.value, c.headers) for c in copies] == [(o.key, o.value, o.headers) for o in originals]
    assert len({c.partition for c in copies}) == 1


def test_a_topic_that_headrace_works_on_in_this_cluster_is_refused_however_it_is_called(headrace: Headrace, log: Log, kafka: str) -> None:
    own = f"topic:{log.settings.topic_names.trajectory_groups}"
    port = kafka.rpartition(":")[2]
    for address in ([], ["--to-bootstrap", f"localhost:{port}"], ["--to-bootstrap", f"127.0.0.1:{port}"]):
        ran = headrace("replay", "groups", "--model", "agent", "--to", own, *address, **log.environment)
        assert ran.code == 1
        assert "is a topic that Headrace works on in this cluster" in ran.err
    records = asyncio.run(read_to_end(client_options(log.settings.kafka, "test"), log.settings.topic_names.trajectory_groups))
    assert [record.key for record in records].count(log.model_id.encode()) == 6


def test_what_cant_be_used_is_refused_before_anything_is_written(headrace: Headrace, log: Log, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    refused = {
        ("--to", "there.jsonl"): (1, "there.jsonl exists: remove it, or name another file"),
        ("--to", "no/such/folder.jsonl"): (1, "no/such/folder.jsonl can't be written: No such file or directory"),
        ("--to", "topic:nowhere"): (1, "has no topic nowhere: create it first"),
        ("--to", "a.jsonl", "--where", "rewards < 0"): (1, "there is no 'rewards'"),
        ("--to", "a.jsonl", "--since", "yesterday"): (1, "'yesterday' is no time: write how long ago (90s, 10m, 2h, 1d)"),
        ("--to", "a.jsonl", "--since", "1h", "--until", "2h"): (2, "2h is not after --since 1h"),
        ("--to", "a.jsonl", "--to-bootstrap", "x:1"): (2, "give --to topic:NAME with it"),
        ("--to", "a.jsonl", "--steps", "3"): (1, "the ledger has no step 3"),
        ("--to", "a.jsonl", "--model", "nobody"): (1, "there is no model"),
    }
    for options, (code, said) in refused.items():
        ran = headrace("replay", "groups", "--model", "agent", *options, **log.environment)
        assert (ran.code, said in " ".join(ran.err.replace("│", "").split())) == (code, True), ran.err
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.jsonl"]
