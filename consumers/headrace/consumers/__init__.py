"""What reads Headrace's topics: the worker that trains, subscribers to events, and the way of weights into rollout engines.

Guarantees: importing this package pulls in neither torch nor faststream; a name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.consumers.events import Events
    from headrace.consumers.sampling.generation import Generation
    from headrace.consumers.sampling.local_engine import LocalEngine
    from headrace.consumers.weights.adapters import CallableAdapter, LocalEngineAdapter, WeightAdapter
    from headrace.consumers.weights.subscriber import WeightSubscriber

__all__ = ["CallableAdapter", "Events", "Generation", "LocalEngine", "LocalEngineAdapter", "WeightAdapter", "WeightSubscriber"]

_MODULES = {
    "CallableAdapter": "weights.adapters",
    "Events": "events",
    "Generation": "sampling.generation",
    "LocalEngine": "sampling.local_engine",
    "LocalEngineAdapter": "weights.adapters",
    "WeightAdapter": "weights.adapters",
    "WeightSubscriber": "weights.subscriber",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
