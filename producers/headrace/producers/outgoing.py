"""A group on its way: what has passed the door, what it weighs in the buffer, and the record it becomes.

Guarantees: above the inline limit the payload is durable in the object store before there is a record that names it.

What the producer says about a group that is in the log.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.core.payloads import PayloadTooLargeError, claim
from headrace.core.store import ObjectStore, StoreError
from headrace.producers.door import admit, check_id, encode, weigh
from headrace.producers.errors import DeliveryError, InvalidGroupError
from headrace.schemas.base import utc_now
from headrace.schemas.codec import JSON_TYPE, SampledGroup
from headrace.schemas.envelope import Envelope, seal, type_of
from headrace.schemas.trajectory import TrajectoryGroup

# Encoding above these sizes runs in a thread: about 1 ms of the loop. Objects cost ten times what prepared arrays cost.
_OFF_LOOP_OBJECTS = 16 * 1024
_OFF_LOOP_ARRAYS = 512 * 1024

Group = TrajectoryGroup | SampledGroup
Value = bytes
Headers = list[tuple[str, bytes]]


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """A group that has passed the door."""

    group: Group
    group_id: str
    job_id: str | None
    model_id: str
    traceparent: str | None
    held: int
    """Bytes of the buffer: an estimate until it is encoded, then the size."""
    body: bytes = b""
    content_type: str = JSON_TYPE

    @classmethod
    def admitted(cls, group: Group, model_id: str | None, traceparent: str | None) -> "Outgoing":
        """Check a group and its model id.

        Raises:
            InvalidGroupError: with the path of the field.
        """
        inner = admit(group, traceparent=traceparent)
        return cls(
            group=group,
            group_id=str(inner.group_id),
            job_id=inner.job_id,
            model_id=check_id("model_id", model_id),
            traceparent=traceparent,
            held=weigh(group),
        )

    @property
    def is_large(self) -> bool:
        """Whether encoding it would hold up an event loop."""
        return self.held > (_OFF_LOOP_ARRAYS if isinstance(self.group, SampledGroup) else _OFF_LOOP_OBJECTS)

    def encode(self, encoding: str) -> None:
        """Fill `body`; blocks for the time that the size takes.

        Raises:
            InvalidGroupError: the codec refuses the group.
        """
        self.body, self.content_type = encode(self.group, encoding)

    def inline(self, source: str) -> tuple[Value, Headers]:
        """The record with the group itself."""
        envelope = Envelope(
            type=type_of(TrajectoryGroup),
            source=source,
            id=self.group_id,
            time=utc_now(),
            content_type=self.content_type,
            traceparent=self.traceparent,
        )
        return self.body, envelope.headers()

    def claimed(self, source: str, store: ObjectStore) -> tuple[Value, Headers]:
        """Store the payload, then the record that stands for it; blocks.

        Raises:
            DeliveryError: it could not be stored.
        """
        try:
            check = claim(store, self.body, self.content_type, self.group_id, self.job_id)
        except (StoreError, PayloadTooLargeError) as error:
            raise DeliveryError(self.group_id, f"its payload could not be stored: {error}", unknown=False) from error
        return seal(check, source=source, event_id=self.group_id, traceparent=self.traceparent)


def mark_with_job(
    groups: "list[Group]", job_id: str, kind: Literal["rl", "sft"] = "rl", *, without_logprobs: bool | None = None
) -> tuple[str, ...]:
    """Check the groups of a job, then write into each what must be known before the job's record is read.

    Args:
        groups: At least one.
        job_id: Into `job_id`.
        kind: Into `purpose`, of examples.
        without_logprobs: The job's `allow_training_without_logprobs`, where it says one.

    Returns:
        Their group ids.

    Raises:
        InvalidGroupError: the path begins with `groups[i]`; no group was marked.
    """
    if not groups:
        raise InvalidGroupError("groups", "a job needs at least one group")
    inners: dict[str, TrajectoryGroup] = {}
    for i, group in enumerate(groups):
        try:
            inner = admit(group, in_job=True, examples=kind == "sft")
        except InvalidGroupError as error:
            raise error.inside(f"groups[{i}]") from None
        if inner.job_id not in {None, job_id}:
            raise InvalidGroupError(f"groups[{i}].job_id", f"{inner.job_id} is another job")
        if inner.purpose not in {None, kind}:
            raise InvalidGroupError(f"groups[{i}].purpose", f"{inner.purpose!r} groups do not train in a job of kind {kind!r}")
        group_id = str(inner.group_id)
        if group_id in inners:
            raise InvalidGroupError(f"groups[{i}].group_id", f"{group_id} is there twice: the second would be dropped as a duplicate")
        inners[group_id] = inner
    for inner in inners.values():
        inner.job_id = job_id
        if kind == "sft":  # what says nothing is for rl: the wire stays what older readers know
            inner.purpose = kind
        if without_logprobs is not None:
            inner.allow_training_without_logprobs = without_logprobs
    return tuple(inners)


def keep_last_turns(groups: "list[Group]") -> None:
    """Of each example only the last turn trains.

    Raises:
        InvalidGroupError: one does not end with the assistant; nothing was changed.
    """
    members = [(i, t, member) for i, group in enumerate(groups) for t, member in enumerate(_inner(group).trajectories)]
    for i, t, member in members:
        try:
            member.check_last_turn()
        except ValueError as error:
            raise InvalidGroupError(f"groups[{i}].trajectories[{t}]", str(error)) from None
    for _, _, member in members:
        member.keep_last_turn()


def _inner(group: "Group") -> TrajectoryGroup:
    return group.group if isinstance(group, SampledGroup) else group


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
