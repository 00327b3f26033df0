"""A model's committed state, its working copy, and the events and documents that no commit contains yet.

`state` is committed. `draft` is a copy of the same record: `change` changes a field that the next commit writes. A transaction takes a
`ModelChange`, which changes nothing; `apply` makes it the committed state. So a new field of a model is a field of `ModelState`, and the
code that changes it. Guarantees: after a commit exactly the changes that it contained are marked as committed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.schemas.events import GroupRejected, JobStateChanged, ModelStatusChanged, Starved, TrajectoryRejected
from headrace.schemas.jobs import JobDocument
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.state import Intent, ModelState

ModelStatus = Literal["active", "deleted", "diverged", "stopped"]
ModelEvent = GroupRejected | TrajectoryRejected | JobStateChanged | ModelStatusChanged | Starved


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """One model's part of a transaction."""

    state: ModelState
    """To be committed."""
    fields: Mapping[str, Any]
    """The fields of `state` that were computed for it. The other fields are those of the draft, which may change until `apply`."""
    revision: int
    events: int
    documents: Mapping[str, JobDocument]


@dataclass(slots=True, kw_only=True)
class ModelDraft:
    """The state of a model with its uncommitted changes."""

    state: ModelState
    """As committed."""
    draft: ModelState
    """The working copy."""
    events: list[ModelEvent] = field(default_factory=list)
    """Not committed yet, in the order in which they happened."""
    documents: dict[str, JobDocument] = field(default_factory=dict)
    """Job documents that have changed, and are not committed yet."""
    revision: int = 0
    """Counts every change in memory."""
    committed_revision: int = 0
    urgent: bool = False
    """The model itself changed (created, deleted, stopped): a client waits for that."""

    @property
    def status(self) -> ModelStatus:
        """The status that the next commit writes."""
        return self.draft.status

    @property
    def intent(self) -> Intent | None:
        """The intent that the next commit writes."""
        return self.draft.intent

    @property
    def shown_status(self) -> str:
        """As `models list` shows it."""
        return self.status if self.draft.waiting_for is None else "waiting"

    @property
    def dirty(self) -> bool:
        """Whether something changed that no commit contains."""
        return self.revision != self.committed_revision

    @property
    def reportable(self) -> bool:
        """Whether subscribers wait for something that possibly no step will carry."""
        return bool(self.events or self.documents or self.urgent)

    def touch(self, *, urgent: bool = False) -> None:
        """Note that something changed."""
        self.revision += 1
        self.urgent = self.urgent or urgent

    def change(self, **fields: Any) -> None:  # noqa: ANN401 - fields of the state
        """Change fields of the draft."""
        self.draft = self.draft.model_copy(update=fields)
        self.touch()

    def report_status(self, status: str, detail: str | None) -> None:
        """Let the next commit report a status."""
        changes = self.draft.status_changes + 1
        self.events.append(
            ModelStatusChanged(
                model_id=self.state.model_id,
                incarnation=self.state.incarnation,
                status=status,
                previous=self.shown_status,
                detail=detail,
                policy_version=self.state.policy_version,
                changes=changes,
            )
        )
        self.change(status_changes=changes)
        self.touch(urgent=True)

    def change_with(self, computed: Mapping[str, Any]) -> ModelChange:
        """The draft with computed fields, for a transaction. Changes nothing."""
        return ModelChange(
            state=self.draft.model_copy(update=dict(computed)),
            fields=computed,
            revision=self.revision,
            events=len(self.events),
            documents=dict(self.documents),
        )

    def apply(self, change: ModelChange) -> None:
        """The transaction with this change is committed. Changes that came after `next_change` stay uncommitted."""
        self.state = change.state
        self.draft = self.draft.model_copy(update=change.fields)
        self.committed_revision = change.revision
        self.urgent = self.urgent and self.dirty
        del self.events[: change.events]
        for job_id, document in change.documents.items():
            if self.documents.get(job_id) is document:
                del self.documents[job_id]


def counted(
    events: Iterable[ModelEvent], kind: type[GroupRejected] | type[TrajectoryRejected], before: Mapping[RejectionReason, int]
) -> dict[RejectionReason, int]:
    """Rejections of a kind by reason, added to the counts before."""
    return dict(Counter(before) + Counter(event.reason for event in events if isinstance(event, kind)))
