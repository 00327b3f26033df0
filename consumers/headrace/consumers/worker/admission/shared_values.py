"""Large values of records on their way to the tokenizing process, and arrays on their way back, in memory that both processes see.

A group in JSON is 1.5 MB, and to send that through a pipe takes longer than to decode it: it is packed, written and read in pieces of
64 KB, with a turn of both processes for each, and unpacked. Its arrays are another 150 KB.

Guarantees: what is handed over is what the records hold, in order, and what comes back is what was answered; what is small, or larger than
the memory, goes through the pipe. Limitations: more than one batch at a time; who fills the memory knows that no one reads it.
"""

import ctypes
import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.consumers.worker.admission.messages import AdmissionRequest, AdmissionResult

SHARED_BYTES = 16 << 20
_LEAST = 1 << 16

Shared = ctypes.Array[ctypes.c_char]
Place = tuple[int, int]
"""Where a value begins and ends in the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Requests whose large values are in the memory."""

    requests: list[AdmissionRequest]
    places: list[Place | None]
    """Of each request's value; None: it is in the request."""

    def restored(self, shared: Shared) -> list[AdmissionRequest]:
        """The requests as they were, with views of the memory for values."""
        view = memoryview(shared).cast("B").toreadonly()
        return [
            request if place is None else replace(request, value=view[slice(*place)])
            for request, place in zip(self.requests, self.places, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedBack:
    """Answers whose arrays are in the memory."""

    pickled: bytes
    places: list[Place]
    """Of the buffers that the pickle leaves out."""

    def restored(self, shared: Shared) -> list[AdmissionResult]:
        """The answers, with memory of their own for each array: one that waits for long keeps no other."""
        view = memoryview(shared).cast("B")
        buffers = [bytearray(view[slice(*place)]) for place in self.places]
        answers: list[AdmissionResult] = pickle.loads(self.pickled, buffers=buffers)  # noqa: S301 - written by our own process
        return answers


def hand_back(answers: list[AdmissionResult], shared: Shared | None) -> HandedBack:
    """Answer a batch. Its requests are answered: no one reads their values any more."""
    buffers: list[memoryview] = []
    pickled = pickle.dumps(answers, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    if shared is None or sum(map(len, buffers)) > len(shared):
        return HandedBack(pickled=pickle.dumps(answers, protocol=5), places=[])
    view = memoryview(shared).cast("B")
    places = []
    at = 0
    for buffer in buffers:
        view[at : at + len(buffer)] = buffer
        places.append((at, at + len(buffer)))
        at += len(buffer)
    return HandedBack(pickled=pickled, places=places)


class SharedValues:
    """The memory, as seen by the process that fills it."""

    def __init__(self) -> None:
        # Without a lock, which a dead process would keep; it outlives the process that reads.
        self.memory: Shared = multiprocessing.get_context("spawn").RawArray(ctypes.c_char, SHARED_BYTES)
        self._view = memoryview(self.memory).cast("B")

    def hand_over(self, requests: Sequence[AdmissionRequest]) -> HandedOver:
        """The first of these requests, at least one: as many as the memory holds."""
        handed: list[AdmissionRequest] = []
        places: list[Place | None] = []
        at = 0
        for request in requests:
            size = 0 if request.value is None else len(request.value)
            if request.value is None or not _LEAST <= size <= SHARED_BYTES:
                handed.append(request)
                places.append(None)
                continue
            if at + size > SHARED_BYTES:
                break
            self._view[at : at + size] = request.value
            handed.append(replace(request, value=None))
            places.append((at, at + size))
            at += size
        return HandedOver(requests=handed, places=places)
