"""The records of a training job: its groups, the record that asks for the step, its document, and whose it is.

Guarantees: all stand in the model's lane, groups before their job, so that one transaction submits it (exactly-once rules 16, 17); a
payload above the limit is durable in the object store before there is a record that names it. Limitations: nothing; who calls decides what
is inline.
"""

from headrace.core.payloads import claim
from headrace.core.store import ObjectStore
from headrace.gateway.log_writer import SOURCE, Sealed, sealed
from headrace.producers.door import encode
from headrace.schemas.base import utc_now
from headrace.schemas.codec import SampledGroup
from headrace.schemas.envelope import Envelope, type_of
from headrace.schemas.gateway import GatewayJob, job_key
from headrace.schemas.jobs import JobDocument, JobState, TrainingJob
from headrace.schemas.topics import Topics
from headrace.schemas.trajectory import TrajectoryGroup


def group_record(
    group: TrajectoryGroup | SampledGroup, *, topics: Topics, model_id: str, lane: int, store: ObjectStore, encoding: str, inline_limit: int
) -> Sealed:
    """A group, with its id and its job's, as a record; blocks.

    Args:
        group: As it is to be read.
        topics: Names.
        model_id: The model it trains.
        lane: The model's.
        store: For a payload of more than `inline_limit` bytes.
        encoding: `safetensors` or `json`.
        inline_limit: 0: always into the store.

    Raises:
        InvalidGroupError: the codec refuses the group.
        PayloadTooLargeError: no reader would take it.
        StoreError: it could not be stored.
    """
    inner = group.group if isinstance(group, SampledGroup) else group
    body, content_type = encode(group, encoding)
    if len(body) > inline_limit:
        check = claim(store, body, content_type, inner.group_id, inner.job_id)
        return sealed(check, topic=topics.trajectory_groups, key=model_id, partition=lane, event_id=inner.group_id)
    envelope = Envelope(type=type_of(TrajectoryGroup), source=SOURCE, id=str(inner.group_id), time=utc_now(), content_type=content_type)
    return Sealed(topic=topics.trajectory_groups, key=model_id, value=body, headers=envelope.headers(), partition=lane)


def job_records(training: TrainingJob, fact: GatewayJob, *, topics: Topics, lane: int) -> list[Sealed]:
    """The record that asks for the step, the document that it begins with, and the gateway's own of it; to stand behind the groups."""
    document = JobDocument(
        job_id=training.job_id,
        model_id=fact.model_id,
        state=JobState.PENDING,
        created_at=training.created_at,
        kind=training.kind,
        config=training.config,
        sft=training.sft,
        options=training.options,
        num_groups=len(training.group_ids),
    )
    return [
        sealed(training, topic=topics.trajectory_groups, key=fact.model_id, partition=lane, event_id=training.job_id),
        sealed(document, topic=topics.jobs, key=training.job_id),
        sealed(fact, topic=topics.gateway, key=job_key(training.job_id)),
    ]
