"""The AsyncAPI 3.0 document: every topic as a channel with its key, its messages with their headers, and who sends and who receives.

Made from the tables that the code itself runs on: topics and their settings (`headrace.schemas.topics`), which records they carry
(`headrace.schemas.carried`, what `Events` subscribes by and producers send by) and the record models. FastStream's own document knows only
one application's handlers, one channel each; a test holds that what it says of `Events` is what stands here.

Guarantees: complete (no topic and no record is left out) and deterministic. Limitations: the `dead-letters` payload, which is foreign
bytes.
"""

from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace.schemas import topics
from headrace.schemas.carried import CARRIED
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE
from headrace.schemas.envelope import record_models, type_of
from headrace.schemas.topics import TOPICS, Topics, TopicSpec
from headrace.schemas.trajectory import TrajectoryGroup

_BINDING = "0.5.0"
_WORKER = "the worker that owns the model's lane"
_PARTIES: dict[str, tuple[str, str]] = {
    topics.TRAJECTORY_GROUPS: ("producers embedded in agent runtimes, and the gateway", _WORKER),
    topics.COMMANDS: ("the command line and the gateway", _WORKER),
    topics.STEPS: (_WORKER, f"{_WORKER}, after taking it over; replay; subscribers"),
    topics.MODELS: (_WORKER, f"{_WORKER}, after taking it over; the gateway; subscribers"),
    topics.TRAINING_EVENTS: (_WORKER, "subscribers"),
    topics.WEIGHTS: (_WORKER, "weight subscribers next to rollout engines; producers that pace themselves"),
    topics.WEIGHT_ACKS: ("weight subscribers next to rollout engines", "dashboards and subscribers"),
    topics.JOBS: ("the gateway, once with the job; then the worker that owns the model's lane", "the gateway; subscribers"),
    topics.GATEWAY: ("gateways", "gateways"),
    topics.DEAD_LETTERS: (f"{_WORKER}; the command line, of what became of a letter", "people and tools that look for what went wrong"),
}
"""Who sends to a topic and who receives from it."""


