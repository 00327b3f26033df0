"""Old steps whole, read from the ledger at the offsets that the tables have of them.

Guarantees: what is answered is the committed record of that very step. Limitations: steps that retention took (the ledger is kept for ever
unless someone changed that); they are left out.
"""

from collections.abc import Iterable

from headrace.core.fetching import fetch_offsets
from headrace.core.kafka import client_options
from headrace.core.kept import open_kept
from headrace.core.reading import OffsetLostError
from headrace.core.settings import Settings
from headrace.gateway.step_history import StepEntry, StepHistory, entry_of
from headrace.schemas.state import StepRecord


async def whole_steps(settings: Settings, history: StepHistory, steps: Iterable[int]) -> dict[int, StepEntry]:
    """Steps by their numbers: those that are held, the others from the ledger.

    Raises:
        HeadraceError: Kafka does not answer, or a record can't be read.
    """
    wanted = set(steps)
    found = {entry.step: entry for entry in history.recent if entry.step in wanted}
    places = history.offsets_of([step for step in wanted if step not in found])
    options, topic = client_options(settings.kafka, "headrace-gateway"), settings.topic_names.steps
    try:
        records = await fetch_offsets(options, topic, history.partition, places)
    except OffsetLostError as error:
        records = await fetch_offsets(options, topic, history.partition, places.keys() - set(error.missing))
    for record in records.values():
        step = open_kept(record, (StepRecord,))
        if isinstance(step, StepRecord):
            found[step.step] = entry_of(step)
    return found
