"""A dead letter that is sent again trains, once the reason is gone."""

import orjson
from aiokafka import AIOKafkaProducer
from tests.unreadable import Headers, send_batch
from tests.worker.conftest import following, learner
from tests.worker.groups import group, trajectory

from headrace.core.dead_letters import LetterFilter, list_letters
from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import model_id_of
from headrace.core.resolving import resolve
from headrace.core.settings import Settings
from headrace.producers import TrajectoryProducer
from headrace.schemas.chat import Message
from headrace.schemas.commands import DeleteModel
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.envelope import header_text, type_of
from headrace.schemas.events import GroupRejected
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.state import StepRecord
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup


async def test_letters_of_an_unknown_model_train_when_they_are_sent_again_after_it_was_created(shared: Settings) -> None:
    model_id = model_id_of(shared.account, "tests", "came late")
    # As a producer in another language may: ours refuses a model that does not exist.
    async with following(shared, model_id) as seen, AIOKafkaProducer(**client_options(shared.kafka, "test")) as producer:
        topic, key = shared.topic_names.trajectory_groups, model_id.encode()
        sent = [(await producer.send_and_wait(topic, written(group(name, seed=seed)), key=key)).offset for seed, name in enumerate("ab")]
        await seen.until_dead_letters(2)
        wanted = LetterFilter(reason="unknown_model", keys=frozenset({model_id}))
        assert [letter.offset for letter in await list_letters(shared, wanted)] == sent
        await learner(shared, "came late")
        outcomes = await resolve(shared, "retried", wanted, by="ada")
        (step,) = await seen.until(StepRecord, 1)
        resolved = await seen.until(DeadLetterResolved, 2)
    assert [outcome.resolved for outcome in outcomes] == resolved
    trained = [offset for span in step.offsets for offset in range(span.first, span.last + 1)]
    assert trained == [record.new_offset for record in resolved]
    assert (step.groups, await list_letters(shared, wanted)) == (2, [])


def written(group: TrajectoryGroup) -> bytes:
    return orjson.dumps(group.model_dump(mode="json"))


async def test_nothing_that_a_record_holds_ends_its_lane(shared: Settings) -> None:
    """The first is the record that did: 700 bytes of the log, 17 MB once they are unpacked."""
    model = await learner(shared, "bombed")
    key, lane = model.model_id.encode(), lane_of(model.model_id, shared.topics.partitions)
    groups, commands = shared.topic_names.trajectory_groups, shared.topic_names.commands
    job, deletion = ([("ce_type", type_of(kind).encode())] for kind in (TrainingJob, DeleteModel))
    fit, unfit = trajectory(1.0, [9, 10]), Trajectory(messages_and_choices=[Message(role="user", content="a")], reward=0.0)
    large_job = orjson.dumps({"job_id": "j", "group_ids": [], "config": {"more": "x" * 200_000}})
    delete = orjson.dumps({"model_id": model.model_id})
    letters: list[tuple[str, bytes, bytes, Headers, str]] = [
        (groups, key, bytes(17_000_000), [], "not_json"),
        (groups, key, bytes(40_000_000), [], "too_large"),
        (groups, b"k" * 2_000_000, b"{}", [], "too_large"),
        (groups, key, b"{}", [("", None)] * 50_000, "too_large"),
        (groups, key, bytes(5_000_000), [("", None)] * 1_000_000, "too_large"),
        (groups, key, b'{"trajectories": [' + b"7," * 300_000 + b"7]}", [], "invalid_schema"),
        (groups, key, written(TrajectoryGroup(trajectories=[unfit] * 20_001)), [], "too_large"),
        (groups, key, large_job, job, "too_large"),
        (commands, key, delete + b" " * 2_000_000, deletion, "too_large"),
    ]
    async with following(shared) as seen, AIOKafkaProducer(**client_options(shared.kafka, "test"), max_request_size=64 << 20) as producer:
        for topic, its_key, value, headers, reason in letters:
            offset = await send_batch(producer, topic, lane, [(its_key, value, headers)], compression=4)
            letter = await seen.dead_letter_of(topic, lane, offset)
            assert header_text(letter.headers)["headrace-error-reason"] == reason
        await send_batch(producer, groups, lane, [(key, written(TrajectoryGroup(trajectories=[fit] + [unfit] * 5001)), [])], compression=4)
    async with following(shared, model.model_id) as seen:
        (refused,) = await seen.until(GroupRejected, 1)
        assert "5001 of its trajectories are unfit" in refused.detail
        async with TrajectoryProducer(shared, model_id=model.model_id) as sender:
            for seed, name in enumerate("ab"):
                await sender.send(group(name, seed=seed))
        assert (await seen.until(StepRecord, 1))[0].groups == 2
