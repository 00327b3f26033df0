"""A replay from the question to the answer: check everything, run the steps, then do what the question asks of the result.

Guarantees: a name that is taken, a folder that exists, an option that does not fit and a group that no step trained on are rejected before
anything runs. The original's topics, offsets, events and objects stay as they were. Only a fork that is published writes: its state goes
into a folder of its own in the store, and after every file is durable one command asks the owner of the new model's lane to begin with it.
Steps that should be the ledger's and are not are never published.
Limitations: `forks/<uuid>/` stays in the store after the owner has made its own snapshot of it, and where it is unknown whether the command
was sent: the command may still need it.
"""

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from headrace.consumers.replay.changes import ChangeError, OptionChanges, WeightsDistance, weights_distance
from headrace.consumers.replay.groups import GroupReader, RawGroup, Selection
from headrace.consumers.replay.run import Fork, ReplayedStep, Task, replay
from headrace.consumers.replay.start import NothingToReplayError, Route, find_route
from headrace.consumers.worker.rerun import RESTART_CUTS, Changes, offsets_of
from headrace.core.ledger import StepRange
from headrace.core.model_views import ModelView
from headrace.core.models import ModelRefusedError, UnknownModelError, check_base_model, create_model, get_model, model_id_of
from headrace.core.settings import Settings
from headrace.core.store import ObjectNotFoundError, ObjectStore, fetch_folder, open_store, store_folder
from headrace.schemas.state import ModelState, StartFrom, StepRecord
from headrace.schemas.weights import WeightsRef
from headrace.trainer.options import merged_config
from headrace.trainer.rank_main import seat_of_launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The steps to replay, the changes, and what to do with the result."""

    model_id: str
    steps: StepRange
    changes: OptionChanges = field(default_factory=OptionChanges)
    exclude: frozenset[str] = frozenset()
    ranks: int | None = None
    publish: tuple[str, str] | None = None
    """Project and name of the model that the fork becomes."""
    keep: Path | None = None
    """New folder for the weights after the last step."""

    @property
    def forks(self) -> bool:
        """Whether anything is changed."""
        return self.changes != OptionChanges() or bool(self.exclude)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result, also while it grows."""

    route: Route
    steps: list[ReplayedStep] = field(default_factory=list)
    forked: list[StepRecord] = field(default_factory=list)
    """The fork's steps, as ledger records without files: the rows of a table."""
    distance: WeightsDistance | None = None
    """Of a fork's last weights from the original's; None where those are gone."""
    published: ModelView | None = None

    @property
    def equal(self) -> bool:
        """Every step without changes has the ledger's result, bit for bit."""
        return all(step.equal for step in self.steps if not step.forked)


async def answer(
    settings: Settings, question: Question, *, opened: Callable[[ModelState, Route], None], ran: Callable[[ReplayedStep], None]
) -> Outcome:
    """Replay the steps of a question.

    Args:
        settings: Of this process.
        question: What to replay.
        opened: Called when all is checked, before the first step.
        ran: Called after each step.

    Raises:
        CannotRerunError: a step can't be run again.
        HeadraceError: a part of the question is rejected, or Kafka or the store can't be reached.
    """
    state, route, fork = await _checked(settings, question)
    opened(state, route)
    publishes = question.publish is not None
    task = Task(model=state.settings, route=route, start=state.start_weights, fork=fork, ranks=question.ranks, keep_state=publishes)
    outcome = Outcome(route=route)
    async with replay(settings, task) as steps:
        async for step in steps:
            outcome.steps.append(step)
            if fork is not None and step.forked:
                outcome.forked.append(_as_record(step, fork))
            ran(step)
        await _conclude(settings, question, fork or Fork(changes=Changes(), model=state.settings), outcome)
    return outcome


async def _checked(settings: Settings, question: Question) -> tuple[ModelState, Route, Fork | None]:
    """Everything that can be rejected before a process is started."""
    if seat_of_launcher() is not None:
        raise NothingToReplayError("replay starts ranks of its own: run it without torchrun or deepspeed, and with --ranks where needed")
    view = await get_model(settings, question.model_id)
    if view.state is None:
        raise NothingToReplayError(f"{view.name} has no step yet: {view.status_detail}")
    state = view.state
    check_base_model(settings, state.settings)
    if question.publish is not None:
        await _check_name(settings, *question.publish)
    if question.keep is not None and await asyncio.to_thread(question.keep.exists):
        raise NothingToReplayError(f"{question.keep} exists: remove it, or name another folder for the weights")
    model = question.changes.settings(state.settings)
    route = await find_route(settings, open_store(settings.store.url, settings.s3), state, question.steps)
    requested = [record for record in route.records if record.step >= route.first]
    needs_weights = question.publish is not None or question.keep is not None
    trained = requested if question.forks else requested[-1:] if needs_weights else []
    if restart := next((record for record in trained if record.cut in RESTART_CUTS), None):
        raise NothingToReplayError(
            f"step {restart.step} is {restart.cut}: it trained nothing and began again; choose steps before or behind it"
        )
    await _check_excluded(settings, state, requested, question.exclude)
    if not question.forks:
        return state, route, None
    return state, route, Fork(changes=Changes(config=question.changes.config, exclude=question.exclude), model=model)


