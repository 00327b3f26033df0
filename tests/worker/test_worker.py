"""The worker from the outside: groups on a real Kafka in, committed steps, events and weights out."""

from collections.abc import Callable
from pathlib import Path

import orjson
from aiokafka import AIOKafkaProducer
from safetensors import safe_open
from tests.worker.conftest import WorkerProcess
from tests.worker.following import Following
from tests.worker.groups import group, trajectory

from headrace.core.kafka import client_options
from headrace.core.models import ModelView
from headrace.core.settings import Settings
from headrace.core.store import fetch_folder, open_store
from headrace.producers import TrajectoryProducer
from headrace.schemas.events import GroupRejected, JobStateChanged, StepCompleted
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.weights import WeightsPublished

Start = Callable[[], WorkerProcess]


async def test_groups_become_steps_events_weights_and_state_in_one_commit(
    settings: Settings, model: ModelView, start_worker: Start, following: Following, tmp_path: Path
) -> None:
    worker = start_worker()
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for i in range(4):
            await producer.send(group(f"g{i}", seed=i))
    published = await following.until(WeightsPublished, 2)
    steps = await following.until(StepRecord, 2)
    completed = await following.until(StepCompleted, 2)
    assert [record.step for record in steps] == [1, 2]
    assert [(r.offsets[0].first, r.offsets[0].last) for r in steps] == [(0, 1), (2, 3)]
    assert [p.policy_version for p in published] == [1, 2]
    assert [c.lag_histogram for c in completed] == [{0: 4}, {1: 4}]
    assert all(record.loss is not None and record.updates == 1 for record in steps)
    state = following.of(ModelState)[-1]
    assert (state.policy_version, state.last_attempt, state.pending) == (2, steps[1].attempt, ())
    assert following.of(LaneState)[-1].mark == 4
    folder = tmp_path / "fetched"
    fetch_folder(open_store(settings.store.url, settings.s3), published[1].uri, published[1].digest, folder)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert "model.embed_tokens.weight" in tensors.keys()  # noqa: SIM118 - safe_open is no mapping
    assert (folder / "config.json").is_file()
    assert (folder / "tokenizer.json").is_file()
    assert worker.stop() == 0


async def test_after_sigkill_the_next_worker_goes_on_and_nothing_is_trained_twice(
    settings: Settings, model: ModelView, start_worker: Start, following: Following
) -> None:
    first = start_worker()
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for i in range(5):
            await producer.send(group(f"g{i}", seed=i))
        await following.until(StepRecord, 2)
        first.kill()
        start_worker()
        for i in range(5, 8):
            await producer.send(group(f"g{i}", seed=i))
    steps = await following.until(StepRecord, 4)
    trained = [offset for record in steps for span in record.offsets for offset in range(span.first, span.last + 1)]
    assert trained == list(range(8))
    assert [p.policy_version for p in await following.until(WeightsPublished, 4)] == [1, 2, 3, 4]


async def test_a_job_is_a_bucket_of_its_own_with_its_config_and_its_document(
    settings: Settings, model: ModelView, start_worker: Start, following: Following
) -> None:
    start_worker()
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        await producer.send(group("stream", seed=1))
        job_id = await producer.submit_job([group("a"), group("b", seed=2), group("c", seed=3)], None)
        (step,) = await following.until(StepRecord, 1)
        assert (step.job_id, step.groups, step.cut) == (job_id, 3, "job")
        await producer.send(group("stream 2", seed=2))
    steps = await following.until(StepRecord, 2)
    assert steps[1].job_id is None
    states = [event.state for event in await following.until(JobStateChanged, 3)]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]
    document = following.of(JobDocument)[-1]
    assert (document.state, document.step, document.num_groups) == (JobState.COMPLETED, 1, 3)
    assert document.metrics["loss"] == step.loss


