"""A record on its way into a lane's transaction."""

import uuid
from dataclasses import dataclass

from pydantic import BaseModel

from headrace.schemas.envelope import seal

_NAMESPACE = uuid.UUID("6f3f0c1e-8d0b-5a52-9a5e-6d1a0f0b7c11")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Bytes for a topic. `partition` None: by the key's murmur2."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    partition: int | None = None


def outgoing(
    record: BaseModel, *, topic: str, key: str, source: str, partition: int | None = None, event_id: str | None = None
) -> Outgoing:
    """A record model, sealed with its CloudEvents headers."""
    value, headers = seal(record, source=source, event_id=event_id)
    return Outgoing(topic=topic, key=key.encode(), value=value, headers=tuple(headers), partition=partition)


def event_id(incarnation: str, what: str, kind: str) -> str:
    """An id that a repeat of the same event shares: from the incarnation, its step or offset, and its kind (rule 12)."""
    return str(uuid.uuid5(_NAMESPACE, f"{incarnation}/{what}/{kind}"))
