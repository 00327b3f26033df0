"""The worker from the outside: groups on a real Kafka in, committed steps, events and weights out."""

from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
from aiokafka import AIOKafkaProducer
from safetensors import safe_open
from tests.unreadable import send_unreadable
from tests.worker.conftest import WorkerProcess, following, learner
from tests.worker.groups import group, trajectory

from headrace.core.kafka import client_options
from headrace.core.models import delete_model, model_id_of
from headrace.core.settings import Settings
from headrace.core.store import fetch_folder, open_store
from headrace.producers import TrajectoryProducer
from headrace.schemas.codec import SAFETENSORS_TYPE, encode_safetensors, sampled
from headrace.schemas.commands import CancelJob
from headrace.schemas.envelope import seal
from headrace.schemas.events import GroupRejected, JobStateChanged, StepCompleted, TrajectoryRejected
from headrace.schemas.jobs import JobDocument, JobState
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import LaneState, StepRecord
from headrace.schemas.training import TrainConfig
from headrace.schemas.weights import WeightsPublished

Start = Callable[[], WorkerProcess]


def offsets_of(step: StepRecord) -> list[int]:
    return [offset for span in step.offsets for offset in range(span.first, span.last + 1)]


async def test_groups_become_steps_events_weights_and_state_in_one_commit(shared: Settings, tmp_path: Path) -> None:
    model = await learner(shared, "in one commit")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        sent = [(await producer.send(group(f"g{i}", seed=i))).offset for i in range(4)]
        published = await seen.until(WeightsPublished, 2)
        steps = await seen.until(StepRecord, 2)
        completed = await seen.until(StepCompleted, 2)
        state = await seen.until_state(lambda found: found.policy_version == 2)
    assert [record.step for record in steps] == [1, 2]
    assert [offsets_of(record) for record in steps] == [sent[:2], sent[2:]]
    assert [p.policy_version for p in published] == [1, 2]
    assert [c.lag_histogram for c in completed] == [{0: 4}, {1: 4}]
    assert all(record.loss is not None and record.updates == 1 for record in steps)
    assert (state.last_attempt, state.pending, state.groups_trained) == (steps[1].attempt, (), 4)
    assert max(seen.event_ids.values()) == 1
    folder = tmp_path / "fetched"
    fetch_folder(open_store(shared.store.url, shared.s3), published[1].uri, published[1].digest, folder)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert "model.embed_tokens.weight" in tensors.keys()  # noqa: SIM118 - safe_open is no mapping
    assert (folder / "config.json").is_file()
    assert (folder / "tokenizer.json").is_file()


async def test_after_sigkill_the_next_worker_goes_on_and_nothing_is_trained_twice(settings: Settings, start_worker: Start) -> None:
    model = await learner(settings)
    first = start_worker()
    async with following(settings) as seen, TrajectoryProducer(settings, model_id=model.model_id) as producer:
        for i in range(5):
            await producer.send(group(f"g{i}", seed=i))
        await seen.until(StepRecord, 2)
        children = psutil.Process(first.process.pid).children(recursive=True)
        assert len(children) >= 2
        first.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        second = start_worker()
        for i in range(5, 8):
            await producer.send(group(f"g{i}", seed=i))
        steps = await seen.until(StepRecord, 4)
        assert [offset for record in steps for offset in offsets_of(record)] == list(range(8))
        assert [p.policy_version for p in await seen.until(WeightsPublished, 4)] == [1, 2, 3, 4]
        assert seen.of(LaneState)[-1].mark == 8
    assert second.stop() == 0


async def test_a_job_is_a_bucket_of_its_own_with_its_config_and_its_document(shared: Settings) -> None:
    model = await learner(shared, "jobs")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.send(group("stream", seed=1))
        config = TrainConfig(learning_rate=2e-3, ppo=True)
        job_id = await producer.submit_job([group("a"), group("b", seed=2), group("c", seed=3)], config)
        (step,) = await seen.until(StepRecord, 1)
        assert (step.job_id, step.groups, step.cut) == (job_id, 3, "job")
        assert (step.config.learning_rate, step.config.ppo) == (2e-3, True)
        await producer.send(group("stream 2", seed=2))
        steps = await seen.until(StepRecord, 2)
        assert (steps[1].job_id, steps[1].config.learning_rate) == (None, 1e-3)
        states = [event.state for event in await seen.until(JobStateChanged, 3)]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]
    document = seen.of(JobDocument)[-1]
    assert (document.state, document.step, document.num_groups) == (JobState.COMPLETED, 1, 3)
    assert document.metrics["loss"] == step.loss


