"""The gateway's own facts, on their way into the log: records of topic `gateway`, each under the key that it names itself.

Guarantees: as `LogWriter.commit`. Limitations: nothing of its own.
"""

from pydantic import BaseModel

from headrace.gateway.gate import Gate
from headrace.gateway.log_writer import Sealed, Turn, sealed
from headrace.schemas.topics import key_of


def fact_record(gate: Gate, fact: BaseModel) -> Sealed:
    """The record of a fact."""
    return sealed(fact, topic=gate.settings.topic_names.gateway, key=_key_of(fact))


async def write_fact(gate: Gate, fact: BaseModel, *, turn: Turn | None = None) -> None:
    """Commit a fact alone.

    Args:
        gate: The gateway's.
        fact: Of the kinds that topic `gateway` carries.
        turn: What it rests on.

    Raises:
        OvertakenError: that is no longer so; nothing was written.
        KafkaUnavailableError: nothing was written, or no one can say.
    """
    key = _key_of(fact)
    await gate.writer.commit([fact_record(gate, fact)], is_in=lambda: gate.view.tables.facts.get(key) == fact, turn=turn)


def _key_of(fact: BaseModel) -> str:
    key = key_of(fact)
    assert key is not None  # noqa: S101 - narrows the type: every fact has one
    return key