async def test_bad_records_end_with_their_reasons_and_the_groups_around_them_are_trained(
    settings: Settings, model: ModelView, start_worker: Start, following: Following
) -> None:
    def raw(**fields: object) -> bytes:
        return orjson.dumps(fields)

    def with_choice(**choice: object) -> bytes:
        item = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "a"}, "prompt_token_ids": [2, 3], **choice}
        return raw(trajectories=[{"messages_and_choices": [item], "reward": 1}, {"messages_and_choices": [item], "reward": 0}])

    good = [group(f"g{i}", seed=i).model_dump_json().encode() for i in range(4)]
    sampled = {"token_ids": [9, 1], "token_logprobs": [-1, -1]}
    unreadable: list[tuple[bytes | None, dict[str, str], str]] = [
        (b"not json", {}, "not_json"),
        (None, {}, "not_json"),
        (raw(trajectories="many"), {}, "invalid_schema"),
        (good[0], {"ce_type": "headrace.trajectory-group.v2"}, "unsupported_version"),
        (good[0], {"ce_type": "headrace.tea-pot.v1"}, "unknown_type"),
        (b'{"trajectories": [{"reward": NaN}]}', {}, "not_finite"),
        (with_choice(token_ids=[9, 1], token_logprobs=[-1]), {}, "length_mismatch"),
        (raw(trajectories=[{"initial_policy_version": -1}]), {}, "invalid_schema"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{}              ", {"content-type": "application/vnd.headrace.group+safetensors"}, "not_json"),
    ]
    claim = {
        "uri": settings.store.url + "/payloads/ab/none.zst",
        "sha256": "0" * 64,
        "size": 9,
        "raw_size": 9,
        "content_type": "application/json",
    }
    refused: list[tuple[bytes, dict[str, str], RejectionReason]] = [
        (raw(trajectories=[]), {}, RejectionReason.NO_TRAJECTORIES),
        (raw(trajectories=[{}]), {}, RejectionReason.NO_TRAINABLE_TOKENS),
        (with_choice(), {}, RejectionReason.MISSING_LOGPROBS),
        (with_choice(token_ids=[9, 32], token_logprobs=[-1, -1]), {}, RejectionReason.TOKEN_OUT_OF_VOCABULARY),
        (raw(**claim), {"ce_type": "headrace.group-claim.v1"}, RejectionReason.PAYLOAD_MISSING),
        (group("ahead", version=7).model_dump_json().encode(), {}, RejectionReason.UNKNOWN_POLICY_VERSION),
        (good[0], {}, RejectionReason.DUPLICATE),
    ]
    assert b"token_ids" in with_choice(**sampled)
    producer = AIOKafkaProducer(**client_options(settings.kafka, "test"))
    await producer.start()
    try:

        async def send(value: bytes | None, headers: dict[str, str]) -> None:
            await producer.send_and_wait(
                settings.topic_names.trajectory_groups,
                value,
                key=model.model_id.encode(),
                headers=[(name, text.encode()) for name, text in headers.items()],
            )

        await send(good[0], {})
        for i, (value, headers, _) in enumerate(unreadable):
            await send(value, headers)
            if i == 4:
                await send(good[1], {})
        for i, (value, headers, _) in enumerate(refused):
            await send(value, headers)
            if i == 3:
                await send(good[2], {})
        await send(good[3], {})
    finally:
        await producer.stop()
    start_worker()
    steps = await following.until(StepRecord, 2)
    assert sum(step.groups for step in steps) == 4
    letters = await following.until_dead_letters(len(unreadable))
    assert [dict(letter.headers)["headrace-error-reason"].decode() for letter in letters] == [reason for *_, reason in unreadable]
    assert [letter.value for letter in letters] == [value for value, *_ in unreadable]
    rejected = await following.until(GroupRejected, len(refused))
    assert sorted(event.reason for event in rejected) == sorted(reason for *_, reason in refused)
    assert all(event.detail for event in rejected)


async def test_a_group_for_an_unknown_model_is_dead_lettered_and_a_model_created_before_its_groups_is_known(
    settings: Settings, start_worker: Start, following: Following, model: ModelView
) -> None:
    async with TrajectoryProducer(settings) as producer:
        await producer.send(group("lost"), model_id="no such model")
        await producer.send(group("g0"), model_id=model.model_id)
        await producer.send(group("g1", seed=1), model_id=model.model_id)
    start_worker()
    (letter,) = await following.until_dead_letters(1)
    assert dict(letter.headers)["headrace-error-reason"] == b"unknown_model"
    await following.until(StepRecord, 1)


async def test_a_step_without_variance_counts_and_changes_nothing(
    settings: Settings, model: ModelView, start_worker: Start, following: Following
) -> None:
    start_worker()
    async with TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for name in "ab":
            same = group(name)
            same.trajectories = [trajectory(0.5, [9, 1]), trajectory(0.5, [10, 1])]
            await producer.send(same)
    (step,) = await following.until(StepRecord, 1)
    assert (step.updates, step.loss, step.policy_version_after) == (0, None, 1)
