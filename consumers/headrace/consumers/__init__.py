"""What reads Headrace's topics: the worker that trains, subscribers to events, and the way of weights into rollout engines.

Guarantees: importing this package pulls in neither torch nor faststream; a name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.consumers.adapters import CallableAdapter, LocalEngineAdapter, WeightAdapter
    from headrace.consumers.events import Events
    from headrace.consumers.generation import Generation
    from headrace.consumers.local_engine import LocalEngine
    from headrace.consumers.weight_subscriber import WeightSubscriber

__all__ = ["CallableAdapter", "Events", "Generation", "LocalEngine", "LocalEngineAdapter", "WeightAdapter", "WeightSubscriber"]

_MODULES = {
    "CallableAdapter": "adapters",
    "Events": "events",
    "Generation": "generation",
    "LocalEngine": "local_engine",
    "LocalEngineAdapter": "adapters",
    "WeightAdapter": "adapters",
    "WeightSubscriber": "weight_subscriber",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
