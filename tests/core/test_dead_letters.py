"""Dead letters against the real broker: seen, sent again exactly once, dropped."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import KafkaTimeoutError

from headrace.consumers.worker.outgoing import dead_letter
from headrace.core import resolving
from headrace.core.dead_letters import DeadLetter, LetterFilter, NoSuchLetterError, Place, get_letter, list_letters, open_letter
from headrace.core.kafka import ClientOptions
from headrace.core.lanes import lane_of
from headrace.core.reading import read_to_end
from headrace.core.resolving import Outcome, resolve
from headrace.core.settings import KafkaSettings, Settings, TopicSettings
from headrace.core.topic_admin import apply, open_admin
from headrace.schemas.dead_letters import DeadLetterResolved, record_bytes
from headrace.schemas.envelope import seal
from headrace.schemas.reasons import CodecError
from headrace.schemas.reasons import DeadLetterReason as Reason

LANES = 2
Headers = tuple[tuple[str, bytes], ...]


@pytest.fixture
async def settings(kafka: str, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = Settings(kafka=KafkaSettings(bootstrap_servers=kafka), topics=TopicSettings(prefix=topic_prefix, partitions=LANES))
    await apply(made)
    monkeypatch.setattr(resolving, "_PAUSE", (0.1, 0.1))
    return made


async def die(
    settings: Settings,
    options: ClientOptions,
    reason: Reason = Reason.NOT_JSON,
    *,
    key: bytes | None = b"model",
    value: bytes | None = b"{not json",
    headers: Headers = (("ce_type", b"headrace.trajectory-group.v1"),),
    partition: int = 0,
    topic: str | None = None,
) -> Place:
    """Write what a lane writes for such a record."""
    record = SimpleNamespace(
        topic=topic or settings.topic_names.trajectory_groups,
        partition=partition,
        offset=41,
        timestamp=1_700_000_000_000,
        key=key,
        value=value,
        headers=headers,
    )
    letter = dead_letter(settings.topic_names, record, CodecError(reason, "a.b", "it is wrong"), partition)
    producer = AIOKafkaProducer(**options)
    await producer.start()
    sent = await producer.send_and_wait(
        letter.topic, letter.value, key=letter.key, partition=letter.partition, headers=list(letter.headers)
    )
    await producer.stop()
    return Place(partition=sent.partition, offset=sent.offset)


async def groups_of(settings: Settings, options: ClientOptions) -> list[ConsumerRecord]:
    return await read_to_end(options, settings.topic_names.trajectory_groups)


async def retry(settings: Settings, *places: Place, by: str = "ada") -> list[Outcome]:
    return await resolve(settings, "retried", places, by=by)


def refusals(outcomes: Sequence[Outcome]) -> list[str]:
    assert all(outcome.resolved is None for outcome in outcomes)
    return [outcome.refused or "" for outcome in outcomes]


async def test_letters_are_listed_with_what_is_wrong_and_filtered(settings: Settings, options: ClientOptions) -> None:
    first = await die(settings, options)
    second = await die(settings, options, Reason.UNKNOWN_MODEL, key=b"other", value=None, partition=1)
    found = await list_letters(settings)
    assert [letter.place for letter in found] == [first, second]
    letter = found[0]
    assert (letter.reason, letter.path, letter.detail, letter.error_type) == ("not_json", "a.b", "it is wrong", "CodecError")
    assert (letter.topic, letter.partition, letter.offset) == (settings.topic_names.trajectory_groups, 0, 41)
    assert letter.sent_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert (letter.headers, letter.size, letter.model) == ((("ce_type", b"headrace.trajectory-group.v1"),), 9, "model")
    assert found[1].size is None
    for wanted, places in [
        (LetterFilter(reason="unknown_model"), [second]),
        (LetterFilter(keys=frozenset({"model"})), [first]),
        (LetterFilter(since=datetime.now(UTC) - timedelta(minutes=5)), [first, second]),
        (LetterFilter(since=letter.written_at + timedelta(milliseconds=1)), [second]),
        (LetterFilter(since=datetime.now(UTC) + timedelta(minutes=5)), []),
    ]:
        assert [found.place for found in await list_letters(settings, wanted)] == places, wanted


@pytest.mark.parametrize("value", [b"{not json\xff", None, b""])
async def test_a_retried_letter_is_the_original_again_where_it_was(settings: Settings, options: ClientOptions, value: bytes | None) -> None:
    headers: Headers = (("ce_type", b"headrace.trajectory-group.v1"), ("headrace-error-value", b"null"), ("x", b"\xff"), ("x", b"2"))
    place = await die(settings, options, headers=headers, value=value, partition=1)
    (outcome,) = await retry(settings, place)
    (record,) = await groups_of(settings, options)
    assert (record.key, record.value, record.headers, record.partition) == (b"model", value, headers, 1)
    assert outcome.resolved is not None
    assert (outcome.resolved.topic, outcome.resolved.new_partition, outcome.resolved.new_offset) == (record.topic, 1, record.offset)
    assert await list_letters(settings) == []
    (letter,) = await list_letters(settings, LetterFilter(resolved=True))
    assert letter.resolved == outcome.resolved
    assert (letter.resolved.action, letter.resolved.by) == ("retried", "ada")


async def test_a_letter_with_a_wrong_partition_goes_to_that_of_its_key(settings: Settings, options: ClientOptions) -> None:
    right = lane_of("model", LANES)
    await retry(settings, await die(settings, options, Reason.WRONG_LANE, partition=1 - right))
    await retry(settings, await die(settings, options, Reason.NOT_JSON, partition=1 - right))
    assert sorted(record.partition for record in await groups_of(settings, options)) == [0, 1]


async def test_a_resolved_letter_is_refused_with_who_did_what_and_where_it_is(settings: Settings, options: ClientOptions) -> None:
    sent, dropped = await die(settings, options), await die(settings, options)
    await retry(settings, sent)
    (outcome,) = await resolve(settings, "dropped", [dropped], by="bob")
    assert outcome.resolved is not None
    assert outcome.resolved.new_offset is None
    (record,) = await groups_of(settings, options)
    again = await retry(settings, sent, dropped) + await resolve(settings, "dropped", [sent], by="bob")
    first, second, third = refusals(again)
    assert first.startswith("it was retried by ada at 20")
    assert first.endswith(f": it is {record.topic} partition 0 offset {record.offset}")
    assert second.startswith("it was dropped by bob at 20")
    assert third == first
    assert len(await groups_of(settings, options)) == 1


async def test_all_that_fit_are_resolved_over_partitions_and_transactions(
    settings: Settings, options: ClientOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolving, "_LETTERS_AT_ONCE", 2)
    places = [await die(settings, options, value=str(i).encode(), partition=i % 2) for i in range(6)]
    other = await die(settings, options, Reason.UNKNOWN_MODEL)
    outcomes = await resolve(settings, "retried", LetterFilter(reason="not_json"), by="ada")
    assert [outcome.place for outcome in outcomes if outcome.resolved] == places
    assert sorted(record.value for record in await groups_of(settings, options)) == [str(i).encode() for i in range(6)]
    assert [letter.place for letter in await list_letters(settings)] == [other]


async def test_two_who_retry_at_once_send_once(settings: Settings, options: ClientOptions) -> None:
    places = [await die(settings, options, value=str(i).encode()) for i in range(3)]
    both = await asyncio.gather(retry(settings, *places, by="ada"), retry(settings, *places, by="bob"))
    assert sorted(record.value for record in await groups_of(settings, options)) == [b"0", b"1", b"2"]
    for outcomes in zip(*both, strict=True):
        assert len([outcome for outcome in outcomes if outcome.resolved]) == 1


async def test_who_was_overtaken_between_reading_and_sending_sends_nothing(
    settings: Settings, options: ClientOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await die(settings, options)
    at_the_door, go_on, really = asyncio.Event(), asyncio.Event(), resolving.open_originals

    async def held(*arguments: Any) -> Any:
        if not at_the_door.is_set():
            at_the_door.set()
            await go_on.wait()
        return await really(*arguments)

    monkeypatch.setattr(resolving, "open_originals", held)
    slow = asyncio.create_task(retry(settings, place, by="slow"))
    await at_the_door.wait()  # it has read that nobody resolved the letter
    (quick,) = await retry(settings, place, by="quick")
    assert quick.resolved is not None
    go_on.set()
    (refused,) = refusals(await slow)
    assert refused.startswith("it was retried by quick")
    assert len(await groups_of(settings, options)) == 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_after_an_unclear_commit_what_happened_is_read(
    settings: Settings, options: ClientOptions, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    place = await die(settings, options)
    really, failed = AIOKafkaProducer.commit_transaction, asyncio.Event()

    async def unclear(producer: AIOKafkaProducer) -> None:
        if failed.is_set():
            return await really(producer)
        failed.set()
        if when == "after":
            await really(producer)
        raise KafkaTimeoutError

    monkeypatch.setattr(AIOKafkaProducer, "commit_transaction", unclear)
    (outcome,) = await retry(settings, place)
    (record,) = await groups_of(settings, options)
    assert failed.is_set()
    assert outcome.resolved is not None
    assert outcome.resolved.new_offset == record.offset
    (letter,) = await list_letters(settings, LetterFilter(resolved=True))
    assert letter.resolved == outcome.resolved


async def test_what_can_not_be_sent_again_says_why_and_can_be_dropped(settings: Settings, options: ClientOptions) -> None:
    places = [
        await die(settings, options, Reason.UNREADABLE_HEADERS, key=None, value=None, headers=()),
        await die(settings, options, Reason.MISSING_KEY, key=None, value=None),
        await die(settings, options, Reason.WRONG_LANE, key=b"\xff"),
        await die(settings, options, topic="other.trajectory-groups"),
        await die(settings, options, topic=settings.topic_names.models),
    ]
    moved = await die(settings, options, partition=1)
    bytes_gone, nothing, no_key, other, models = refusals(await retry(settings, *places))
    assert f"the record stays at {settings.topic_names.trajectory_groups} partition 0 offset 41 until retention takes it" in bytes_gone
    assert "neither key nor value" in nothing
    assert "no key says which is right" in no_key
    assert f"no topic of this prefix ({settings.topics.prefix}) that a worker reads" in other
    assert "no topic of this prefix" in models
    assert await groups_of(settings, options) == []
    assert all(outcome.resolved for outcome in await resolve(settings, "dropped", places, by="ada"))
    assert [letter.place for letter in await list_letters(settings)] == [moved]


async def test_a_place_without_a_letter_is_said(settings: Settings, options: ClientOptions) -> None:
    place = await die(settings, options)
    (done,) = await resolve(settings, "dropped", [place], by="ada")
    assert done.resolved is not None
    mark = Place(partition=0, offset=place.offset + 1)  # the record that says so
    far, beyond = Place(partition=99, offset=0), Place(partition=0, offset=1000)
    at_mark, at_far, at_beyond = refusals(await retry(settings, mark, far, beyond))
    assert at_far == f"there is no partition 99: {settings.topic_names.dead_letters} has partitions 0 to 1"
    assert at_beyond.startswith("no dead letter stands at 0:1000")
    assert at_mark.startswith(f"no dead letter stands at {mark}")
    for missing in (mark, far, beyond):
        with pytest.raises(NoSuchLetterError):
            await get_letter(settings, missing)
    letter, original = await get_letter(settings, place)
    assert letter.resolved == done.resolved
    assert original.value == b"{not json"


async def test_letters_that_retention_took_are_no_more_and_hide_no_others(settings: Settings, options: ClientOptions) -> None:
    gone, left = await die(settings, options), await die(settings, options)
    async with open_admin(options) as admin:
        where = TopicPartition(settings.topic_names.dead_letters, 0)
        await admin.delete_records({where: RecordsToDelete(before_offset=left.offset)})
    first, second = await retry(settings, gone, left)
    assert "no dead letter stands at" in (first.refused or "")
    assert second.resolved is not None


async def test_a_letter_whose_sender_called_it_a_resolution_is_a_letter(settings: Settings, options: ClientOptions) -> None:
    """Whoever can write groups can't make letters vanish."""
    hidden = await die(settings, options)
    said = DeadLetterResolved(partition=hidden.partition, offset=hidden.offset, action="dropped", by="mallory", attempt="a")
    value, headers = seal(said, source="test")
    forged = await die(settings, options, Reason.UNKNOWN_TYPE, value=value, headers=tuple(headers))
    assert [letter.place for letter in await list_letters(settings)] == [hidden, forged]


