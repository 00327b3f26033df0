"""Decoding and tokenizing, in a process of its own: nothing that a record holds can stall or kill the event loop.

Guarantees: one answer for each request, in order; bytes that crash the process, or keep it busy beyond a bound, cost that process and are
refused alone, the records around them are admitted. Gives up: parallelism beyond one process; admission keeps the log's order.
"""

import asyncio
import ctypes
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import orjson

from headrace.consumers.admission import NOTED_BYTES, AdmissionRequest, AdmissionResult, Noted, Refused
from headrace.core.processes import die_with
from headrace.core.settings import Settings
from headrace.schemas.reasons import RejectionReason

RECORD_SECONDS = 120.0
"""Processor time of one record, many times what the largest takes. What Python can stop has a bound of its own (`template_bound.py`)."""


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
        self._executor = self._start()
        self._lock = asyncio.Lock()

    def _start(self) -> ProcessPoolExecutor:
        # spawn: the parent runs an event loop and gRPC-like threads, which a fork would copy in the middle of something.
        context = multiprocessing.get_context("spawn")
        told = (self._settings, os.getpid(), self._record_seconds, self._noted)
        executor = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_prepare, initargs=told)
        # Starts the process now: its imports overlap with the worker's own start. From this thread, with which it would end.
        executor.submit(int)
        return executor

    async def admit(self, requests: Sequence[AdmissionRequest]) -> list[AdmissionResult]:
        """Answers in the order of the requests.

        Raises:
            HeadraceError: the object store can't be reached; nothing was decided, ask again.
        """
        if not requests:
            return []
        async with self._lock:
            try:
                return await self._run(requests)
            except BrokenProcessPool:
                self._restart()
            return [await self._alone(request) for request in requests]

    async def _run(self, requests: Sequence[AdmissionRequest]) -> list[AdmissionResult]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, _admit_all, list(requests))

    async def _alone(self, request: AdmissionRequest) -> AdmissionResult:
        try:
            return (await self._run([request]))[0]
        except BrokenProcessPool:
            group_id, job_id = self._at_work(request)
            self._restart()
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
        self._executor = self._start()

    def close(self) -> None:
        """End the process."""
        for process in list((self._executor._processes or {}).values()):
            process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)


# The tokenizer (transformers: seconds) is imported in the process that uses it, and nowhere else.
def _prepare(settings: Settings, parent: int, record_seconds: float, noted: Noted) -> None:
    die_with(parent)
    from headrace.consumers.admitting import prepare  # noqa: PLC0415 - as said above

    prepare(settings, record_seconds, noted)


def _admit_all(requests: list[AdmissionRequest]) -> list[AdmissionResult]:
    from headrace.consumers.admitting import admit_all  # noqa: PLC0415 - as said above

    return admit_all(requests)