async def test_a_job_with_an_option_that_contradicts_the_models_fails_with_both_names_and_the_stream_goes_on(shared: Settings) -> None:
    model = await learner(shared, "failing job")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.submit_job([group("a")], TrainConfig(packed_sequence_length=1 << 20))
        events = await seen.until(JobStateChanged, 3)
        assert events[-1].state is JobState.FAILED
        assert {"train.packed_sequence_length=1048576", "max_sequence_tokens=32768:"} <= {*(events[-1].message or "").split()}
        (rejected,) = await seen.until(GroupRejected, 1)
        assert rejected.reason is RejectionReason.STEP_FAILED
        await producer.send(group("b"))
        await producer.send(group("c", seed=1))
        assert (await seen.until(StepRecord, 1))[0].groups == 2


async def test_a_cancelled_job_refuses_its_groups_and_ends(shared: Settings) -> None:
    model = await learner(shared, "cancelled")
    producer = AIOKafkaProducer(**client_options(shared.kafka, "test"))
    await producer.start()
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as groups:
        await groups.submit_job([group("a")], None, job_id="ends")
        await seen.until(StepRecord, 1)
        await groups.send(group("b", seed=1, job_id="waits"))
        record = seal(CancelJob(model_id=model.model_id, job_id="waits"), source="test")
        await producer.send_and_wait(shared.topic_names.commands, record[0], key=model.model_id.encode(), headers=record[1])
        # A job whose record was never written has no document to end; one that ended refuses what comes late.
        late = group("late", seed=2, job_id="ends")
        await groups.send(late)
        (rejected,) = await seen.until(GroupRejected, 1)
        assert (rejected.group_id, rejected.reason) == ("late", RejectionReason.JOB_CLOSED)
    await producer.stop()


async def test_bad_records_end_with_their_reasons_and_the_groups_around_them_are_trained(shared: Settings) -> None:
    model = await learner(shared, "bad records")

    def raw(**fields: object) -> bytes:
        return orjson.dumps(fields)

    def with_choice(**choice: object) -> bytes:
        message = {"role": "assistant", "content": "a"}
        item = {"finish_reason": "stop", "index": 0, "message": message, "prompt_token_ids": [2, 3], **choice}
        return raw(trajectories=[{"messages_and_choices": [item], "reward": 1}, {"messages_and_choices": [item], "reward": 0}])

    good = [group(f"g{i}", seed=i).model_dump_json().encode() for i in range(4)]
    not_safetensors = b"\x10\x00\x00\x00\x00\x00\x00\x00{}              "
    spans_do_not_fit = encode_safetensors(sampled(group("spans"))).replace(b'token_span\\":[0,3]', b'token_span\\":[0,2]')
    unreadable: list[tuple[bytes | None, dict[str, str], str]] = [
        (b"not json", {}, "not_json"),
        (None, {}, "not_json"),
        (raw(trajectories="many"), {}, "invalid_schema"),
        (good[0], {"ce_type": "headrace.trajectory-group.v2"}, "unsupported_version"),
        (good[0], {"ce_type": "headrace.tea-pot.v1"}, "unknown_type"),
        (b'{"trajectories": [{"reward": NaN}]}', {}, "not_finite"),
        (with_choice(token_ids=[9, 1], token_logprobs=[-1]), {}, "length_mismatch"),
        (raw(trajectories=[{"initial_policy_version": -1}]), {}, "invalid_schema"),
        (not_safetensors, {"content-type": SAFETENSORS_TYPE}, "not_json"),
        (spans_do_not_fit, {"content-type": SAFETENSORS_TYPE}, "span_mismatch"),
    ]
    claim = {
        "uri": shared.store.url + "/payloads/ab/none.zst",
        "sha256": "0" * 64,
        "size": 9,
        "raw_size": 9,
        "content_type": "application/json",
    }
    other = open_store(shared.store.url, shared.s3).put_bytes_if_absent("payloads/ab/other.zst", b"another")
    changed = {**claim, "uri": f"{shared.store.url}/{other.key}", "size": other.size}
    refused: list[tuple[bytes, dict[str, str], RejectionReason]] = [
        (raw(trajectories=[]), {}, RejectionReason.NO_TRAJECTORIES),
        (raw(trajectories=[{}]), {}, RejectionReason.MISSING_REWARD),
        (raw(trajectories=[{"reward": 1}]), {}, RejectionReason.NO_TRAINABLE_TOKENS),
        (with_choice(), {}, RejectionReason.MISSING_LOGPROBS),
        (with_choice(token_ids=[9, 32], token_logprobs=[-1, -1]), {}, RejectionReason.TOKEN_OUT_OF_VOCABULARY),
        (raw(**claim), {"ce_type": "headrace.group-claim.v1"}, RejectionReason.PAYLOAD_MISSING),
        (raw(**changed), {"ce_type": "headrace.group-claim.v1"}, RejectionReason.PAYLOAD_DIGEST_MISMATCH),
        (group("ahead", version=7).model_dump_json().encode(), {}, RejectionReason.UNKNOWN_POLICY_VERSION),
        (good[0], {}, RejectionReason.DUPLICATE),
    ]
    producer = AIOKafkaProducer(**client_options(shared.kafka, "test"))
    await producer.start()

    async def send(value: bytes | None, headers: dict[str, str]) -> None:
        encoded = [(name, text.encode()) for name, text in headers.items()]
        await producer.send_and_wait(shared.topic_names.trajectory_groups, value, key=model.model_id.encode(), headers=encoded)

    async with following(shared, model.model_id) as seen:
        await send(good[0], {})
        for i, (value, headers, _) in enumerate(unreadable):
            await send(value, headers)
            if i == 4:
                await send(good[1], {})
        for i, (body, headers, _) in enumerate(refused):
            await send(body, headers)
            if i == 4:
                await send(good[2], {})
        await send(good[3], {})
        steps = await seen.until(StepRecord, 2)
        letters = await seen.until_dead_letters(len(unreadable))
        rejected = await seen.until(GroupRejected, len(refused))
    await producer.stop()
    assert sum(step.groups for step in steps) == 4
    assert [dict(letter.headers)["headrace-error-reason"].decode() for letter in letters] == [reason for *_, reason in unreadable]
    assert [letter.value for letter in letters] == [value for value, *_ in unreadable]
    assert sorted(event.reason for event in rejected) == sorted(reason for *_, reason in refused)
    assert all(event.detail for event in rejected)