async def test_a_time_that_no_calendar_has_does_not_end_the_listing() -> None:
    headers = (("headrace-error-reason", b"not_json"), ("headrace-error-time", str(2**62).encode()), ("headrace-error-offset", b"x"))
    letter = open_letter(SimpleNamespace(partition=0, offset=1, key=b"k", value=b"v", headers=headers, timestamp=0))
    assert isinstance(letter, DeadLetter)
    assert (letter.sent_at, letter.offset) == (None, -1)


@pytest.mark.parametrize("text", ["", "3", "3:", ":4", "a:4", "3:-4", "3:4:5", "1:99999999999999999999"])
def test_a_text_that_is_no_place_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(NoSuchLetterError, match="write PARTITION:OFFSET"):
        Place.parse(text)
    assert str(Place.parse(" 3:17 ")) == "3:17"


async def send_large(settings: Settings, options: ClientOptions, value: bytes) -> Place:
    """A record that is larger than a letter, and its letter."""
    topic = settings.topic_names.trajectory_groups
    headers: list[tuple[str, bytes]] = [("x", b"1"), ("large", bytes(20_000))]
    async with AIOKafkaProducer(**options, compression_type="zstd", max_request_size=64 << 20) as producer:
        await producer.send_and_wait(topic, b"before", key=b"model", partition=1)
        await producer.send_and_wait(topic, value, key=b"model", partition=1, headers=headers)
    record = (await groups_of(settings, options))[-1]
    letter = dead_letter(settings.topic_names, record, CodecError(Reason.NOT_JSON, "", "no JSON"), 1)
    assert record_bytes(letter.key, letter.value, letter.headers) < 100_000
    async with AIOKafkaProducer(**options) as producer:
        sent = await producer.send_and_wait(
            letter.topic, letter.value, key=letter.key, partition=letter.partition, headers=list(letter.headers)
        )
    return Place(partition=sent.partition, offset=sent.offset)


