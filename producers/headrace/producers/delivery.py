"""What the producer says about a group that is in the log."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReport:
    """A group was acknowledged by all in-sync replicas.

    Example: `DeliveryReport(topic="headrace.trajectory-groups", partition=3, offset=17, group_id="g", claimed=False, size=1024)`.
    """

    topic: str
    partition: int
    """The model's lane."""
    offset: int
    group_id: str
    claimed: bool
    """The payload went to the object store, and a claim check to Kafka."""
    size: int
    """Bytes of the encoded group, before any compression."""
