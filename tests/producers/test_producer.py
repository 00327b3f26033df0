"""The producer against a real broker: what arrives is what was sent, and what can't be sent is said."""

import asyncio
import math
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.producers.conftest import MODEL, PARTITIONS, ReadAll, make_group, make_topic

from headrace.core.kafka import KafkaUnavailableError
from headrace.core.lanes import lane_of
from headrace.core.payloads import redeem
from headrace.core.settings import KafkaSettings, ProducerSettings, Settings, TopicSettings
from headrace.core.store import open_store
from headrace.producers import (
    BufferFullError,
    DeliveryError,
    InvalidGroupError,
    ProducerClosedError,
    TrajectoryProducer,
)
from headrace.producers.outgoing import keep_last_turns
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import JSON_TYPE, SAFETENSORS_TYPE, decode_group, sampled
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.training import SftConfig, TrainConfig
from headrace.schemas.trajectory import Trajectory, TrajectoryGroup

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def with_producer(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"producer": ProducerSettings(**changes)})


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("encoding", ["safetensors", "json"])
async def test_what_arrives_is_the_group_that_was_sent(producer_settings: Settings, read_all: ReadAll, encoding: str, compression: str):
    group = make_group(metadata={"scenario": "s"})
    async with TrajectoryProducer(with_producer(producer_settings, encoding=encoding, compression=compression), model_id=MODEL) as producer:
        report = await producer.send(group, traceparent=TRACE)
    (record,) = await read_all()
    headers = header_text(record.headers)
    assert decode_group(record.value, headers["content-type"]) == sampled(group)
    assert headers["content-type"] == (SAFETENSORS_TYPE if encoding == "safetensors" else JSON_TYPE)
    assert headers["ce_type"] == "headrace.trajectory-group.v1"
    assert headers["ce_id"] == group.group_id
    assert headers["traceparent"] == TRACE
    assert record.key == MODEL.encode()
    assert (report.topic, report.partition, report.offset) == (record.topic, record.partition, record.offset)
    assert (report.group_id, report.claimed, report.size) == (group.group_id, False, len(record.value))


async def test_a_group_goes_to_the_lane_of_its_model(producer_settings: Settings):
    async with TrajectoryProducer(producer_settings) as producer:
        for model in [str(uuid.uuid4()) for _ in range(12)]:
            assert (await producer.send(make_group(), model)).partition == lane_of(model, PARTITIONS)


async def test_a_prepared_group_is_sent_as_it_is(producer_settings: Settings, read_all: ReadAll):
    prepared = sampled(make_group())
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        await producer.send(prepared)
    (record,) = await read_all()
    assert decode_group(record.value, SAFETENSORS_TYPE) == prepared


async def test_the_same_object_sent_again_keeps_its_group_id(producer_settings: Settings):
    group = make_group()
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        first, second = await producer.send(group), await producer.send(group)
    assert group.group_id is not None
    assert first.group_id == second.group_id == group.group_id
    assert second.offset == first.offset + 1


async def test_above_the_inline_limit_a_claim_stands_for_the_group(producer_settings: Settings, read_all: ReadAll):
    group = make_group(tokens=3000, job_id="j")
    async with TrajectoryProducer(with_producer(producer_settings, inline_limit_bytes=4096), model_id=MODEL) as producer:
        report = await producer.send(group, traceparent=TRACE)
    (record,) = await read_all()
    headers = header_text(record.headers)
    claim = open_record(record.value, headers, [TrajectoryGroup, GroupClaim])
    assert isinstance(claim, GroupClaim)
    assert report.claimed
    assert (claim.group_id, claim.job_id, claim.raw_size) == (group.group_id, "j", report.size)
    assert headers["ce_id"] == group.group_id
    assert headers["traceparent"] == TRACE
    body = redeem(open_store(producer_settings.store.url, producer_settings.s3), claim)
    assert decode_group(body, claim.content_type) == sampled(group)


