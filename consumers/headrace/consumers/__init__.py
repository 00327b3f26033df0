"""The readers of Headrace's topics: the worker that trains, subscribers to events, and weight subscribers of rollout engines.

Guarantees: importing this package imports neither torch nor faststream; a name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.consumers.subscribers.events import Events
    from headrace.consumers.subscribers.weight_applier import CallableAdapter, LocalEngineAdapter, WeightAdapter
    from headrace.consumers.subscribers.weight_subscriber import WeightSubscriber
    from headrace.engine.sampling.generation import Generation
    from headrace.engine.sampling.local_engine import LocalEngine

__all__ = ["CallableAdapter", "Events", "Generation", "LocalEngine", "LocalEngineAdapter", "WeightAdapter", "WeightSubscriber"]

_MODULES = {
    "CallableAdapter": "headrace.consumers.subscribers.weight_applier",
    "Events": "headrace.consumers.subscribers.events",
    "Generation": "headrace.engine.sampling.generation",
    "LocalEngine": "headrace.engine.sampling.local_engine",
    "LocalEngineAdapter": "headrace.consumers.subscribers.weight_applier",
    "WeightAdapter": "headrace.consumers.subscribers.weight_applier",
    "WeightSubscriber": "headrace.consumers.subscribers.weight_subscriber",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
