"""What an agent runtime embeds: send trajectory groups and training jobs, and pace rollouts.

    async with TrajectoryProducer(bootstrap_servers="localhost:9092", model_id=model) as producer:
        report = await producer.send(group)

Guarantees: importing this package costs a few milliseconds and pulls in neither torch nor Kafka; a name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.producers.errors import BufferFullError, DeliveryError, InvalidGroupError, ProducerClosedError, ProducerError
    from headrace.producers.outgoing import DeliveryReport
    from headrace.producers.pacing import PaceGate
    from headrace.producers.producer import TrajectoryProducer
    from headrace.producers.responses import choice_from_completion, choice_from_openai, tool_message
    from headrace.producers.sync import SyncTrajectoryProducer

_HOMES = {
    "BufferFullError": "errors",
    "DeliveryError": "errors",
    "DeliveryReport": "outgoing",
    "InvalidGroupError": "errors",
    "PaceGate": "pacing",
    "ProducerClosedError": "errors",
    "ProducerError": "errors",
    "SyncTrajectoryProducer": "sync",
    "TrajectoryProducer": "producer",
    "choice_from_completion": "responses",
    "choice_from_openai": "responses",
    "tool_message": "responses",
}

__all__ = [
    "BufferFullError",
    "DeliveryError",
    "DeliveryReport",
    "InvalidGroupError",
    "PaceGate",
    "ProducerClosedError",
    "ProducerError",
    "SyncTrajectoryProducer",
    "TrajectoryProducer",
    "choice_from_completion",
    "choice_from_openai",
    "tool_message",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