async def _check_name(settings: Settings, project: str, name: str) -> None:
    """Reject a name that a living model has, and the settings of a shadow."""
    if settings.worker.shadow_prefix is not None:
        raise ModelRefusedError(
            "--publish-to: a fork of a shadow has no groups of its own to train on (worker.shadow_prefix is set). Shadow with other "
            "settings (`headrace models create --shadow-of`), or publish a fork of the model that is shadowed"
        )
    try:
        known = await get_model(settings, model_id_of(settings.account, project, name))
    except UnknownModelError:
        return
    if known.status not in {"deleted", "deleting"}:
        raise ModelRefusedError(f"project {project!r} has a model {name!r} already: take another name, or delete it first")


async def _check_excluded(settings: Settings, state: ModelState, requested: Sequence[StepRecord], exclude: frozenset[str]) -> None:
    if not exclude:
        return
    trained = frozenset(offset for record in requested for offset in offsets_of(record.offsets))
    reader = GroupReader(settings, state.shadow_of or state.model_id, Selection(offsets=trained, group_ids=exclude), decode=True)
    found: set[str | None] = set()
    async with aclosing(reader.read()) as groups:
        async for group in groups:
            if isinstance(group, RawGroup) and group.sampled is not None:
                found.add(group.sampled.group.group_id)
    if missing := sorted(exclude - found):
        steps = f"{requested[0].step} to {requested[-1].step}"
        raise ChangeError(f"--exclude {missing[0]}: no step from {steps} trained on a group of that id")


def _as_record(step: ReplayedStep, fork: Fork) -> StepRecord:
    record, rerun = step.record, step.rerun
    assert rerun is not None  # noqa: S101 - narrows the type: a forked step has run
    result = rerun.result
    return record.model_copy(
        update={
            "config": record.config if fork.changes.config is None else merged_config(record.config, fork.changes.config),
            "plan_digest": result.plan_digest,
            "updates": result.updates,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "metrics": {name: value for name, value in result.metrics.items() if isfinite(value)},
            "weights": WeightsRef(uri="", digest=rerun.weights_digest),
            **dict.fromkeys(("snapshot", "report", "plots")),
            "scalars": result.scalars,
            "fingerprint": result.fingerprint,
        }
    )


async def _conclude(settings: Settings, question: Question, fork: Fork, outcome: Outcome) -> None:
    """Measure, keep and publish the last state."""
    last = outcome.steps[-1]
    if last.rerun is None:
        return
    store = open_store(settings.store.url, settings.s3)
    weights = last.rerun.out_dir / "weights"
    if outcome.forked:
        outcome.distance = await asyncio.to_thread(_distance, store, last.record.weights, weights)
    if question.keep is not None:
        await asyncio.to_thread(shutil.copytree, weights, question.keep)
    if question.publish is not None and (outcome.forked or outcome.equal):
        outcome.published = await _publish(settings, store, question.publish, fork, last)


def _distance(store: ObjectStore, original: WeightsRef, ours: Path) -> WeightsDistance | None:
    """Blocks."""
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
        theirs = Path(folder, "weights")
        try:
            fetch_folder(store, original.uri, original.digest, theirs)
        except ObjectNotFoundError:
            return None
        return weights_distance(ours, theirs)


async def _publish(settings: Settings, store: ObjectStore, name: tuple[str, str], fork: Fork, last: ReplayedStep) -> ModelView:
    """Store a fork's state, then ask for the model; it will belong to `settings.worker.group`.

    Raises:
        ModelRefusedError: the name was taken meanwhile; then nothing stays in the store.
    """
    record, rerun = last.record, last.rerun
    assert rerun is not None  # noqa: S101 - narrows the type
    train, changed = fork.model.train, fork.changes.config
    model = fork.model.model_copy(update={"train": train if changed is None else merged_config(train, changed)})
    prefix = f"forks/{uuid.uuid4()}"
    _, snapshot = await asyncio.to_thread(
        store_folder,
        store,
        f"{prefix}/snapshot",
        rerun.out_dir / "snapshot",
        kind="snapshot",
        model_id=record.model_id,
        incarnation=record.incarnation,
        step=record.step,
        attempt=record.attempt,
    )
    start = StartFrom(
        snapshot=snapshot,
        scalars=rerun.result.scalars,
        forked_from=record.model_id,
        incarnation=record.incarnation,
        step=record.step,
        attempt=record.attempt,
    )
    try:
        return await create_model(settings, project=name[0], name=name[1], model=model, start_from=start)
    except ModelRefusedError:
        for stored in await asyncio.to_thread(lambda: list(store.list(f"{prefix}/"))):
            await asyncio.to_thread(store.delete, stored.key)
        raise
