"""`headrace topics` and `headrace models` against the real broker."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from tests.cli.owners import once_commanded

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import model_id_of
from headrace.core.settings import KafkaSettings
from headrace.schemas.envelope import seal
from headrace.schemas.state import LaneState, ModelState
from headrace.schemas.topics import TOPICS
from headrace.schemas.training import ModelSettings

Headrace = Callable[..., Any]
LANES = 2
LANE = lane_of(model_id_of("default", "default", "m"), LANES)


@pytest.fixture
def cli(headrace: Headrace, kafka: str, topic_prefix: str) -> Headrace:
    """With topics, and a catalogue of two base models."""
    catalogue = {"tiny": {"path": "/m/tiny"}, "big": {"path": "/m/big", "trainable": ["lora"]}}
    applied = headrace(
        "topics",
        "apply",
        HEADRACE_KAFKA__BOOTSTRAP_SERVERS=kafka,
        HEADRACE_TOPICS__PREFIX=topic_prefix,
        HEADRACE_TOPICS__PARTITIONS=str(LANES),
        HEADRACE_BASE_MODELS=orjson.dumps(catalogue).decode(),
    )
    assert applied.code == 0, applied.err
    return headrace


def test_topics_are_shown_as_missing_created_and_then_equal(headrace: Headrace, kafka: str, topic_prefix: str) -> None:
    environment = {"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka, "HEADRACE_TOPICS__PREFIX": topic_prefix}
    before = headrace("topics", "show", **environment)
    assert before.code == 1
    assert before.out.count("missing") == len(TOPICS)
    applied = headrace("topics", "apply", "--json")
    assert {(topic["state"], topic["wanted_partitions"]) for topic in applied.json} == {("created", 12)}
    after = headrace("topics", "show", "--json")
    assert after.code == 0
    assert {(topic["state"], topic["partitions"]) for topic in after.json} == {("equal", 12)}
    assert headrace("topics", "apply").out.count("unchanged") == len(TOPICS)


def test_another_partition_count_ends_with_one_line_that_says_what_to_do(cli: Headrace) -> None:
    ran = cli("topics", "apply", HEADRACE_TOPICS__PARTITIONS="7")
    assert ran.code == 1
    assert ran.err.startswith("error: topics.partitions is 7, but ")
    assert ran.err.count("\n") == 1
    shown = cli("topics", "show")
    assert shown.code == 1
    assert "partitions: 2 → 7 (topics.partitions)" in shown.out


def test_without_a_broker_every_command_says_what_to_set(headrace: Headrace) -> None:
    for command in (("topics", "show"), ("topics", "apply"), ("models", "list"), ("models", "show", "m")):
        ran = headrace(*command)
        assert ran.code == 1
        assert "set HEADRACE_KAFKA__BOOTSTRAP_SERVERS" in ran.err


def test_a_created_model_is_listed_shown_and_deleted(cli: Headrace) -> None:
    created = cli("models", "create", "solver", "--base-model", "tiny", "--project", "maze", "--groups-per-step", "4", "--full")
    model_id = model_id_of("default", "maze", "solver")
    assert (created.code, created.out.strip()) == (0, model_id)
    table = cli("models", "list").out
    assert all(word in table for word in ("maze", "solver", model_id, "tiny", "full", "creating"))
    (listed,) = cli("models", "list", "--json").json
    assert (listed["id"], listed["status"], listed["settings"]["batch"]["groups_per_step"]) == (model_id, "creating", 4)
    by_name, by_id = cli("models", "show", "solver", "-p", "maze", "--json").json, cli("models", "show", model_id, "--json").json
    assert by_name == by_id == listed
    assert "groups_per_step: 4" in cli("models", "show", model_id).out
    assert cli("models", "delete", "solver", "-p", "maze").out == f"{model_id} deleting\n"
    assert cli("models", "list", "--project", "other", "--json").json == []


def test_settings_come_from_a_file_and_options_win(cli: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("base_model: big\nseed: 3\nlora: {r: 4}\nbatch: {groups_per_step: 2}\ntrain: {epsilon: 0.3}\n")
    created = cli(
        "models", "create", "m", "--settings", str(file), "--learning-rate", "0.001", "--seed", "9", "--max-policy-lag", "2", "--json"
    )
    settings = ModelSettings.model_validate(created.json["settings"])
    assert (settings.base_model, settings.seed, settings.lora.r, settings.batch.groups_per_step) == ("big", 9, 4, 2)
    assert (settings.train.epsilon, settings.train.learning_rate, settings.max_policy_lag) == (0.3, 0.001, 2)


def test_a_preset_is_the_options_of_its_method_and_an_unknown_one_is_refused(cli: Headrace) -> None:
    created = cli("models", "create", "m", "--base-model", "tiny", "--preset", "gspo", "--json")
    train = ModelSettings.model_validate(created.json["settings"]).train
    assert (train.importance_sampling_level, train.epsilon, train.epsilon_high) == ("sequence", 0.0003, 0.0004)
    refused = cli("models", "create", "n", "--base-model", "tiny", "--preset", "dpo")
    assert (refused.code, refused.err) == (1, "error: method DPO is not built yet; there are GRPO, DAPO and GSPO_TOKEN\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base_model: tiny\nbatch: {groups_per_step: 0}", "model.yaml: batch.groups_per_step: Input should be greater than or equal to 1"),
        ("base_model: tiny\nbatch: {groups_per_stepp: 2}\nsed: 1", "model.yaml: unknown fields sed, batch.groups_per_stepp"),
        ("seed: 1", "model.yaml: base_model: Field required"),
        ("[1, 2]", "model.yaml: an object is needed"),
        ("{a: ", "model.yaml can't be read as JSON or YAML"),
        ("base_model: huge", "base_model: 'huge' is not in the catalogue; there are big, tiny"),
        ("base_model: big\nadaptation: full", "adaptation: 'big' can be trained as lora, not full"),
    ],
)
def test_wrong_settings_are_named_with_their_field(cli: Headrace, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.yaml").write_text(content)
    ran = cli("models", "create", "m", "--settings", "model.yaml")
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert message in ran.err.replace("\n", " ")
    assert cli("models", "list", "--json").json == []


Own = Callable[..., None]


@pytest.fixture
def own(kafka: str, topic_prefix: str) -> Own:
    """`own(through, **state)`: what a worker writes of model `m` when it has read the commands below."""

    async def write(through: int, **changed: Any) -> None:
        model_id = model_id_of("default", "default", "m")
        lane, name = lane_of(model_id, LANES), {"account": "default", "project": "default", "name": "m", "worker_group": "default"}
        state = ModelState(
            model_id=model_id, incarnation=str(uuid.uuid4()), settings=ModelSettings(base_model="tiny"), scanned=0, **name, **changed
        )
        producer = AIOKafkaProducer(**client_options(KafkaSettings(bootstrap_servers=kafka), "test"))
        await producer.start()
        for key, record in ((model_id, state), (f"lane:{lane}", LaneState(lane=lane, commands_through=through, partitions=LANES))):
            value, headers = seal(record, source="test")
            await producer.send_and_wait(topic_prefix + "models", value, key=key.encode(), partition=lane, headers=headers)
        await producer.stop()

    return lambda through, **changed: asyncio.run(write(through, **changed))


def test_wait_ends_when_the_owner_has_written_the_models_state(cli: Headrace, own: Own, kafka: str, topic_prefix: str) -> None:
    owner = once_commanded(kafka, topic_prefix, LANE, 0, lambda: own(10))
    created = cli("models", "create", "m", "--base-model", "tiny", "--wait", "--json")
    owner.join()
    assert created.code == 0
    assert (created.json["status"], created.json["state"]["model_id"]) == ("active", model_id_of("default", "default", "m"))


def test_a_diverged_model_shows_why_and_is_resumed(cli: Headrace, own: Own, kafka: str, topic_prefix: str) -> None:
    model_id = model_id_of("default", "default", "m")
    assert cli("models", "create", "m", "--base-model", "tiny").code == 0
    own(1, status="diverged", status_detail="step 3: the weights' digest differs")
    table = cli("models", "list").out
    assert f"m is diverged: step 3: the weights' digest differs\n  To resume it: headrace models resume {model_id}\n" in table
    shown = cli("models", "show", "m").out
    assert "status: diverged\nstatus_detail: 'step 3: the weights'' digest differs'\n" in shown
    assert cli("models", "resume", "m").out == f"{model_id} resuming\n"
    assert "resuming" in cli("models", "list").out
    own(2, status="diverged", status_detail="it still differs")
    ran = cli("models", "show", "m", "--json")
    assert (ran.json["status"], ran.json["status_detail"]) == ("diverged", "it still differs")
    owner = once_commanded(kafka, topic_prefix, LANE, 2, lambda: own(3, status="active"))
    resumed = cli("models", "resume", "m", "--wait")
    owner.join()
    assert (resumed.code, resumed.out) == (0, f"{model_id} active\n")
    refused = cli("models", "resume", "m")
    assert (refused.code, refused.out) == (1, "")
    assert "only one that is stopped or diverged can be resumed" in refused.err


def test_a_model_that_waits_for_its_base_model_says_so_in_the_list_and_to_the_doctor(cli: Headrace, own: Own) -> None:
    assert cli("models", "create", "m", "--base-model", "tiny").code == 0
    own(1, waiting_for="its tokenizer can't be read", unknown_versions=("file:///store/weights/00000007-a",))
    listed = cli("models", "list").out
    assert "m is waiting: its tokenizer can't be read\n  It resumes by itself when that is repaired.\n" in listed
    assert "its ledger does not know (Kafka has lost their records):\n  file:///store/weights/00000007-a\n" in listed
    found = [finding for finding in cli("doctor", "--json").json if finding["name"] == "model m"]
    assert [(finding["state"], finding["detail"].partition(":")[0]) for finding in found] == [
        ("missing", "waiting"),
        ("absent", "published, and not in its ledger, whose end Kafka has lost"),
    ]
    refused = cli("models", "resume", "m")
    assert (refused.code, "is waiting" in refused.err) == (1, True)


def test_wait_without_a_worker_gives_up_and_says_so(cli: Headrace) -> None:
    ran = cli("models", "create", "m", "--base-model", "tiny", "--wait", "--timeout", "0.3")
    assert ran.code == 1
    assert "no worker has taken up m" in ran.err


def test_an_unknown_model_is_an_error(cli: Headrace) -> None:
    ran = cli("models", "show", "nobody")
    assert ran.code == 1
    assert "there is no model" in ran.err
