"""Whatever is sent, no message kills the worker, and each is accounted for once: trained, refused, dead-lettered, waiting, a job's record.

2,000 messages in the suite; `HEADRACE_FUZZ=10000` sends as many by hand, and `HEADRACE_FUZZ_SEED` others.
"""

import os
from collections import Counter
from collections.abc import Iterable

import pytest
from aiokafka import AIOKafkaProducer
from tests.worker.conftest import following
from tests.worker.following import Following
from tests.worker.fuzz import Fuzzer, Message
from tests.worker.groups import group

from headrace.core.kafka import client_options
from headrace.core.lanes import lane_of
from headrace.core.models import create_model, model_id_of
from headrace.core.settings import Settings
from headrace.schemas.codec import encode_json, sampled
from headrace.schemas.envelope import header_text, open_record
from headrace.schemas.events import GroupRejected
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.training import BatchPolicy, ModelSettings, TrainConfig

COUNT = int(os.environ.get("HEADRACE_FUZZ", "2000"))
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "0"))
STEP = 32
Place = tuple[int, int]


async def learners(settings: Settings) -> dict[int, str]:
    """A model on each lane, that trains 32 groups a step."""
    found: dict[int, str] = {}
    names = (f"fuzzed {i}" for i in range(1000))
    while len(found) < settings.topics.partitions:
        name = next(names)
        model_id = model_id_of(settings.account, "tests", name)
        lane = lane_of(model_id, settings.topics.partitions)
        if lane not in found:
            model = ModelSettings(
                base_model="tiny", adaptation="full", batch=BatchPolicy(groups_per_step=STEP), train=TrainConfig(learning_rate=1e-4)
            )
            found[lane] = (await create_model(settings, project="tests", name=name, model=model)).model_id
    return found


async def send(producer: AIOKafkaProducer, topic: str, messages: Iterable[Message]) -> dict[Place, Message]:
    """Send them all; returns them by place."""
    sent = []
    for message in messages:
        delivery = await producer.send(topic, message.value, key=message.key, partition=message.partition, headers=list(message.headers))
        sent.append((delivery, message))
    return {((await delivery).partition, (await delivery).offset): message for delivery, message in sent}


def is_job(message: Message) -> bool:
    try:
        return isinstance(open_record(message.value, header_text(message.headers), (GroupRejected, TrainingJob)), TrainingJob)
    except CodecError:
        return False


def letters_of(topic: str, seen: Following) -> list[tuple[Place, str]]:
    """The dead letters of a topic: place of the record, and why."""
    all_headers = [header_text(letter.headers) for letter in seen.dead_letters]
    return [
        ((int(h["headrace-error-partition"]), int(h["headrace-error-offset"])), f"dead letter: {h['headrace-error-reason']}")
        for h in all_headers
        if h["headrace-error-topic"] == topic
    ]


def fates(topic: str, seen: Following) -> dict[Place, list[str]]:
    """What became of groups, as `read_committed` subscribers see it."""
    found = letters_of(topic, seen)
    for step in seen.of(StepRecord):
        found.extend(((step.lane, offset), "trained") for part in step.offsets for offset in range(part.first, part.last + 1))
    found.extend(((event.partition, event.offset), f"refused: {event.reason}") for event in seen.of(GroupRejected))
    last = {state.model_id: state for state in seen.of(ModelState)}
    lanes = {step.model_id: step.lane for step in seen.of(StepRecord)}
    found.extend(((lanes[state.model_id], p.offset), "waits") for state in last.values() for p in state.pending if state.model_id in lanes)
    by_place: dict[Place, list[str]] = {}
    for place, fate in found:
        by_place.setdefault(place, []).append(fate)
    return by_place


@pytest.mark.slow
async def test_fuzzed_messages_kill_nobody_and_each_is_accounted_for_once(shared: Settings) -> None:
    models = await learners(shared)
    fuzzer = Fuzzer(SEED, models)
    topics = shared.topic_names
    producer = AIOKafkaProducer(**client_options(shared.kafka, "fuzz"))
    await producer.start()
    async with following(shared) as seen:
        ordered = await send(producer, topics.commands, fuzzer.commands(COUNT // 20))
        messages = await send(producer, topics.trajectory_groups, fuzzer.groups(COUNT))
        # What ends it: a full batch of good groups on each lane, whose steps say that all before them was taken in.
        last = await send(
            producer, topics.trajectory_groups, (good(model_id, lane, i) for lane, model_id in models.items() for i in range(STEP))
        )
        for lane, model_id in models.items():
            through = max(offset for partition, offset in last if partition == lane)
            await seen.until_state(
                lambda s, m=model_id, o=through: s.model_id == m and s.scanned > o and sum(p.job_id is None for p in s.pending) < STEP,
                seconds=170,
            )
    await producer.stop()
    found = fates(topics.trajectory_groups, seen)
    jobs = {place for place, message in messages.items() if place not in found and is_job(message)}
    lost = sorted(messages.keys() - found.keys() - jobs)
    twice = {place: found[place] for place in messages if len(found.get(place, [])) > 1}
    counts = Counter(found[place][0].split(":")[0] for place in messages if place in found)
    assert not lost, f"{len(lost)} of {COUNT} have no fate, first {lost[0]}: {messages[lost[0]]}"
    assert not twice, twice
    assert counts.total() + len(jobs) == COUNT
    assert all(counts[fate] > COUNT // 50 for fate in ("trained", "refused", "dead letter")), counts
    letters = Counter(place for place, _ in letters_of(topics.commands, seen) if place in ordered)
    assert letters
    assert max(letters.values()) == 1
    through = {state.lane: state.commands_through for state in seen.of(LaneState)}
    assert all(through[partition] > offset for partition, offset in ordered)
    print(f"{COUNT} messages, seed {SEED}: {dict(counts)}, {len(jobs)} job records; {len(ordered)} commands, {len(letters)} dead letters")  # noqa: T201 - by hand


def good(model_id: str, lane: int, i: int) -> Message:
    value = encode_json(sampled(group(f"last {i}", seed=i)))
    return Message(key=model_id.encode(), value=value, headers=(), partition=lane)