async def test_a_bad_member_is_said_and_the_rest_of_its_group_trains(shared: Settings) -> None:
    model = await learner(shared, "partial group")
    partial = group("partial")
    partial.trajectories.insert(1, trajectory(0.5, [99, 1]))  # the tiny model has 32 tokens
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        offset = (await producer.send(partial)).offset
        await producer.send(group("whole", seed=1))
        (step,) = await seen.until(StepRecord, 1)
        (completed,) = await seen.until(StepCompleted, 1)
        (lost,) = await seen.until(TrajectoryRejected, 1)
        state = await seen.until_state(lambda found: found.policy_version == 1)
    assert (step.groups, completed.trajectories, step.updates) == (2, 4, 1)
    assert (lost.group_id, lost.offset, lost.trajectory) == ("partial", offset, 1)
    assert lost.reason is RejectionReason.TOKEN_OUT_OF_VOCABULARY
    assert lost.detail.startswith("trajectories[1]: messages_and_choices[1].token_ids[0] is 99")
    assert (state.trajectory_refusals, state.refusals) == ({RejectionReason.TOKEN_OUT_OF_VOCABULARY: 1}, {})
    assert seen.of(GroupRejected) == []


async def test_a_stale_member_is_said_with_the_step_that_trains_the_others(shared: Settings) -> None:
    model = await learner(shared, "stale member", groups_per_step=1, max_policy_lag=0)
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.send(group("a"))
        await seen.until(StepRecord, 1)
        mixed = group("mixed", version=1)
        mixed.trajectories.append(trajectory(0.5, [9, 1], version=0))
        await producer.send(mixed)
        (_, completed) = await seen.until(StepCompleted, 2)
        (lost,) = await seen.until(TrajectoryRejected, 1)
        (_, step) = await seen.until(StepRecord, 2)
    assert (step.trajectory_refusals, step.refusals) == ({RejectionReason.STALE: 1}, {})
    assert (completed.trajectories, completed.lag_histogram) == (2, {0: 2})
    assert (lost.trajectory, lost.reason) == (2, RejectionReason.STALE)
    assert seen.of(GroupRejected) == []


async def test_scanned_and_pending_members_that_were_refused_are_not_said_again_by_the_worker_that_reads_their_group_again(
    settings: Settings, start_worker: Start
) -> None:
    model = await learner(settings)
    partial = group("partial")
    partial.trajectories.append(trajectory(0.5, [99, 1]))
    first = start_worker()
    async with following(settings) as seen, TrajectoryProducer(settings, model_id=model.model_id) as producer:
        await producer.send(partial)
        await seen.until(TrajectoryRejected, 1)
        waiting = await seen.until_state(lambda state: state.model_id == model.model_id and state.pending != ())
        assert waiting.trajectory_refusals == {RejectionReason.TOKEN_OUT_OF_VOCABULARY: 1}
        first.kill()
        second = start_worker()
        await producer.send(group("whole", seed=1))
        (step,) = await seen.until(StepRecord, 1)
        state = await seen.until_state(lambda found: found.model_id == model.model_id and found.policy_version == 1)
        assert step.groups == 2
        assert len(seen.of(TrajectoryRejected)) == 1
        assert state.trajectory_refusals == {RejectionReason.TOKEN_OUT_OF_VOCABULARY: 1}
        assert max(seen.event_ids.values()) == 1
    assert second.stop() == 0


