"""A model with its ledger: what every command that reads the ledger begins with."""

from collections import Counter, deque
from contextlib import aclosing
from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.core.ledger import StepRange, stream_ledger
from headrace.core.model_views import ModelView
from headrace.core.models import get_model
from headrace.core.settings import Settings
from headrace.schemas.state import StepRecord


class UnknownIncarnationError(HeadraceError):
    """The ledger has no such incarnation of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHistory:
    """A model, and steps of one incarnation of it."""

    view: ModelView
    records: list[StepRecord]
    others: dict[str, int]
    """Steps of the other incarnations, oldest first."""


async def read_history(
    settings: Settings, model_id: str, *, incarnation: str | None = None, steps: StepRange | None = None, last: int | None = None
) -> ModelHistory:
    """Read a model and its ledger.

    Args:
        settings: Of this process.
        model_id: Its id.
        incarnation: None: the current one, or the latest of the ledger where no worker has taken the model up.
        steps: Only these.
        last: Only so many of them.

    Raises:
        UnknownModelError: there is no such model.
        UnknownIncarnationError: names those there are.
        LedgerError, KafkaUnavailableError: as `stream_ledger`.
    """
    view = await get_model(settings, model_id)
    wanted = incarnation or (view.state.incarnation if view.state is not None else None)
    kept: deque[StepRecord] = deque(maxlen=last)
    found: Counter[str] = Counter()
    stream = stream_ledger(settings, model_id, shadow_of=view.state.shadow_of if view.state is not None else None)
    async with aclosing(stream):
        async for record in stream:
            if wanted is None and record.incarnation not in found:
                kept.clear()
            found[record.incarnation] += 1
            if wanted in {None, record.incarnation} and (steps is None or record.step in steps):
                kept.append(record)
    if incarnation is not None and incarnation not in found:
        there = ", ".join(f"{each} ({count} steps)" for each, count in found.items()) or "none: it has committed no step"
        raise UnknownIncarnationError(f"the ledger of {view.name} has no incarnation {incarnation}; there are {there}")
    shown = wanted or next(reversed(found), None)
    return ModelHistory(view=view, records=list(kept), others={each: count for each, count in found.items() if each != shown})
