"""From a record's bytes to a tokenized group, or to the reason why not. Runs in the tokenizing process.

Guarantees: whatever the bytes are, the answer is `Admitted`, `Refused` (it could be read) or `Unreadable` (it could not); only an
outage (`core.outages`), which says nothing of the record, raises. A group whose base model can't be used is answered with what is wrong
there. A record that uses up its processor time ends the process, and is refused by the pool. Limitations: what needs the lane's order:
duplicates, jobs and policy versions are judged by the lane.
"""

import gc
import os
import signal
import sys
from dataclasses import dataclass
from functools import cache

import orjson

from headrace.consumers.worker.admission.messages import (
    NOTED_BYTES,
    AdmissionRequest,
    AdmissionResult,
    Admitted,
    Noted,
    NotTokenized,
    Refused,
    Unreadable,
)
from headrace.consumers.worker.admission.shared_values import HandedBack, HandedOver, Shared, hand_back
from headrace.core.errors import HeadraceError, OutageError
from headrace.core.hosted_entries import decode_hosted
from headrace.core.importing import importing, keep_memory
from headrace.core.outages import outage_of, said
from headrace.core.payloads import PayloadDigestError, PayloadMissingError, PayloadUnreadableError, redeem
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, open_store
from headrace.schemas.carried import CARRIED
from headrace.schemas.claim import GroupClaim
from headrace.schemas.codec import JSON_TYPE, SampledGroup, decode_group
from headrace.schemas.envelope import model_of, open_record
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError, DeadLetterReason, RejectionReason
from headrace.schemas.topics import TRAJECTORY_GROUPS
from headrace.trainer.lengths import BaseLimits
from headrace.trainer.plan import BaseSource, BaseUnusableError
from headrace.trainer.tokenize import GroupRefused, GroupTokenizer

GROUP_TOPIC_MODELS = CARRIED[TRAJECTORY_GROUPS]

_JOB_CHARACTERS = 128 * 1024
_MOST_TRAJECTORIES = 20_000
_MOST_UNFIT = 5_000
"""Trajectories of a group that is not refused as a whole: one transaction has an event of each."""

_settings: Settings | None = None
_record_seconds = 0.0
_noted: Noted | None = None
_shared: Shared | None = None


def prepare(settings: Settings, record_seconds: float, noted: Noted | None, shared: Shared | None = None) -> None:
    """Initialise the process: it leaves signals to its parent and stays single-threaded.

    Args:
        settings: Where payloads are.
        record_seconds: Processor time of one record; 0: without a bound.
        noted: Where the ids of the record at work are left, should the process die of it; None: nowhere.
        shared: Where large values are; None: in the requests.
    """
    global _settings, _record_seconds, _noted, _shared
    keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library may have set: the timer below ends the process, also in the middle of a computation in C.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _settings, _record_seconds, _noted, _shared = settings, record_seconds, noted, shared
    if all(entry.gguf_file is None for entry in settings.base_models.values()):
        # transformers imports it wherever it finds it (2 s, and 300 MB), and only a GGUF file's config is read with it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # what Python itself knows as "not to be found"
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is not found
    # Seconds of imports that belong to no record, while the worker starts.
    with importing():
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401, PLC0415 - as said

    # A parsed group is tens of thousands of objects without a cycle among them, and what is imported stays: to look through them for
    # garbage took half the time of decoding.
    gc.freeze()
    gc.set_threshold(200_000)


def admit_all(handed: HandedOver) -> HandedBack:
    """Answer each request, in a process that `prepare` set up: one that takes too much processor time ends it.

    Raises:
        OutageError: the object store, or a disk, can't be used.
    """
    answers: list[AdmissionResult] = []
    for request in handed.requests if _shared is None else handed.restored(_shared):
        signal.setitimer(signal.ITIMER_PROF, _record_seconds)
        try:
            answers.append(admit(request))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return hand_back(answers, _shared)


