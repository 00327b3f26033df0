"""Decoding and tokenizing, in a process of its own: nothing that a record holds can stall or kill the event loop.

Plain groups, which need no tokenizer, are read here (`plain_groups.py`): to hand them over and back costs more than to read them.
Guarantees: one answer for each request, in order; bytes that crash the process, or need more time or memory than a bound, cost that
process at most and are refused alone, the records around them are admitted; the loop gets its turn every few milliseconds. Limitations:
parallelism beyond one process; admission keeps the log's order.
"""

import asyncio
import ctypes
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import orjson

from headrace.consumers.worker.admission.messages import NOTED_BYTES, AdmissionRequest, AdmissionResult, Admitted, Noted, Refused
from headrace.consumers.worker.admission.plain_groups import admit_plain, plain_size
from headrace.consumers.worker.admission.shared_values import HandedBack, HandedOver, Shared, SharedValues
from headrace.core.errors import HeadraceError, OutageError
from headrace.core.processes import bound_memory, die_with
from headrace.core.settings import Settings
from headrace.schemas.reasons import RejectionReason
from headrace.trainer.lengths import BaseLimits
from headrace.trainer.plan import BaseSource

RECORD_SECONDS = 120.0
"""Processor time of one record, many times what the largest takes. What Python can stop has a bound of its own (`template_bound.py`)."""

_MEMORY_SHARE = 0.5
"""Of the machine's memory, which the process takes at most: of a few bytes of a record can come a thousand times as many of objects."""
_SLICE_SECONDS = 0.004
"""Plain groups are read so long before the loop gets its turn."""


class AdmissionPool:
    """The tokenizing process.

    Args:
        settings: Where payloads are.
        record_seconds: Processor time of one record, after which it is refused.
    """

    def __init__(self, settings: Settings, record_seconds: float = RECORD_SECONDS) -> None:
        self._settings = settings
        self._record_seconds = record_seconds
        # Not the executor's: it outlives the process that writes into it.
        self._noted: Noted = multiprocessing.get_context("spawn").RawArray(ctypes.c_char, NOTED_BYTES)
        self._values = SharedValues()
        self._reading: Future[HandedBack] | None = None
        """What reads the shared values."""
        self._executor = self._start()
        self._limits: dict[BaseSource, BaseLimits] = {}
        """Of the base models, as the process read them."""
        self._lock = asyncio.Lock()

    def _start(self) -> ProcessPoolExecutor:
        # spawn: the parent runs an event loop and gRPC-like threads, which a fork would copy in the middle of something.
        context = multiprocessing.get_context("spawn")
        told = (self._settings, os.getpid(), self._record_seconds, self._noted, self._values.memory)
        executor = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_prepare, initargs=told)
        # Starts the process now: its imports overlap with the worker's own start. From this thread, with which it would end.
        executor.submit(int)
        return executor

    async def admit(self, requests: Sequence[AdmissionRequest]) -> list[AdmissionResult]:
        """Answers in the order of the requests.

        Raises:
            OutageError: the object store can't be used, or the process does not start; nothing was decided, ask again.
        """
        async with self._lock:
            answers = await self._plain(requests)
            left = [request for request, answer in zip(requests, answers, strict=True) if answer is None]
            others = iter(await self._by_process(left) if left else ())
            return [next(others) if answer is None else answer for answer in answers]

    async def _plain(self, requests: Sequence[AdmissionRequest]) -> list[Admitted | None]:
        """The groups that are plain; None for each other record."""
        answers: list[Admitted | None] = []
        began = time.perf_counter()
        for request in requests:
            limits = await self._limits_of(request.base) if request.base is not None and plain_size(request) else None
            answers.append(None if limits is None else admit_plain(request, limits))
            if time.perf_counter() - began > _SLICE_SECONDS:
                await asyncio.sleep(0)
                began = time.perf_counter()
        return answers

    async def _limits_of(self, base: BaseSource) -> BaseLimits | None:
        """What the base model can read; None where its folder can't be read, which the process says better."""
        if base not in self._limits:
            try:
                self._limits[base] = await asyncio.get_running_loop().run_in_executor(self._executor, _base_limits, base)
            except BrokenProcessPool:
                self._restart()
                return None
            except HeadraceError:
                return None
        return self._limits[base]

    async def _by_process(self, requests: Sequence[AdmissionRequest]) -> list[AdmissionResult]:
        try:
            return await self._run(requests)
        except BrokenProcessPool:
            self._restart()
        return [await self._alone(request) for request in requests]

    async def _run(self, requests: Sequence[AdmissionRequest]) -> list[AdmissionResult]:
        answers: list[AdmissionResult] = []
        while len(answers) < len(requests):
            if self._reading is not None and not self._reading.done():  # who asked for it has gone away
                await asyncio.wait([asyncio.wrap_future(self._reading)])
            handed = self._values.hand_over(requests[len(answers) :])
            self._reading = self._executor.submit(_admit_all, handed)
            answered: HandedBack = await asyncio.wrap_future(self._reading)
            answers += answered.restored(self._values.memory)
        return answers

    async def _alone(self, request: AdmissionRequest) -> AdmissionResult:
        self._noted.value = b""
        try:
            return (await self._run([request]))[0]
        except BrokenProcessPool:
            began = bool(self._noted.value)
            group_id, job_id = self._at_work(request)
            self._restart()
            if not began:  # a library that can't be imported, a machine without memory: no record is to blame
                raise OutageError("the process that reads and tokenizes groups ends before it reads one: its log says why") from None
            return Refused(
                group_id=group_id,
                job_id=job_id,
                reason=RejectionReason.TOKENIZATION_FAILED,
                detail="the process that reads and tokenizes groups died on this record: it crashed, or took too much time",
            )

    def _at_work(self, request: AdmissionRequest) -> tuple[str, str | None]:
        """Ids of the record that the process died of, as far as it had read them: a job must not wait for a group that is refused."""
        match orjson.loads(self._noted.value or b"null"):
            case [str(group_id), str() | None as job_id]:
                return group_id, job_id
            case _:
                return request.fallback_id, None

    def _restart(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._limits.clear()
        self._executor = self._start()

    def close(self) -> None:
        """End the process."""
        for process in list((self._executor._processes or {}).values()):
            process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)


# The tokenizer (transformers: seconds) is imported in the process that uses it, and nowhere else.
def _prepare(settings: Settings, parent: int, record_seconds: float, noted: Noted, shared: Shared) -> None:
    die_with(parent)
    bound_memory(_MEMORY_SHARE)
    from headrace.consumers.worker.admission.admit import prepare  # noqa: PLC0415 - as said above

    prepare(settings, record_seconds, noted, shared)


def _admit_all(handed: HandedOver) -> HandedBack:
    from headrace.consumers.worker.admission.admit import admit_all  # noqa: PLC0415 - as said above

    return admit_all(handed)


def _base_limits(base: BaseSource) -> BaseLimits:
    from headrace.consumers.worker.admission.admit import limits_of  # noqa: PLC0415 - as said above

    return limits_of(base)
