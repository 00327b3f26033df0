"""`headrace config show` and `headrace doctor`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.core.store.keys import STORE_FILE

Headrace = Callable[..., Any]


def states(ran: Any) -> dict[str, str]:
    return {finding["name"]: finding["state"] for finding in ran.json}


def advice(ran: Any) -> dict[str, str]:
    return {finding["name"]: finding["advice"] for finding in ran.json}


def test_each_setting_says_where_it_comes_from(headrace: Headrace, tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text(
        "topics: {partitions: 5, prefix: file.}\nworker: {group: fast}\nbase_models: {tiny: {path: /m}}\n"
    )
    shown = headrace(
        "config",
        "show",
        "--json",
        HEADRACE_CONFIG="headrace.yaml",
        HEADRACE_TOPICS__PREFIX="env.",
        HEADRACE_S3='{"region": "eu-north-1"}',
    ).json
    assert shown["topics.prefix"] == {"value": "env.", "source": "environment"}
    assert shown["topics.partitions"] == {"value": 5, "source": "file"}
    assert shown["worker.group"] == {"value": "fast", "source": "file"}
    assert shown["base_models.tiny.path"] == {"value": "/m", "source": "file"}
    assert shown["s3.region"] == {"value": "eu-north-1", "source": "environment"}
    assert shown["store.url"] == {"value": "file://.headrace/store", "source": "default"}
    table = headrace("config", "show").out
    assert any(line.split() == ["topics.prefix", "env.", "environment"] for line in table.splitlines())


def test_secrets_are_masked_in_every_form(headrace: Headrace) -> None:
    secrets = {
        "HEADRACE_S3__SECRET_ACCESS_KEY": "s3cret-1",
        "HEADRACE_KAFKA__SASL_PASSWORD": "s3cret-2",
        "HEADRACE_KAFKA__SSL_KEYFILE_PASSWORD": "s3cret-3",
    }
    for arguments in (("config", "show"), ("config", "show", "--json")):
        ran = headrace(*arguments, **secrets)
        assert "s3cret" not in ran.out + ran.err
        assert ran.out.count("*****") >= 3


def test_wrong_settings_and_a_missing_file_are_one_error_each(headrace: Headrace) -> None:
    wrong = headrace("config", "show", HEADRACE_TOPICS__PARTITIONS="many")
    assert wrong.code == 1
    assert "topics.partitions: Input should be a valid integer" in wrong.err
    missing = headrace("config", "show", HEADRACE_CONFIG="nowhere.yaml")
    assert missing.code == 1
    assert missing.err.startswith("error: HEADRACE_CONFIG names 'nowhere.yaml'")


@pytest.mark.parametrize(
    ("text", "said"),
    [("topics: {partitions: 5", "is no readable YAML"), ("- a\n- b\n", "must hold sections"), ("topics: {sizes: 1}", "sizes")],
)
def test_a_malformed_file_is_one_error_that_names_it(headrace: Headrace, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    ran = headrace("config", "show", HEADRACE_CONFIG="wrong.yaml")
    assert ran.code == 1
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_without_a_name_the_file_in_the_working_directory_is_read(headrace: Headrace, tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("worker: {group: here}\n")
    assert headrace("config", "show", "--json").json["worker.group"] == {"value": "here", "source": "file"}


def test_a_bare_machine_is_told_what_to_do(headrace: Headrace) -> None:
    ran = headrace("doctor", "--json")
    assert ran.code == 1
    found = states(ran)
    assert (found["python"], found["broker"], found["topics"], found["store"]) == ("ok", "missing", "missing", "ok")
    assert found["base models"] == "missing"
    assert "HEADRACE_KAFKA__BOOTSTRAP_SERVERS" in next(f["detail"] for f in ran.json if f["name"] == "broker")
    assert "base_models" in advice(ran)["base models"]
    assert "→" in headrace("doctor").out


def test_a_whole_installation_is_all_ok(headrace: Headrace, kafka: str, topic_prefix: str, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    environment = {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka,
        "HEADRACE_TOPICS__PREFIX": topic_prefix,
        "HEADRACE_BASE_MODELS": orjson.dumps({"tiny": {"path": str(tmp_path / "tiny")}}).decode(),
    }
    before = headrace("doctor", "--json", **environment)
    assert before.code == 1
    assert states(before)["broker"] == "ok"
    assert advice(before)["topics"] == "run `headrace topics apply`"
    headrace("topics", "apply")
    ran = headrace("doctor", "--json")
    assert ran.code == 0, ran.out
    found = states(ran)
    assert found.pop("power loss") == "absent", "one broker: said, and no fault"
    assert set(found.values()) == {"ok"}
    assert {"torch", "transformers", "deepspeed", "devices", "base model tiny", "java"} <= states(ran).keys()
    left = [path.name for path in (tmp_path / ".headrace" / "store").rglob("*") if path.is_file()]
    assert left == [STORE_FILE], "the probe is gone"


def test_a_producer_needs_no_trainer(headrace: Headrace, kafka: str, topic_prefix: str) -> None:
    environment = {"HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka, "HEADRACE_TOPICS__PREFIX": topic_prefix}
    headrace("topics", "apply", **environment)
    ran = headrace("doctor", "--for", "producer", "--json")
    assert ran.code == 0
    assert not {"torch", "base models", "devices"} & states(ran).keys()


@pytest.mark.parametrize("path", ["/nowhere", "file:///elsewhere/models/tiny", "{store}/models/tiny"])
def test_a_base_model_that_is_not_there_is_named(headrace: Headrace, tmp_path: Path, path: str) -> None:
    entry = {"path": path.format(store=f"file://{tmp_path}/store")}
    ran = headrace(
        "doctor", "--json", HEADRACE_STORE__URL=f"file://{tmp_path}/store", HEADRACE_BASE_MODELS=orjson.dumps({"tiny": entry}).decode()
    )
    assert states(ran)["base model tiny"] == "missing"
    assert "base_models.tiny.path" in advice(ran)["base model tiny"]


def test_java_that_nobody_needs_is_no_fault(headrace: Headrace, kafka: str) -> None:
    assert states(headrace("doctor", "--json", JAVA_HOME="/nowhere"))["java"] == "missing"
    assert states(headrace("doctor", "--json", HEADRACE_KAFKA__BOOTSTRAP_SERVERS=kafka))["java"] == "absent"


def test_a_store_that_cannot_be_written_is_said(headrace: Headrace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ran = headrace("doctor", "--json", HEADRACE_STORE__URL=f"file://{tmp_path}/file")
    assert states(ran)["store"] == "missing"
    assert "store.url" in advice(ran)["store"]
