"""Trajectory groups into the log, from an agent runtime that has an event loop.

    async with TrajectoryProducer(bootstrap_servers="localhost:9092", model_id=model) as producer:
        report = await producer.send(group)           # waits for the acknowledgement
        delivery = await producer.submit(group)       # waits for room in the buffer only; await delivery later
        delivery = producer.try_send(group)           # waits for nothing; BufferFullError if there is no room

Guarantees: a group is refused with the path of the field before anything is sent, or ends in a `DeliveryReport`, or in a `DeliveryError`
that says whether it may be in the log. Nothing is sent twice. Groups of a model stand in the log in the order in which they got their room
in the buffer. Leaving the block, and SIGTERM, flush what is buffered. A cancelled `send` is unknown: what was buffered is delivered all the
same. Failures that no one awaits are logged; while Kafka is away, they are counted in its warnings. Limitations: persistence; what is
buffered when the process is killed is gone. Bytes wait in memory up to `producer.buffer_bytes`.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from headrace.core.errors import HeadraceError
from headrace.core.kafka import KafkaUnavailableError
from headrace.core.kafka_outage import log_trouble
from headrace.core.model_names import known_model_id
from headrace.core.reading import ReadStalledError
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, open_store
from headrace.producers.buffer import ByteBuffer
from headrace.producers.door import check_id, encode
from headrace.producers.errors import BufferFullError, DeliveryError, InvalidGroupError, ProducerClosedError
from headrace.producers.link import BATCH_BYTES, KafkaLink
from headrace.producers.outgoing import DeliveryReport, Group, Outgoing, keep_last_turns, mark_with_job
from headrace.producers.signals import termination
from headrace.schemas.envelope import seal
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError
from headrace.schemas.training import SftConfig, TrainConfig

_log = logging.getLogger(__name__)

Delivery = asyncio.Task[DeliveryReport]


class TrajectoryProducer:
    """Sends groups and training jobs to the `trajectory-groups` topic. For one event loop.

    Args:
        settings: All settings; from the environment unless given.
        bootstrap_servers: `host:port,…`, instead of the settings' own.
        model_id: The model that groups train, unless a call names another: its id, or its name, as `name`, `project/name` or
            `account/project/name`. A name without an account means one of `settings.account`.
        source: `ce_source` of the records: which runtime sent them.
        flush_on_sigterm: None: flush on SIGTERM if the process has no handler of its own; True: also in front of one, which gets
            the signal afterwards; False: never. A host with a handler of its own calls `flush` in it.

    Raises:
        HeadraceError: the settings are those of a shadow, which trains on another worker group's topic.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        bootstrap_servers: str | None = None,
        model_id: str | None = None,
        source: str = "headrace-producer",
        flush_on_sigterm: bool | None = None,
    ) -> None:
        settings = settings or Settings()
        if settings.worker.shadow_prefix is not None:
            raise HeadraceError(
                f"worker.shadow_prefix is set: these settings are of a worker group that shadows, and no one reads "
                f"{settings.topic_names.trajectory_groups}. Send groups with the settings of the group that is shadowed "
                f"(topics.prefix {settings.worker.shadow_prefix!r}); its shadows read them too"
            )
        if bootstrap_servers is not None:
            kafka = settings.kafka.model_copy(update={"bootstrap_servers": bootstrap_servers})
            settings = settings.model_copy(update={"kafka": kafka})
        self._settings = settings
        self._model_id = None if model_id is None else check_id("model_id", model_id)
        self._source = source
        self._flush_on_sigterm = flush_on_sigterm
        self._buffer = ByteBuffer(settings.producer.buffer_bytes)
        self._link = KafkaLink(settings, settings.topic_names.trajectory_groups, f"headrace-producer-{uuid.uuid4().hex[:8]}")
        self._store: ObjectStore | None = None
        self._open = False
        self._submitted = 0
        """Bytes since `submit` last let the loop run."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Deliveries and jobs under way; asyncio itself holds tasks weakly."""
        self._ids: dict[str, str] = {}
        """Ids of models that were looked up, by what they were called."""
        self._looking_up = asyncio.Lock()
        self._last: dict[str, asyncio.Event] = {}
        """By model: set when the newest buffered record has its place in the log's order."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect, and look up the producer's model.

        Raises:
            KafkaUnavailableError: no Kafka, no login, or no topic (run `headrace topics apply`).
            UnknownModelError: there is no such model, or several have the name.
        """
        await self._link.start()
        if self._model_id is not None:
            try:
                await self._resolve(self._model_id)
            except BaseException:
                await self._link.close()
                raise
        self._loop = asyncio.get_running_loop()
        self._open = True
        if self._flush_on_sigterm is not False:
            termination.add(self._flush_from_anywhere, replace=self._flush_on_sigterm is True)

    async def close(self) -> None:
        """Take no more, flush, disconnect."""
        termination.remove(self._flush_from_anywhere)
        self._open = False
        try:
            await self.flush()
        finally:
            await self._link.close()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for their acknowledgement, against `producer.buffer_bytes`."""
        return self._buffer.used

    async def flush(self) -> None:
        """Wait until everything that is buffered now was acknowledged or has failed; failures are with their deliveries."""
        if self._tasks:
            await asyncio.wait([*self._tasks])

    async def send(self, group: Group, model_id: str | None = None, *, traceparent: str | None = None) -> DeliveryReport:
        """Send a group and wait until all in-sync replicas have it.

        A group without `group_id` gets one. Cancelling leaves the outcome unknown once the group is buffered.

        Args:
            group: What to train on.
            model_id: Which model; the producer's own unless given.
            traceparent: W3C trace context to hand on.

        Raises:
            InvalidGroupError: the group is not valid; nothing was sent.
            UnknownModelError: there is no such model; nothing was sent.
            DeliveryError: it was not acknowledged.
            ProducerClosedError: not started, or closed.
        """
        return await asyncio.shield(await self.submit(group, model_id, traceparent=traceparent))

    async def submit(self, group: Group, model_id: str | None = None, *, traceparent: str | None = None) -> Delivery:
        """Buffer a group, waiting for room, and return its delivery: a task to await later, or not at all.

        Raises:
            InvalidGroupError: the group is not valid; nothing was sent.
            UnknownModelError: there is no such model; nothing was sent.
            ProducerClosedError: not started, or closed.
        """
        outgoing = self._admit(group, model_id, traceparent)
        if outgoing.model_id not in self._ids:
            await self._look_up(outgoing)
        outgoing.model_id = self._ids[outgoing.model_id]
        await self._buffer.take(outgoing.held)
        try:
            if outgoing.is_large:
                await asyncio.to_thread(self._encode, outgoing)
            else:
                self._encode(outgoing)
            self._fit(outgoing)
            self._require_open()
        except BaseException:
            self._buffer.give_back(outgoing.held)
            raise
        delivery = self._start_delivery(outgoing)
        # A caller that submits in a loop would otherwise never let the sender run while there is room: so every batch's worth yields.
        self._submitted += outgoing.held
        if self._submitted >= BATCH_BYTES:
            self._submitted = 0
            await asyncio.sleep(0)
        return delivery

    def try_send(self, group: Group, model_id: str | None = None, *, traceparent: str | None = None) -> Delivery:
        """Buffer a group if there is room now, and return its delivery. Never waits; a large group is encoded by its delivery, which also
        looks up a model that the producer has not sent to before: the delivery then raises the `UnknownModelError`.

        Raises:
            BufferFullError: no room; nothing was sent.
            InvalidGroupError: the group is not valid; nothing was sent (for a large group the delivery may say so).
            ProducerClosedError: not started, or closed.
        """
        outgoing = self._admit(group, model_id, traceparent)
        outgoing.model_id = self._ids.get(outgoing.model_id, outgoing.model_id)
        if not self._buffer.try_take(outgoing.held):
            raise BufferFullError(
                f"no room for about {outgoing.held} bytes: {self._buffer.used} of {self._settings.producer.buffer_bytes} wait"
            )
        if not outgoing.is_large:
            try:
                self._encode(outgoing)
            except BaseException:
                self._buffer.give_back(outgoing.held)
                raise
            self._fit(outgoing)
        return self._start_delivery(outgoing)

    async def submit_job(
        self,
        groups: Sequence[Group],
        config: TrainConfig | None = None,
        job_id: str | None = None,
        model_id: str | None = None,
        *,
        sft: SftConfig | None = None,
        kind: Literal["rl", "sft"] | None = None,
    ) -> str:
        """Ask for one step on these groups: the groups, marked with the job's id, then the job's record behind them.

        All groups are checked before the first is sent. Sending a job again with the same id and objects is safe: the lane drops repeats.

        Args:
            groups: At least one; their `job_id` is set, and their `purpose` where they are examples.
            config: The step's options; the model's own where null.
            job_id: A UUID4 unless given.
            model_id: Which model; the producer's own unless given.
            sft: Epochs, batches and rate of an `sft` job; its defaults where null.
            kind: `rl`: the groups are rollouts, compared by reward; `sft`: their trajectories are examples to imitate. Unless given: `sft`
                where `sft` is given, else `rl`.

        Returns:
            The job id.

        Raises:
            InvalidGroupError: a group is not valid, the path begins with `groups[i]`, or the options are of another kind of job; nothing
                was sent.
            UnknownModelError: there is no such model; nothing was sent.
            DeliveryError: something was not acknowledged; the job does not run until it is sent again.
        """
        self._require_open()
        job_id = check_id("job_id", str(uuid.uuid4()) if job_id is None else job_id)
        wanted = check_id("model_id", model_id or self._model_id)
        kind = kind or ("rl" if sft is None else "sft")
        if kind == "rl" and sft is not None:
            raise InvalidGroupError("sft", "given, but kind is 'rl': leave one of them out")
        if kind == "sft" and config is not None and config.learning_rate is not None:
            raise InvalidGroupError("config.learning_rate", "the rate of an 'sft' job is sft.learning_rate: give only that")
        key = await self._resolve(wanted)
        waiting = list(groups)
        without_logprobs = None if config is None else config.allow_training_without_logprobs
        if sft is not None and sft.assistant_turns == "last":
            keep_last_turns(waiting)
        group_ids = mark_with_job(waiting, job_id, kind, without_logprobs=without_logprobs)
        job = TrainingJob(job_id=job_id, group_ids=group_ids, kind=kind, config=config, sft=sft)
        for i, group in enumerate(waiting):
            # Encoded once only to be checked: half a job in the log, and an error, would be worse than the time.
            try:
                await asyncio.to_thread(encode, group, self._settings.producer.encoding)
            except InvalidGroupError as error:
                raise error.inside(f"groups[{i}]") from None
        deliveries = [await self.submit(group, key) for group in waiting]
        finished = asyncio.create_task(self._finish_job(job, key, deliveries), name=f"job {job_id}")
        self._remember(finished)
        return await asyncio.shield(finished)

    async def _finish_job(self, job: TrainingJob, key: str, deliveries: list[Delivery]) -> str:
        # The record asks for a step on what stands before it: so it goes when all groups are there.
        await asyncio.gather(*deliveries)
        try:
            value, headers = seal(job, source=self._source, event_id=job.job_id)
        except CodecError as error:
            raise InvalidGroupError(f"config.{error.path}", error.detail) from None
        await self._link.write(job.job_id, key.encode(), value, headers, handed_over=lambda: None)
        return job.job_id

    def _require_open(self) -> None:
        if not self._open:
            raise ProducerClosedError("the producer is not started, or closed: use it inside `async with`")

    def _admit(self, group: Group, model_id: str | None, traceparent: str | None) -> Outgoing:
        self._require_open()
        return Outgoing.admitted(group, model_id or self._model_id, traceparent)

    async def _resolve(self, wanted: str) -> str:
        """The id of a model; the log is read once for each name."""
        async with self._looking_up:
            if wanted not in self._ids:
                with self._link.folding():
                    found = await known_model_id(self._settings, wanted)
                self._ids[wanted] = self._ids[found] = found
        return self._ids[wanted]

    async def _look_up(self, outgoing: Outgoing) -> None:
        try:
            await self._resolve(outgoing.model_id)
        except (KafkaUnavailableError, ReadStalledError) as error:
            raise DeliveryError(outgoing.group_id, f"its model can't be looked up: {error}", unknown=False) from error

    def _encode(self, outgoing: Outgoing) -> None:
        outgoing.encode(self._settings.producer.encoding)

    def _fit(self, outgoing: Outgoing) -> None:
        """The estimate becomes the size."""
        self._buffer.give_back(outgoing.held - len(outgoing.body))
        outgoing.held = len(outgoing.body)

    def _start_delivery(self, outgoing: Outgoing) -> Delivery:
        before = self._last.get(outgoing.model_id)
        placed = self._last[outgoing.model_id] = asyncio.Event()
        task = asyncio.create_task(self._deliver(outgoing, before, placed), name=f"deliver {outgoing.group_id}")
        self._remember(task)
        return task

    def _remember(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            with self._link.folding():
                log_trouble(_log, logging.ERROR, error, "%s", error)

    async def _deliver(self, outgoing: Outgoing, before: asyncio.Event | None, placed: asyncio.Event) -> DeliveryReport:
        try:
            if not outgoing.body:
                await asyncio.to_thread(self._encode, outgoing)
                self._fit(outgoing)
            claimed = len(outgoing.body) > self._settings.producer.inline_limit_bytes
            if claimed:
                value, headers = await asyncio.to_thread(self._claim, outgoing)
            else:
                value, headers = outgoing.inline(self._source)
            if outgoing.model_id not in self._ids:
                await self._look_up(outgoing)
            key = self._ids[outgoing.model_id].encode()
            if before is not None:
                await before.wait()
            position = await self._link.write(outgoing.group_id, key, value, headers, placed.set)
            return DeliveryReport(
                topic=position.topic,
                partition=position.partition,
                offset=position.offset,
                group_id=outgoing.group_id,
                claimed=claimed,
                size=len(outgoing.body),
            )
        finally:
            self._buffer.give_back(outgoing.held)
            placed.set()
            if self._last.get(outgoing.model_id) is placed:
                del self._last[outgoing.model_id]

    def _claim(self, outgoing: Outgoing) -> tuple[bytes, list[tuple[str, bytes]]]:
        # Two threads may both open it: a store holds nothing that could be lost.
        if self._store is None:
            self._store = open_store(self._settings.store.url, self._settings.s3)
        return outgoing.claimed(self._source, self._store)

    def _flush_from_anywhere(self) -> "Future[None]":
        loop = self._loop
        if loop is None or loop.is_closed():
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return asyncio.run_coroutine_threadsafe(self.flush(), loop)
