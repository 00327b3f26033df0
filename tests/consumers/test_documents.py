from pathlib import Path

import orjson
import pytest
import yaml
from faststream.specification import AsyncAPI
from faststream.specification.asyncapi.v3_0_0.schema import ApplicationSchema
from typer.testing import CliRunner

from headrace.cli.docs import app as docs
from headrace.consumers.asyncapi import asyncapi_document, asyncapi_yaml
from headrace.consumers.subscribers.events import Events
from headrace.consumers.worker.outgoing import dead_letter
from headrace.core.settings import KafkaSettings, Settings
from headrace.schemas.carried import CARRIED
from headrace.schemas.dead_letters import WHOLE_BYTES
from headrace.schemas.envelope import json_schema_files, record_models, type_of
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.topics import TOPICS, Topics
from headrace.schemas.trajectory import TrajectoryGroup

ROOT = Path(__file__).parents[2]


def resolve(document, ref: str):
    found = document
    for part in ref.removeprefix("#/").split("/"):
        found = found[part]
    return found


def refs(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs(item)


def test_every_topic_is_a_channel_with_its_key_its_messages_and_both_operations():
    document = yaml.safe_load(asyncapi_yaml())
    assert document["asyncapi"] == "3.0.0"
    assert set(document["channels"]) == {spec.name for spec in TOPICS}
    for spec in TOPICS:
        channel = document["channels"][spec.name]
        assert channel["address"] == Topics().full(spec.name)
        messages = [resolve(document, message["$ref"]) for message in channel["messages"].values()]
        for model in CARRIED.get(spec.name, ()):
            (message, *also) = [m for m in messages if m["name"] == type_of(model)]
            assert resolve(document, message["payload"]["$ref"])["title"] == model.__name__
            assert len(also) == (1 if model is TrajectoryGroup else 0)
        assert all(message["bindings"]["kafka"]["key"]["description"] == spec.key for message in messages)
        for action in ("send", "receive"):
            operation = document["operations"][f"{action}-{spec.name}"]
            assert operation["action"] == action
            assert len(operation["messages"]) == len(channel["messages"])
    groups = document["channels"]["trajectory-groups"]["messages"]
    kinds = {resolve(document, message["$ref"])["contentType"] for message in groups.values()}
    assert kinds == {"application/json", "application/vnd.headrace.group+safetensors"}


def test_every_reference_leads_somewhere_and_the_document_has_the_shape_of_asyncapi_3():
    document = yaml.safe_load(asyncapi_yaml())
    found = list(refs(document))
    assert found
    for ref in found:
        assert resolve(document, ref)
    document["servers"]["kafka"]["pathname"] = ""  # FastStream asks for it, the specification does not
    ApplicationSchema.model_validate(document)


def test_what_faststream_says_of_the_subscribers_is_in_the_document():
    events = Events(Settings(kafka=KafkaSettings(bootstrap_servers="localhost:9092")))
    models = [model for model in record_models() if model is not TrajectoryGroup]
    for model in models:

        async def handler(record) -> None: ...

        handler.__name__ = f"on_{model.__name__}"
        handler.__annotations__["record"] = model
        events.subscriber(model)(handler)
    theirs = yaml.safe_load(AsyncAPI(events.broker).to_specification().to_yaml())
    ours = asyncapi_document()
    ours = orjson.loads(orjson.dumps(ours))
    addresses = {channel["address"]: channel for channel in ours["channels"].values()}
    assert len(theirs["channels"]) == len(models)
    for channel in theirs["channels"].values():
        (ref,) = [message["$ref"] for message in channel["messages"].values()]
        payload = theirs["components"]["messages"][ref.rpartition("/")[2]]["payload"]["$ref"]
        name = payload.rpartition("/")[2]
        assert name in addresses[channel["address"]]["messages"]
        assert theirs["components"]["schemas"][name] == ours["components"]["schemas"][name]


def test_dead_letters_are_described_with_the_headers_they_have():
    class Empty:
        topic, partition, offset, timestamp, key, value, headers = "t", 0, 1, 2, b"k", None, ()

    class Large(Empty):
        value = b"x" * (WHOLE_BYTES + 1)

    letters = [dead_letter(Topics(), source(), CodecError(DeadLetterReason.NOT_JSON, "a", "b"), 0) for source in (Empty, Large)]
    described = asyncapi_document()["components"]["schemas"]["DeadLetterHeaders"]["properties"]
    assert {name for letter in letters for name, _ in letter.headers} == set(described)


def test_there_is_one_json_schema_for_every_record():
    files = json_schema_files()
    assert len(files) == len(record_models())
    for name, content in files.items():
        schema = orjson.loads(content)
        assert schema["$id"] == f"urn:headrace:{name.removesuffix('.json').replace('.', ':')}"
        for ref in refs(schema):
            assert resolve(schema, ref)


def test_what_is_checked_in_is_what_the_code_says():
    runner = CliRunner()
    for arguments in (["asyncapi", "--out", "schemas/asyncapi.yaml"], ["jsonschema", "--out", "schemas/json"]):
        arguments[2] = str(ROOT / arguments[2])
        result = runner.invoke(docs, [*arguments, "--check"])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("fault", ["changed", "missing", "stale"])
def test_check_names_what_differs_and_changes_nothing(tmp_path, fault):
    runner = CliRunner()
    out = tmp_path / "json"
    assert runner.invoke(docs, ["jsonschema", "--out", str(out)]).exit_code == 0
    assert runner.invoke(docs, ["jsonschema", "--out", str(out), "--check"]).exit_code == 0
    file = out / ("gone.v1.json" if fault == "stale" else "starved.v1.json")
    if fault == "missing":
        file.unlink()
    else:
        file.write_text("{}")
    before = {path: path.read_bytes() for path in out.iterdir()}
    result = runner.invoke(docs, ["jsonschema", "--out", str(out), "--check"])
    assert result.exit_code == 1
    assert file.name in result.output
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert runner.invoke(docs, ["jsonschema", "--out", str(out)]).exit_code == 0
    assert runner.invoke(docs, ["jsonschema", "--out", str(out), "--check"]).exit_code == 0