async def test_a_store_that_takes_nothing_fails_the_group_and_sends_nothing(producer_settings: Settings, read_all: ReadAll, tmp_path: Path):
    (tmp_path / "store").write_text("a file where the folder should be")
    async with TrajectoryProducer(with_producer(producer_settings, inline_limit_bytes=1024), model_id=MODEL) as producer:
        with pytest.raises(DeliveryError, match="payload could not be stored") as caught:
            await producer.send(make_group(tokens=3000))
    assert not caught.value.unknown
    assert await read_all() == []


async def test_submitted_groups_stand_in_the_log_in_their_order(producer_settings: Settings, read_all: ReadAll):
    # Every third is claimed: its upload must not let the next one overtake it.
    groups = [make_group(tokens=3000 if i % 3 == 0 else 3, group_id=f"g{i}") for i in range(30)]
    async with TrajectoryProducer(with_producer(producer_settings, inline_limit_bytes=4096), model_id=MODEL) as producer:
        deliveries = [await producer.submit(group) for group in groups]
        reports = await asyncio.gather(*deliveries)
    assert [report.offset for report in reports] == [*range(30)]
    assert [header_text(record.headers)["ce_id"] for record in await read_all()] == [f"g{i}" for i in range(30)]


async def test_leaving_the_block_flushes_what_is_buffered(producer_settings: Settings, read_all: ReadAll):
    async with TrajectoryProducer(with_producer(producer_settings, linger_ms=500), model_id=MODEL) as producer:
        deliveries = [producer.try_send(make_group(tokens=n)) for n in (3, 3, 9000)]
        assert not any(delivery.done() for delivery in deliveries)
    assert all(delivery.done() for delivery in deliveries)
    assert len(await read_all()) == 3


async def test_try_send_says_that_the_buffer_is_full_and_send_waits_for_room(producer_settings: Settings, read_all: ReadAll):
    # A group of 800 tokens takes about 15 KB (two trajectories).
    async with TrajectoryProducer(with_producer(producer_settings, buffer_bytes=25_000, linger_ms=300), model_id=MODEL) as producer:
        first = producer.try_send(make_group(tokens=800))
        with pytest.raises(BufferFullError, match="no room"):
            producer.try_send(make_group(tokens=1600))
        waiting = asyncio.create_task(producer.send(make_group(tokens=1600, group_id="waited")))
        await asyncio.sleep(0)
        assert not first.done()
        assert (await waiting).group_id == "waited"
        assert first.done()
    assert "waited" in [header_text(record.headers)["ce_id"] for record in await read_all()]


async def test_a_group_larger_than_the_whole_buffer_is_sent_alone(producer_settings: Settings):
    async with TrajectoryProducer(with_producer(producer_settings, buffer_bytes=1024), model_id=MODEL) as producer:
        reports = await asyncio.gather(*[producer.send(make_group(tokens=2000)) for _ in range(4)])
    assert sorted(report.offset for report in reports) == [0, 1, 2, 3]


async def test_a_cancelled_send_is_delivered_all_the_same_once_it_is_buffered(producer_settings: Settings, read_all: ReadAll):
    async with TrajectoryProducer(with_producer(producer_settings, linger_ms=300), model_id=MODEL) as producer:
        sending = asyncio.create_task(producer.send(make_group()))
        await asyncio.sleep(0)  # the send runs up to its wait for the acknowledgement
        assert producer.buffered_bytes
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert len(await read_all()) == 1


def nan_reward() -> TrajectoryGroup:
    group = make_group()
    group.trajectories[1].reward = math.nan
    return group


def no_reward() -> TrajectoryGroup:
    group = make_group()
    group.trajectories.append(Trajectory(messages_and_choices=group.trajectories[0].messages_and_choices))
    return group


def other_length() -> TrajectoryGroup:
    group = make_group()
    next(group.choices()).token_logprobs = [-1.0]
    return group