async def test_a_group_for_an_unknown_model_is_dead_lettered_and_a_model_created_before_its_groups_is_known(shared: Settings) -> None:
    unknown = model_id_of("default", "tests", "never created")
    async with TrajectoryProducer(shared) as producer, following(shared, unknown) as seen:
        # As a producer in another language may: ours refuses a model that does not exist.
        async with AIOKafkaProducer(**client_options(shared.kafka, "test")) as foreign:
            body = group("lost").model_dump_json().encode()
            await foreign.send_and_wait(shared.topic_names.trajectory_groups, body, key=unknown.encode())
        (letter,) = await seen.until_dead_letters(1)
        assert dict(letter.headers)["headrace-error-reason"] == b"unknown_model"
        model = await learner(shared, "known")
        async with following(shared, model.model_id) as trained:
            await producer.send(group("g0"), model_id=model.model_id)
            await producer.send(group("g1", seed=1), model_id=model.model_id)
            await trained.until(StepRecord, 1)


async def test_a_step_without_variance_counts_and_changes_nothing(shared: Settings) -> None:
    model = await learner(shared, "no variance")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        for name in "ab":
            same = group(name)
            same.trajectories = [trajectory(0.5, [9, 1]), trajectory(0.5, [10, 1])]
            await producer.send(same)
        (step,) = await seen.until(StepRecord, 1)
    assert (step.updates, step.loss, step.policy_version_after) == (0, None, 1)


async def test_zero_variance_is_refused_where_the_model_says_so(shared: Settings) -> None:
    model = await learner(shared, "refuses equal rewards", zero_variance="refuse")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        same = group("same")
        same.trajectories = [trajectory(0.5, [9, 1]), trajectory(0.5, [10, 1])]
        await producer.send(same)
        (rejected,) = await seen.until(GroupRejected, 1)
    assert rejected.reason is RejectionReason.ZERO_VARIANCE


async def test_incarnation_a_deleted_model_refuses_late_groups_and_a_new_one_is_another_incarnation(shared: Settings) -> None:
    model = await learner(shared, "deleted")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as producer:
        await producer.send(group("a"))
        await producer.send(group("b", seed=1))
        await seen.until(StepRecord, 1)
        await delete_model(shared, model.model_id)
        await seen.until_state(lambda state: state.status == "deleted")
        await producer.send(group("late", seed=2))
        (rejected,) = await seen.until(GroupRejected, 1)
        assert rejected.reason is RejectionReason.MODEL_DELETED
        await learner(shared, "deleted")
        await seen.until_state(lambda state: state.status == "active" and state.policy_version == 0 and state.scanned > rejected.offset)
        await producer.send(group("a"))
        await producer.send(group("b", seed=1))
        steps = await seen.until(StepRecord, 2)
    assert [step.step for step in steps] == [1, 1]
    assert steps[0].incarnation != steps[1].incarnation
    assert steps[0].weights.uri != steps[1].weights.uri


async def test_one_lane_a_record_on_a_foreign_lane_is_dead_lettered(shared: Settings) -> None:
    model = await learner(shared, "foreign lane")
    producer = AIOKafkaProducer(**client_options(shared.kafka, "test"))
    await producer.start()
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as groups:
        right = (await groups.send(group("a"))).partition
        body = group("b", seed=1).model_dump_json().encode()
        topic = shared.topic_names.trajectory_groups
        await producer.send_and_wait(topic, body, key=model.model_id.encode(), partition=1 - right)
        (letter,) = await seen.until_dead_letters(1)
        state = await seen.until_state(lambda _: True)
    await producer.stop()
    assert dict(letter.headers)["headrace-error-reason"] == b"wrong_lane"
    assert state.policy_version == 0


async def test_records_that_the_kafka_client_can_not_hand_over_or_send_stop_nobody(shared: Settings) -> None:
    model = await learner(shared, "unreadable headers")
    producer = AIOKafkaProducer(**client_options(shared.kafka, "test"))
    await producer.start()
    async with following(shared) as seen, TrajectoryProducer(shared, model_id=model.model_id) as groups:
        lane = (await groups.send(group("a"))).partition
        topic = shared.topic_names.trajectory_groups
        offset = await send_unreadable(producer, topic, lane, model.model_id.encode())
        await groups.send(group("b", seed=1))
        nothing = producer.create_batch()
        nothing.append(key=None, value=None, timestamp=None)
        nothing.close()
        empty = (await (await producer.send_batch(nothing, topic, partition=lane))).offset
        await seen.dead_letter_of(topic, lane, empty)
        letter = await seen.dead_letter_of(topic, lane, offset)  # its key is unknown: it is told by its place
        headers = dict(letter.headers)
        assert headers["headrace-error-reason"] == b"unreadable_headers"
        await seen.until_state(lambda state: state.model_id == model.model_id and state.policy_version == 1)
    await producer.stop()
