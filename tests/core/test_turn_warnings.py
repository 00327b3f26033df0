"""What a job says of turns that train otherwise than their sender may expect."""

from headrace.core.job_views import outcome_messages, turn_messages
from headrace.schemas.base import utc_now
from headrace.schemas.jobs import JobDocument, JobState


def test_a_job_warns_of_turns_without_an_end_and_of_turns_that_are_context():
    metrics = {"turns_without_end": 3.0, "turns_as_context": 2.0, "loss": 1.0}
    document = JobDocument(
        job_id="j", model_id="m", state=JobState.COMPLETED, created_at=utc_now(), num_groups=1, num_sequences=1, metrics=metrics
    )
    without_end, as_context = outcome_messages(document)
    assert without_end.startswith("3 turns trained without their end")
    assert as_context.startswith("2 assistant turns are context")


def test_a_job_whose_turns_all_have_their_ends_warns_of_nothing():
    assert turn_messages({"turns_without_end": 0.0, "turns_as_context": 0.0}) == {}
