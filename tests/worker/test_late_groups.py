"""Rule 9 where a job's group comes late: what a job trains on stands in the log, whenever its step runs."""

import asyncio

from aiokafka import AIOKafkaProducer
from tests.worker.conftest import following, learner
from tests.worker.groups import group

from headrace.core.kafka import client_options
from headrace.core.settings import Settings
from headrace.schemas.events import GroupRejected
from headrace.schemas.jobs import JobDocument, JobState, TrainingJob
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import StepRecord


async def test_intent_first_a_group_behind_a_jobs_last_one_is_refused_also_where_it_is_read_before_the_step_runs(shared: Settings) -> None:
    model = await learner(shared, "late group")
    job = TrainingJob(job_id="in time", group_ids=("a", "b"))
    bodies = [
        (group("a", job_id="in time").model_dump_json(), "trajectory-group"),
        (job.model_dump_json(), "training-job"),
        (group("b", seed=1, job_id="in time").model_dump_json(), "trajectory-group"),
        (group("late", seed=2, job_id="in time").model_dump_json(), "trajectory-group"),
    ]
    producer = AIOKafkaProducer(**client_options(shared.kafka, "test"), linger_ms=50)
    await producer.start()
    async with following(shared, model.model_id) as seen:
        # One batch: the lane takes all four in before it looks for what is complete.
        sent = [
            await producer.send(
                shared.topic_names.trajectory_groups,
                body.encode(),
                key=model.model_id.encode(),
                headers=[("ce_type", f"headrace.{kind}.v1".encode())],
            )
            for body, kind in bodies
        ]
        places = [place.offset for place in await asyncio.gather(*sent)]
        (late,) = await seen.until(GroupRejected, 1)
        (step,) = await seen.until(StepRecord, 1)
        # RUNNING may be written with PENDING or after it: the last document counts.
        async with asyncio.timeout(60):
            while not any(document.state is JobState.COMPLETED for document in seen.of(JobDocument)):
                await seen.until(JobDocument, len(seen.of(JobDocument)) + 1)
    await producer.stop()
    assert (step.job_id, step.groups, late.group_id, late.reason) == ("in time", 2, "late", RejectionReason.JOB_CLOSED)
    assert (late.offset, late.job_id) == (places[3], "in time")
    ended = seen.of(JobDocument)[-1]
    assert (ended.state, ended.groups_rejected) == (JobState.COMPLETED, 0)
