"""One model as a page, from the tables; rows of old steps from the ledger."""

from headrace.core.model_views import ModelView
from headrace.core.settings import Settings
from headrace.gateway.access import Caller
from headrace.gateway.dashboard.answers import ModelPage, Refused, StepList, StepRow, Timeline, VersionAt
from headrace.gateway.dashboard.curves import lags, metric_names, versions
from headrace.gateway.dashboard.seen import engine_row, is_of, job_rows, model_row
from headrace.gateway.ledger_reading import whole_steps
from headrace.gateway.step_history import StepEntry, StepHistory
from headrace.gateway.tables import Tables
from headrace.schemas.events import GroupRejected

_POINTS = 400
_REFUSED = 20
_JOBS = 20


async def model_page(tables: Tables, caller: Caller, view: ModelView) -> ModelPage:
    """All but the curves, which are asked for one by one."""
    history = tables.history(view)
    acks = [engine_row(ack) for ack in tables.acked.get(view.model_id, ()) if is_of(ack, view)]
    refused = [event for event in tables.events if isinstance(event, GroupRejected) and event.model_id == view.model_id]
    return ModelPage(
        model=model_row(tables, view),
        metrics=metric_names(history.recent),
        timeline=Timeline(versions=[VersionAt(version=0, at=view.created_at), *versions(history.moments(), _POINTS)], acks=acks),
        lags=lags(history.recent),
        refused=[
            Refused(group_id=event.group_id, reason=event.reason.value, detail=event.detail, at=event.rejected_at)
            for event in reversed(refused[-_REFUSED:])
        ],
        jobs=(await job_rows(tables, caller, view.model_id, _JOBS))[:_JOBS],
    )


async def step_list(settings: Settings, history: StepHistory, before: int | None, limit: int) -> StepList:
    """Steps below `before`, newest first. Raises HeadraceError: Kafka does not answer."""
    found = [step for step in history.numbers if before is None or step < before]
    whole = await whole_steps(settings, history, found[-limit:])
    return StepList(steps=[step_row(whole[step]) for step in sorted(whole, reverse=True)], more=len(found) > limit)


def step_row(entry: StepEntry) -> StepRow:
    """A step as a row."""
    return StepRow(
        step=entry.step,
        at=entry.committed_at,
        cut=entry.cut,
        job_id=entry.job_id,
        groups=entry.groups,
        updates=entry.updates,
        reward=entry.metrics.get("reward_mean"),
        loss=entry.metrics.get("loss"),
        refused=sum(entry.refusals.values()),
    )