def admit(request: AdmissionRequest) -> AdmissionResult:
    """Read, check and tokenize one record."""
    seen = _Seen(group_id=request.fallback_id)
    seen.note()
    try:
        return _admit(request, seen)
    except CodecError as error:
        return Unreadable(reason=error.reason, path=error.path, detail=error.detail)
    except GroupRefused as refusal:
        return seen.refused(refusal.reason, refusal.detail, refusal.trajectory)
    except BaseUnusableError as error:
        _tokenizer.cache_clear()  # a repaired folder is read again
        return NotTokenized(group_id=seen.group_id, job_id=seen.job_id, waits_for=str(error))
    except HeadraceError:
        raise
    except MemoryError:
        return seen.refused(RejectionReason.TOKENIZATION_FAILED, "to read it takes more memory than the tokenizing process may use")
    except Exception as error:  # the last line of defence: one record never takes others down
        if (reason := outage_of(error)) is not None:
            raise OutageError(reason) from error
        return seen.refused(RejectionReason.TOKENIZATION_FAILED, said(error))


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What was learnt of a group before it failed: its refusal names it."""

    group_id: str
    job_id: str | None = None

    def take(self, group_id: str | None, job_id: str | None) -> None:
        self.group_id, self.job_id = group_id or self.group_id, job_id or self.job_id
        self.note()

    def note(self) -> None:
        if _noted is not None and len(note := orjson.dumps([self.group_id, self.job_id])) < NOTED_BYTES:
            _noted.value = note

    def refused(self, reason: RejectionReason, detail: str, trajectory: int | None = None) -> Refused:
        return Refused(group_id=self.group_id, job_id=self.job_id, reason=reason, detail=detail, trajectory=trajectory)


def _admit(request: AdmissionRequest, seen: _Seen) -> AdmissionResult:
    model = model_of(request.headers, GROUP_TOPIC_MODELS)
    if model is TrainingJob:
        return _job(request)
    if model is GroupClaim:
        claim = open_record(request.value, request.headers, GROUP_TOPIC_MODELS)
        assert isinstance(claim, GroupClaim)  # noqa: S101 - narrows the type; model_of said so
        seen.take(claim.group_id, claim.job_id)
        sampled = _payload(claim)
    else:
        sampled = _decoded(_value(request), request.headers.get("content-type", JSON_TYPE))
    seen.take(sampled.group.group_id, sampled.group.job_id)
    if request.base is None:
        return NotTokenized(group_id=seen.group_id, job_id=seen.job_id)
    if sampled.group.purpose == "sft" and seen.job_id is None:
        detail = "purpose is 'sft', but there is no job_id: examples train in a job of kind 'sft' (`submit_job`), never in the stream"
        return seen.refused(RejectionReason.SFT_WITHOUT_JOB, detail)
    group = _tokenizer(request.base).tokenize(sampled, seen.group_id, request.settings)
    if (unfit := len(group.rejected)) > _MOST_UNFIT:
        first = group.rejected[0]
        detail = (
            f"{unfit} of its trajectories are unfit, more than the {_MOST_UNFIT} that are reported one by one; the first: {first.detail}"
        )
        return seen.refused(first.reason, detail, first.index)
    return Admitted(group=group, job_id=seen.job_id)


def _job(request: AdmissionRequest) -> TrainingJob:
    record = open_record(request.value, request.headers, GROUP_TOPIC_MODELS)
    assert isinstance(record, TrainingJob)  # noqa: S101 - narrows the type; the caller asked model_of
    # The lane bounds the ids of the groups; all else becomes the job's document, which must fit into a record.
    size = len(record.model_copy(update={"group_ids": ()}).model_dump_json())
    if size > _JOB_CHARACTERS:
        raise CodecError(
            DeadLetterReason.TOO_LARGE, "", f"the job has {size} characters next to its group ids: at most {_JOB_CHARACTERS} are read"
        )
    return record


def _value(request: AdmissionRequest) -> bytes | memoryview:
    if request.value is None:
        raise CodecError(DeadLetterReason.NOT_JSON, "", "the record has no value")
    return request.value


def _decoded(body: bytes | memoryview, content_type: str) -> SampledGroup:
    quickly = decode_hosted(body) if content_type == JSON_TYPE else None
    sampled = decode_group(body, content_type) if quickly is None else quickly
    if (count := len(sampled.group.trajectories)) > _MOST_TRAJECTORIES:
        detail = f"the group has {count} trajectories: at most {_MOST_TRAJECTORIES} are read, so split it"
        raise CodecError(DeadLetterReason.TOO_LARGE, "trajectories", detail)
    return sampled


def _payload(claim: GroupClaim) -> SampledGroup:
    """The group behind a claim. Only a missing payload or a wrong digest refuses; a store that is away raises (rule 13)."""
    try:
        return _decoded(redeem(_store(), claim), claim.content_type)
    except PayloadMissingError as error:
        raise GroupRefused(RejectionReason.PAYLOAD_MISSING, str(error)) from error
    except PayloadDigestError as error:
        raise GroupRefused(RejectionReason.PAYLOAD_DIGEST_MISMATCH, str(error)) from error
    except (PayloadUnreadableError, CodecError) as error:
        raise GroupRefused(RejectionReason.PAYLOAD_UNREADABLE, f"{claim.uri}: {error}") from error


@cache
def _store() -> ObjectStore:
    assert _settings is not None  # noqa: S101 - prepare ran: it is the pool's initializer
    return open_store(_settings.store.url, _settings.s3)


def limits_of(base: BaseSource) -> BaseLimits:
    """What a base model can read.

    Raises:
        BaseUnusableError: its folder can't be read.
    """
    return _tokenizer(base).limits


@cache
def _tokenizer(base: BaseSource) -> GroupTokenizer:
    return GroupTokenizer(base)