async def test_a_letter_of_a_large_record_says_what_it_is_and_its_retry_is_the_whole_record(
    settings: Settings, options: ClientOptions
) -> None:
    value = b"first bytes" + bytes(17_000_000)
    place = await send_large(settings, options, value)
    letter, original = await get_letter(settings, place)
    assert letter.cut is not None
    assert (letter.size, letter.cut.key_bytes, letter.cut.headers, letter.headers) == (len(value), 5, 2, (("x", b"1"),))
    assert original.value == value[: len(original.value or b"")]
    assert (letter.topic, letter.partition, letter.offset) == (settings.topic_names.trajectory_groups, 1, 1)
    (outcome,) = await retry(settings, place)
    assert outcome.resolved is not None
    records = await groups_of(settings, options)
    assert (records[-1].offset, records[-1].value, records[-1].headers) == (outcome.resolved.new_offset, value, records[1].headers)


@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "another record"])
async def test_a_large_record_that_is_not_there_any_more_is_not_retried_and_can_be_dropped(
    settings: Settings, options: ClientOptions, gone: bool
) -> None:
    place, fine = await send_large(settings, options, b"x" * 2_000_000), await die(settings, options, partition=1)
    topic = settings.topic_names.trajectory_groups
    if gone:
        async with open_admin(options) as admin:
            await admin.delete_records({TopicPartition(topic, 1): RecordsToDelete(before_offset=2)})
    else:
        async with AIOKafkaProducer(**options) as producer:
            other = SimpleNamespace(topic=topic, partition=1, offset=0, timestamp=-1, key=b"model", value=b"x" * 2_000_000, headers=())
            letter = dead_letter(settings.topic_names, other, CodecError(Reason.NOT_JSON, "", "no JSON"), 1)
            sent = await producer.send_and_wait(letter.topic, letter.value, key=letter.key, partition=1, headers=list(letter.headers))
            place = Place(partition=1, offset=sent.offset)
    refused, sent_again = await retry(settings, place, fine)
    assert "only the beginning of the record" in (refused.refused or "")
    assert ("is not there any more" if gone else "another record is there now") in (refused.refused or "")
    assert sent_again.resolved is not None
    (dropped,) = await resolve(settings, "dropped", [place], by="ada")
    assert dropped.resolved is not None


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (bytes(1_500_001), None, ()),
        (b"k", bytes(1_500_000), ()),
        (b"k", b"v", (("h", bytes(1_500_000)),)),
        (b"k", b"v", tuple(("", None) for _ in range(200_000))),
        (None, b"v", (("é" * 800_000, None),)),
        (bytes(1_499_000), None, ()),
    ],
)
async def test_a_letter_always_fits_whatever_its_record_holds(
    settings: Settings, options: ClientOptions, key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes | None], ...]
) -> None:
    where = {"topic": settings.topic_names.trajectory_groups, "partition": 0, "offset": 7, "timestamp": 2**62}
    error = CodecError(Reason.INVALID_SCHEMA, "é" * 5000, "\ud800" * 5000)
    letter = dead_letter(settings.topic_names, SimpleNamespace(**where, key=key, value=value, headers=headers), error, 0)
    async with AIOKafkaProducer(**options, max_request_size=16 << 20) as producer:
        await producer.send_and_wait(letter.topic, letter.value, key=letter.key, partition=0, headers=list(letter.headers))
    (found,) = await list_letters(settings)
    assert (found.offset, found.size) == (7, None if value is None else len(value))
    assert (found.cut is None) == (key == bytes(1_499_000))