def asyncapi_document() -> dict[str, Any]:
    """The document as plain data, in the order it is written."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Headrace",
            "version": "1.0.0",
            "description": (
                "The topics of Headrace under the prefix `headrace.` (a setting). Records are JSON with CloudEvents headers "
                "(Kafka binding, binary mode); a trajectory group may also come as safetensors. The version is that of the "
                "records (`ce_type`), not of the release. Unknown fields are kept and passed on."
            ),
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": JSON_TYPE,
        "servers": {"kafka": {"host": "localhost:9092", "protocol": "kafka", "description": "`kafka.bootstrap_servers`"}},
        "channels": {spec.name: _channel(spec) for spec in TOPICS},
        "operations": {name: operation for spec in TOPICS for name, operation in _operations(spec)},
        "components": {"messages": _messages(), "schemas": _schemas()},
    }


def asyncapi_yaml() -> str:
    """The document as YAML, without anchors."""
    return yaml.dump(asyncapi_document(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - the signature is PyYAML's
        return True


def _message_names(topic: str) -> list[str]:
    names = ["DeadLetter"] if topic == topics.DEAD_LETTERS else []
    for model in CARRIED[topic]:
        names.append(model.__name__)
        if model is TrajectoryGroup:
            names.append("TrajectoryGroupSafetensors")
    return names


def _channel(spec: TopicSpec) -> dict[str, Any]:
    configuration: dict[str, Any] = {"cleanup.policy": spec.config["cleanup.policy"].split(",")}
    configuration |= {name: int(spec.config[name]) for name in ("retention.ms", "retention.bytes") if name in spec.config}
    return {
        "address": Topics().full(spec.name),
        "description": f"{spec.carries[:1].upper()}{spec.carries[1:]}. Key: {spec.key}."
        + (" Partition: murmur2 of the key, the model's lane." if spec.lane else ""),
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in _message_names(spec.name)},
        "bindings": {"kafka": {"topic": Topics().full(spec.name), "topicConfiguration": configuration, "bindingVersion": _BINDING}},
    }


def _operations(spec: TopicSpec) -> list[tuple[str, dict[str, Any]]]:
    sender, receiver = _PARTIES[spec.name]
    channel = f"#/channels/{spec.name}"
    messages = [{"$ref": f"{channel}/messages/{name}"} for name in _message_names(spec.name)]
    return [
        (f"{action}-{spec.name}", {"action": action, "channel": {"$ref": channel}, "summary": f"By {who}.", "messages": messages})
        for action, who in (("send", sender), ("receive", receiver))
    ]


def _messages() -> dict[str, Any]:
    messages: dict[str, Any] = {}
    for spec in TOPICS:
        for model in CARRIED.get(spec.name, ()):
            messages[model.__name__] = _message(model, spec, JSON_TYPE, {"$ref": f"#/components/schemas/{model.__name__}"})
            if model is TrajectoryGroup:
                binary = {"type": "string", "format": "binary", "description": _SAFETENSORS}
                messages["TrajectoryGroupSafetensors"] = _message(model, spec, SAFETENSORS_TYPE, binary)
    messages["DeadLetter"] = {
        "name": "DeadLetter",
        "title": "A record that could not be read",
        "summary": "The original key, value and headers, untouched (of a large record their beginnings), and why.",
        "contentType": "application/octet-stream",
        "headers": {"$ref": "#/components/schemas/DeadLetterHeaders"},
        "payload": {"type": "string", "format": "binary"},
        "bindings": {"kafka": {"key": {"type": "string", "description": "as the original"}, "bindingVersion": _BINDING}},
    }
    return messages


def _message(model: type[BaseModel], spec: TopicSpec, content_type: str, payload: dict[str, Any]) -> dict[str, Any]:
    summary = " ".join((model.__doc__ or "").partition("\n\n")[0].split())
    return {
        "name": type_of(model),
        "title": model.__name__,
        "summary": summary,
        "contentType": content_type,
        "headers": {
            "allOf": [
                {"$ref": "#/components/schemas/CloudEventHeaders"},
                {"type": "object", "properties": {"ce_type": {"const": type_of(model)}, "content-type": {"const": content_type}}},
            ]
        },
        "payload": payload,
        "bindings": {"kafka": {"key": {"type": "string", "description": spec.key}, "bindingVersion": _BINDING}},
    }


def _schemas() -> dict[str, Any]:
    _, document = models_json_schema([(model, "validation") for model in record_models()], ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = dict(sorted(document["$defs"].items()))
    return {"CloudEventHeaders": _CLOUD_EVENT_HEADERS, "DeadLetterHeaders": _DEAD_LETTER_HEADERS, **schemas}


_SAFETENSORS = (
    'A safetensors file. `__metadata__["group"]` is the JSON of the group (schema TrajectoryGroup) in which every sampled turn has '
    "`token_span: [start, stop)`; flat arrays over all turns: `token_ids` I32, `logprobs` F32 (NaN: missing), `policy_versions` I32 "
    "(optional; -1 where a turn has none). The spans tile the arrays in order. Means the same as the JSON."
)
_CLOUD_EVENT_HEADERS: dict[str, Any] = {
    "type": "object",
    "description": "CloudEvents 1.0, Kafka binding, binary mode; UTF-8. Without `ce_type` a record is the topic's first message.",
    "properties": {
        "ce_specversion": {"const": "1.0"},
        "ce_id": {"type": "string", "description": "Events that may repeat derive theirs, so that a subscriber can drop a repeat."},
        "ce_type": {"type": "string", "pattern": r"^headrace\.[a-z-]+\.v[0-9]+$"},
        "ce_source": {"type": "string"},
        "ce_time": {"type": "string", "format": "date-time"},
        "content-type": {"type": "string"},
        "traceparent": {"type": "string", "description": "W3C trace context."},
    },
}
_DEAD_LETTER_HEADERS: dict[str, Any] = {
    "type": "object",
    "description": "The original's headers, and these behind them. A record without `headrace-error-reason` is no dead letter.",
    "properties": {
        f"headrace-error-{name}": {"type": "string", "description": description}
        for name, description in (
            ("reason", "From the closed list of dead-letter reasons."),
            ("path", "Path of the field at fault; empty for the whole record."),
            ("detail", "What is wrong there, for people."),
            ("type", "Exception type."),
            ("topic", "Source topic."),
            ("partition", "Source partition."),
            ("offset", "Source offset."),
            ("time", "Timestamp of the source record, milliseconds since 1970, UTC."),
            ("value", "`null`: the source record had no value. Absent otherwise."),
            (
                "sha256",
                "SHA-256 of the source record, of which a letter that is cut has the beginning. Absent otherwise, as the next three.",
            ),
            ("key-bytes", "Bytes of the source record's key."),
            ("value-bytes", "Bytes of the source record's value."),
            ("headers", "How many headers the source record has."),
        )
    },
}
