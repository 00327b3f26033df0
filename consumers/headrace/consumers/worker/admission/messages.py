"""What the lane asks of the tokenizing process, and what it answers. Types only: importing them imports no tokenizer."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.schemas.envelope import header_text
from headrace.schemas.jobs import TrainingJob
from headrace.schemas.reasons import CodecError, DeadLetterReason, RejectionReason
from headrace.schemas.training import ModelSettings
from headrace.trainer.groups import TokenizedGroup
from headrace.trainer.plan import BaseSource, BaseUnusableError

if TYPE_CHECKING:  # the tokenizing process knows no Kafka
    from aiokafka import ConsumerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """A record of `trajectory-groups`, and how its model wants it tokenized."""

    value: bytes | memoryview | None
    """A view: of memory that is filled again once the request is answered."""
    headers: dict[str, str]
    fallback_id: str
    """`<partition>-<offset>`: the group's id where its producer gave none."""
    base: BaseSource | None
    """None: the model does not train now; the group is only read."""
    settings: ModelSettings

    @classmethod
    def of(cls, record: "ConsumerRecord", base: BaseSource | None, settings: ModelSettings) -> "AdmissionRequest":
        """For a record as it stands in the log."""
        return cls(
            value=record.value,
            headers=dict(header_text(record.headers)),
            fallback_id=f"{record.partition}-{record.offset}",
            base=base,
            settings=settings,
        )


NOTED_BYTES = 4096
Noted = ctypes.Array[ctypes.c_char]
"""Memory that both processes see: `[group id, job id]` of the record at work, as JSON. Without a lock, which a dead process would keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Ready to train, as far as the record itself tells. Members that are not are in `group.rejected`."""

    group: TokenizedGroup
    job_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Read, and refused as a whole."""

    group_id: str
    job_id: str | None
    reason: RejectionReason
    detail: str
    trajectory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTokenized:
    """Read, and not tokenized: the model does not train now, or its base model can't be used. The lane decides what becomes of it."""

    group_id: str
    job_id: str | None
    waits_for: str | None = None
    """What is wrong with the base model; None: no one asked for tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A dead letter."""

    reason: DeadLetterReason
    path: str
    detail: str

    def error(self) -> CodecError:
        """As the error that it was."""
        return CodecError(self.reason, self.path, self.detail)


AdmissionResult = Admitted | Refused | NotTokenized | Unreadable | TrainingJob


def check_base(answers: Iterable[AdmissionResult]) -> None:
    """Raise `BaseUnusableError` where a group was not tokenized because of its base model."""
    for answer in answers:
        if isinstance(answer, NotTokenized) and answer.waits_for is not None:
            raise BaseUnusableError(answer.waits_for)
