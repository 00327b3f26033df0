"""Models and jobs as rows, and which of them a caller may see.

Guarantees: what is of another account, or of a project that the token does not cover, is not there (404). Limitations: all of them at once;
the latest that changed are listed, and whether there are more.

A model's steps as curves and bars that a page can draw, however many there are. Pure.

Guarantees: at most `points` buckets of consecutive steps, from the first to the last, each with mean, lowest and highest value, so that a
spike is not lost. Limitations: steps that do not have the metric; they are left out, and the curve goes over them; of a long run, more
points than `step_history` holds stretches.

One model as a page, from the tables; rows of old steps from the ledger.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice

from headrace.core.job_views import JobView, outcome_messages
from headrace.core.model_views import ModelView
from headrace.core.settings import Settings
from headrace.gateway.access import Caller
from headrace.gateway.dashboard.answers import (
    Bucket,
    Curve,
    EngineRow,
    JobRow,
    LagBar,
    Lags,
    ModelPage,
    ModelRow,
    Overview,
    Refused,
    StepList,
    StepRow,
    Timeline,
    VersionAt,
)
from headrace.gateway.problems import ProblemError
from headrace.gateway.step_history import StepEntry, StepHistory, Stretch, whole_steps
from headrace.gateway.tables import Tables, engine_of
from headrace.schemas.events import GroupRejected
from headrace.schemas.gateway import GatewayJob, job_key
from headrace.schemas.jobs import JobDocument
from headrace.schemas.reasons import RejectionReason
from headrace.schemas.weights import WeightsApplied, WeightsFailed

LISTED = 200
_LOOKED_AT = 5000
"""Of all accounts; where another has more than this, what has not changed for long is not found here."""
_TURN = 50


def seen_model(tables: Tables, caller: Caller, model_id: str) -> ModelView:
    """A model that the caller sees.

    Raises:
        ProblemError: 404.
    """
    view = tables.model(model_id)
    if view is None or not caller.sees(view.account, view.project):
        raise ProblemError(404, f"there is no model {model_id} here")
    return view


def sees_job(tables: Tables, caller: Caller, view: JobView) -> bool:
    """Whether a job is there for this caller: by its model, else by who asked for it."""
    model = tables.model(view.model_id)
    if model is not None:
        return caller.sees(model.account, model.project)
    fact = tables.facts.get(job_key(view.job_id))
    return isinstance(fact, GatewayJob) and caller.sees(fact.account) and not caller.projects


async def overview(tables: Tables, caller: Caller) -> Overview:
    """The latest models and jobs; other requests get their turn meanwhile."""
    models: list[ModelRow] = []
    ids = _latest({key: r.timestamp for key, r in tables.states.items() if not key.startswith("lane:")}, tables.commands)
    for number, model_id in enumerate(ids):
        if number % _TURN == 0:
            await asyncio.sleep(0)
        view = tables.model(model_id)
        if view is not None and view.status != "deleted" and caller.sees(view.account, view.project):
            models.append(model_row(tables, view))
        if len(models) > LISTED:
            break
    jobs = await job_rows(tables, caller)
    return Overview(
        account=caller.account,
        models=models[:LISTED],
        more_models=len(models) > LISTED,
        jobs=jobs[:LISTED],
        more_jobs=len(jobs) > LISTED,
    )


async def job_rows(tables: Tables, caller: Caller, model_id: str | None = None, limit: int = LISTED) -> list[JobRow]:
    """The latest jobs, of one model or of all; one more than the limit where there are more."""
    rows: list[JobRow] = []
    # Named in its document's bytes, or not of this model: most need not be read.
    named = (model_id or "").encode()
    stamps = {key: record.timestamp for key, record in tables.documents.items() if named in record.value}
    for number, job_id in enumerate(_latest(stamps)):
        if number % _TURN == 0:
            await asyncio.sleep(0)
        view = tables.job(job_id)
        if view is not None and model_id in {None, view.model_id} and sees_job(tables, caller, view):
            rows.append(job_row(tables, view))
        if len(rows) > limit:
            break
    return sorted(rows, key=lambda row: (row.created_at is None, row.created_at), reverse=True)


def model_row(tables: Tables, view: ModelView) -> ModelRow:
    """A model as a row."""
    state = view.state
    history = tables.history(view)
    last = history.last
    return ModelRow(
        id=view.model_id,
        name=view.name,
        project=view.project,
        base_model=view.settings.base_model,
        adaptation=view.settings.adaptation,
        status=view.status,
        detail=view.status_detail,
        version=0 if state is None else state.policy_version,
        waiting=0 if state is None else len(state.pending),
        trained=0 if state is None else state.groups_trained,
        refusals={} if state is None else _counts(state.refusals),
        trajectory_refusals={} if state is None else _counts(state.trajectory_refusals),
        reward=None if last is None else last.metrics.get("reward_mean"),
        loss=None if last is None else last.metrics.get("loss"),
        created_at=view.created_at,
        updated_at=view.created_at if state is None else state.updated_at,
        shadow_of=view.shadow_of,
        engines=[engine_row(ack) for ack in tables.acks.values() if is_of(ack, view) and not tables.is_silent(ack)],
    )


def engine_row(ack: WeightsApplied | WeightsFailed) -> EngineRow:
    """An ack as a row."""
    return EngineRow(
        engine=engine_of(ack),
        version=ack.policy_version,
        at=ack.failed_at if isinstance(ack, WeightsFailed) else ack.applied_at,
        error=ack.error if isinstance(ack, WeightsFailed) else None,
        deployment=ack.deployment,
    )


def is_of(ack: WeightsApplied | WeightsFailed, view: ModelView) -> bool:
    """Whether an ack is about this incarnation of a model; one of version 0 may have come before there was any."""
    incarnation = None if view.state is None else view.state.incarnation
    return ack.model_id == view.model_id and ack.incarnation in {incarnation, ""}


def job_row(tables: Tables, view: JobView) -> JobRow:
    """A job as a row."""
    document = view.document
    model = tables.model(view.model_id)
    return JobRow(
        id=view.job_id,
        model_id=view.model_id,
        model_name=view.model_id if model is None else model.name,
        state=view.state,
        requested=view.requested,
        can_cancel=not view.final and view.requested != "cancel",
        kind="rl" if document is None else document.kind,
        groups=0 if document is None else document.num_groups,
        groups_rejected=0 if document is None else document.groups_rejected,
        step=None if document is None else document.step,
        message=None if document is None else _message(view, document),
        created_at=None if document is None else document.created_at,
        started_at=None if document is None else document.started_at,
        completed_at=None if document is None else document.completed_at,
    )


def _message(view: JobView, document: JobDocument) -> str | None:
    """Why a job failed or waits; of one that has ended well, what of it did not train."""
    if document.error_message is not None or not view.final:
        return document.error_message or document.waiting_for
    return "; ".join(outcome_messages(document)[:2]) or None


def _counts(values: Mapping[RejectionReason, int]) -> dict[str, int]:
    return {name.value: count for name, count in values.items() if count}


def _latest(stamps: dict[str, int], first: Iterable[str] = ()) -> list[str]:
    """Keys by when their record was written, the latest first; before them those that have none."""
    unwritten = [key for key in first if key not in stamps]
    return [*unwritten, *sorted(stamps, key=lambda key: stamps[key], reverse=True)][:_LOOKED_AT]


LAG_STEPS = 50
"""Latest steps whose tokens make the bars."""
_NAMES_FROM = 20
_LAG = re.compile(r"lag_tokens_(\d+|16_up|unknown)")


def curve(history: StepHistory, metric: str, points: int) -> Curve:
    """A metric over the steps.

    Args:
        history: Of the model.
        metric: Its name.
        points: Buckets at most.
    """
    having = list(history.stretches(metric))
    size = max(1, -(-len(having) // points))
    return Curve(metric=metric, points=[_bucket(having[at : at + size]) for at in range(0, len(having), size)])


def _bucket(stretches: Sequence[Stretch]) -> Bucket:
    return Bucket(
        first=stretches[0].first,
        last=stretches[-1].last,
        at=stretches[-1].at,
        mean=sum(each.total for each in stretches) / sum(each.count for each in stretches),
        low=min(each.low for each in stretches),
        high=max(each.high for each in stretches),
    )


def metric_names(entries: Iterable[StepEntry]) -> list[str]:
    """What the latest steps have, without the parts that the lag histogram shows."""
    names = {name for entry in islice(reversed(list(entries)), _NAMES_FROM) for name in entry.metrics}
    return sorted(name for name in names if name.startswith("user/") or not ("_lag_" in name or name.startswith("lag_tokens_")))


def versions(moments: Sequence[tuple[int, datetime]], points: int) -> list[VersionAt]:
    """When versions came, evenly thinned; the first and the last are among them."""
    size = max(1, -(-len(moments) // points))
    kept = list(moments[::size])
    if moments and kept[-1] is not moments[-1]:
        kept.append(moments[-1])
    return [VersionAt(version=version, at=at) for version, at in kept]


def lags(entries: Iterable[StepEntry]) -> Lags:
    """Tokens by lag over the latest steps, with the mean ratio and the effective share by tokens."""
    latest = list(entries)[-LAG_STEPS:]
    names = {found[1] for entry in latest for name in entry.metrics if (found := _LAG.fullmatch(name))}
    return Lags(steps=len(latest), bars=[_bar(name, latest) for name in sorted(names, key=_order)])


def _bar(lag: str, entries: Iterable[StepEntry]) -> LagBar:
    tokens = 0.0
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for entry in entries:
        count = entry.metrics.get(f"lag_tokens_{lag}", 0.0)
        tokens += count
        for name in ("ratio_mean", "ess"):
            value = entry.metrics.get(f"{name}_lag_{lag}")
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value * count
                weights[name] = weights.get(name, 0.0) + count
    means = {name: sums[name] / weights[name] for name in sums if weights[name]}
    return LagBar(lag=lag.replace("16_up", "16+"), tokens=tokens, ratio=means.get("ratio_mean"), ess=means.get("ess"))


def _order(lag: str) -> int:
    return int(lag) if lag.isdigit() else 16 if lag == "16_up" else 17


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