@pytest.mark.parametrize(
    ("group", "path"),
    [
        (TrajectoryGroup(trajectories=[]), "trajectories"),
        (nan_reward(), "trajectories[1].reward"),
        (no_reward(), "trajectories[2].reward"),
        (other_length(), "trajectories[0].messages_and_choices[1]"),
        (make_group(metadata={"a": [math.nan]}), "metadata.a[0]"),
        (make_group(metadata={"a": "\ud800"}), "metadata.a"),
        ({"trajectories": []}, ""),
    ],
)
async def test_a_bad_group_is_refused_at_the_door_and_nothing_is_sent(
    producer_settings: Settings, read_all: ReadAll, group: TrajectoryGroup, path: str
):
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        for attempt in (producer.send, producer.submit, producer.try_send):
            with pytest.raises(InvalidGroupError) as caught:
                await attempt(group)  # type: ignore[misc]  # try_send raises before there is anything to await
            assert caught.value.path == path
        assert producer.buffered_bytes == 0
        await producer.send(make_group())
    assert len(await read_all()) == 1


async def test_a_missing_or_reserved_model_id_is_refused(producer_settings: Settings):
    async with TrajectoryProducer(producer_settings) as producer:
        for model, detail in ((None, "missing"), ("", "missing"), ("lane:3", "reserved"), ("x" * 300, "300 characters")):
            with pytest.raises(InvalidGroupError, match=rf"model_id: .*{detail}"):
                await producer.send(make_group(), model)
        with pytest.raises(InvalidGroupError, match="traceparent"):
            await producer.send(make_group(), MODEL, traceparent="trace me")


async def test_outside_its_block_the_producer_takes_nothing(producer_settings: Settings):
    producer = TrajectoryProducer(producer_settings, model_id=MODEL)
    with pytest.raises(ProducerClosedError):
        await producer.send(make_group())
    async with producer:
        pass
    with pytest.raises(ProducerClosedError):
        producer.try_send(make_group())


async def test_an_unknown_topic_names_the_command_that_makes_it(kafka: str, topic_prefix: str):
    settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix))
    with pytest.raises(KafkaUnavailableError, match="headrace topics apply"):
        await TrajectoryProducer(settings).start()


async def test_after_a_record_that_the_broker_refuses_the_next_one_arrives(kafka: str, topic_prefix: str, read_all: ReadAll):
    # A refused record leaves a hole in the client's sequence numbers: with the same client every later one would be refused too.
    await make_topic(kafka, f"{topic_prefix}trajectory-groups", {"max.message.bytes": "5000"})
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=kafka, request_timeout_ms=10_000),
        topics=TopicSettings(prefix=topic_prefix),
        producer=ProducerSettings(compression="none"),
    )
    async with TrajectoryProducer(settings, model_id=MODEL) as producer:
        await producer.send(make_group())
        with pytest.raises(DeliveryError, match="MessageSizeTooLarge"):
            await producer.send(make_group(tokens=3000))
        assert (await producer.send(make_group())).offset == 1
    assert len(await read_all()) == 2


async def test_an_unreachable_broker_is_an_error_with_its_address():
    with pytest.raises(KafkaUnavailableError, match=r"127\.0\.0\.1:1 does not answer"):
        await TrajectoryProducer(bootstrap_servers="127.0.0.1:1").start()


async def test_a_job_is_its_groups_and_then_its_record_on_the_same_partition(producer_settings: Settings, read_all: ReadAll):
    groups = [make_group(), make_group(), make_group()]
    config = TrainConfig(learning_rate=1e-4)
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        job_id = await producer.submit_job(groups, config)
        assert await producer.submit_job(groups, config, job_id=job_id) == job_id, "the same job again is the same records again"
    records = await read_all()
    assert len({record.partition for record in records}) == 1
    assert len(records) == 8
    for group, record in zip(groups, records[:3], strict=True):
        assert decode_group(record.value, SAFETENSORS_TYPE).group.job_id == job_id
        assert group.job_id == job_id
    job = open_record(records[3].value, header_text(records[3].headers), [TrainingJob])
    assert isinstance(job, TrainingJob)
    assert job.group_ids == tuple(str(group.group_id) for group in groups)
    assert (job.job_id, job.config) == (job_id, config)


async def test_a_job_with_one_bad_group_sends_nothing(producer_settings: Settings, read_all: ReadAll):
    twin = make_group(group_id="twin")
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        for groups, path in (
            ([], "groups"),
            ([make_group(), nan_reward()], "groups[1].trajectories[1].reward"),
            ([make_group(), other_length()], "groups[1].trajectories[0].messages_and_choices[1]"),
            ([twin, twin], "groups[1].group_id"),
            ([make_group(job_id="other")], "groups[0].job_id"),
        ):
            with pytest.raises(InvalidGroupError) as caught:
                await producer.submit_job(groups, job_id="j")
            assert caught.value.path == path
    assert await read_all() == []


async def test_a_job_of_examples_says_so_in_its_record_and_in_each_group(producer_settings: Settings, read_all: ReadAll):
    groups = [make_group(), make_group(purpose="sft")]
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        await producer.submit_job(groups, sft=SftConfig(epochs=2), job_id="j")
        await producer.submit_job([make_group()], kind="sft", job_id="plain")
    *sent, first, _, second = await read_all()
    assert [decode_group(record.value, SAFETENSORS_TYPE).group.purpose for record in sent] == ["sft", "sft"]
    jobs = [open_record(record.value, header_text(record.headers), [TrainingJob]) for record in (first, second)]
    assert [(job.kind, job.sft) for job in jobs if isinstance(job, TrainingJob)] == [("sft", SftConfig(epochs=2)), ("sft", None)]


async def test_a_jobs_word_on_missing_log_probabilities_stands_in_its_groups_which_are_read_first(
    producer_settings: Settings, read_all: ReadAll
):
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        await producer.submit_job([make_group()], TrainConfig(allow_training_without_logprobs=True), job_id="j")
        await producer.submit_job([make_group()], TrainConfig(ppo=True), job_id="k")
    said, _, silent, _ = [record.value for record in await read_all()]
    assert decode_group(said, SAFETENSORS_TYPE).group.allow_training_without_logprobs is True
    assert decode_group(silent, SAFETENSORS_TYPE).group.allow_training_without_logprobs is None


async def test_examples_and_rollouts_do_not_mix_and_examples_never_enter_the_stream(producer_settings: Settings, read_all: ReadAll):
    sft = SftConfig()
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        for groups, options, path in (
            ([make_group(), make_group(purpose="sft")], {}, "groups[1].purpose"),
            ([make_group(purpose="rl")], {"sft": sft}, "groups[0].purpose"),
            ([make_group()], {"sft": sft, "kind": "rl"}, "sft"),
            ([make_group()], {"sft": sft, "config": TrainConfig(learning_rate=1e-4)}, "config.learning_rate"),
        ):
            with pytest.raises(InvalidGroupError) as caught:
                await producer.submit_job(groups, **options)  # type: ignore[arg-type]  # a table of options
            assert caught.value.path == path
        with pytest.raises(InvalidGroupError, match="never in the stream") as caught:
            await producer.send(make_group(purpose="sft"))
        assert caught.value.path == "purpose"
    assert await read_all() == []


async def test_encoding_a_large_group_does_not_hold_up_the_event_loop(producer_settings: Settings, monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []
    encode = TrajectoryProducer._encode

    def noted(producer: TrajectoryProducer, outgoing: Any) -> None:
        threads.append(threading.current_thread())
        encode(producer, outgoing)

    monkeypatch.setattr(TrajectoryProducer, "_encode", noted)
    async with TrajectoryProducer(producer_settings, model_id=MODEL) as producer:
        await producer.send(make_group(tokens=100_000))
    assert threads
    assert threading.main_thread() not in threads


def test_only_last_turns_are_kept_or_nothing_is_changed() -> None:
    def group_of(*roles: str) -> TrajectoryGroup:
        messages = [{"role": role, "content": "a"} for role in roles]
        return TrajectoryGroup.model_validate({"trajectories": [{"messages_and_choices": messages}]})

    good, bad = group_of("user", "assistant", "user", "assistant"), group_of("assistant", "user")
    with pytest.raises(InvalidGroupError) as refused:
        keep_last_turns([good, bad])
    assert refused.value.path == "groups[1].trajectories[0]"
    assert [item.model_extra for item in good.trajectories[0].messages_and_choices] == [{}] * 4
    keep_last_turns([good])
    assert [item.model_extra for item in good.trajectories[0].messages_and_choices] == [{}, {"weight": 0}, {}, {}]
