"""`headrace replay`: runs committed steps again, unchanged or as a fork; `headrace replay groups` copies raw groups."""

import asyncio
import os
import signal
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from headrace.cli.arguments import Project, model_id, number
from headrace.cli.compare import print_options, print_side_by_side
from headrace.consumers.replay.changes import OptionChanges
from headrace.consumers.replay.copying import Copied, copy_groups, trained_offsets
from headrace.consumers.replay.groups import Selection, Unusable
from headrace.consumers.replay.run import ReplayedStep
from headrace.consumers.replay.session import Outcome, Question, answer
from headrace.consumers.replay.start import Route
from headrace.consumers.replay.where import Where
from headrace.consumers.worker.rerun import CannotRerunError, Rerun
from headrace.core.ledger import StepRange, ranges_text
from headrace.core.models import get_model
from headrace.core.settings import Settings
from headrace.core.side_by_side import OptionDifference, SideBySide, option_differences, side_by_side
from headrace.core.times import parse_time
from headrace.schemas.base import utc_now
from headrace.schemas.state import ModelState

_TENSORS = 10
"""Named in the report of a distance."""


class Output:
    """Says what happens, while it happens.

    Args:
        question: What was asked for.
        as_json: Progress goes to stderr, the outcome to stdout as one document.
    """

    def __init__(self, question: Question, *, as_json: bool) -> None:
        self._question = question
        self._as_json = as_json
        self._first = 0
        self._width = 1
        self._plain: dict[int, bool] = {}
        """Steps without changes, and whether they are equal."""
        self._said: set[str] = set()
        self._settings: tuple[OptionDifference, ...] = ()
        """Of a fork's model."""

    def opened(self, state: ModelState, route: Route) -> None:
        """What will run."""
        self._settings = option_differences(state.settings, self._question.changes.settings(state.settings))
        self._first, last = route.first, route.records[-1].step
        self._width = len(str(last))
        start = "the base model" if route.start is None else f"the snapshot of step {route.start.step}"
        gone = f" ({route.gone} nearer {_s(route.gone, 'snapshot')} no longer there)" if route.gone else ""
        self._say(f"{state.name} ({state.model_id}): {_steps(range(route.first, last + 1))}, from {start}{gone}")
        if way := range(route.records[0].step, route.first):
            self._say(f"on the way there, and checked as well: {_steps(way)}")
        ledger = sorted({record.fingerprint.world_size for record in route.records})
        sizes = " and then ".join(map(str, ledger))
        if self._question.ranks is None:
            self._say(f"ranks: {sizes}, as in the ledger")
        else:
            self._say(f"ranks: {self._question.ranks}, as asked for; the ledger has {sizes}")

    def ran(self, step: ReplayedStep) -> None:
        """One step."""
        record, rerun = step.record, step.rerun
        if not step.forked:
            self._plain[record.step] = step.equal
        name = f"step {record.step:>{self._width}}"
        if rerun is None:
            self._say(f"{name}  {record.cut}: it trained nothing; the next steps start from its snapshot")
            return
        if step.forked:
            without = "" if rerun.result.updates else "  nothing left to train on"
            self._say(f"{name}  loss {number(rerun.result.loss)} (was {number(record.loss)}){without}  {step.seconds:.2f} s")
        else:
            marks = "  ".join(f"{kind} {'ok' if same else 'DIFFERS'}" for kind, same in _same(rerun).items())
            self._say(f"{name}  loss {number(rerun.result.loss)}  {marks}  {step.seconds:.2f} s")
        if step.forked and record.sft is not None and self._question.changes.config is not None:
            self._once("a supervised step has options of its own: what --set says does not concern it")
        if rerun.fingerprint_differences:
            self._once("this environment is another one than the ledger's: " + "; ".join(rerun.fingerprint_differences))
        if not step.forked and rerun.differences:
            for difference in rerun.differences:
                self._say(f"    {difference}")
            self._once(f"likely cause: {likely_cause(rerun)}. What comes after starts from other bits, too")

    def end(self, outcome: Outcome) -> None:
        """The summary."""
        table = None
        if outcome.forked:
            steps = {record.step for record in outcome.forked}
            table = side_by_side([step.record for step in outcome.steps if step.record.step in steps], outcome.forked)
        if self._as_json:
            typer.echo(orjson.dumps(self._document(outcome, table)))
        self.judge()
        if table is not None:
            self._fork(outcome, table)
        if outcome.published is not None:
            model = outcome.published
            self._say(f"model {model.name} ({model.model_id}) is requested: a worker of group {model.worker_group} creates it")
        elif self._question.publish is not None:
            self._say("nothing was published: the steps are not the ledger's")
        if self._question.keep is not None:
            self._say(f"weights after step {outcome.steps[-1].record.step}: {self._question.keep}")

    def judge(self) -> None:
        """Whether what has run so far is the ledger's."""
        different = [step for step, equal in self._plain.items() if not equal]
        if different:
            self._say(f"{len(different)} of {len(self._plain)} steps are not equal to the ledger, the first is step {different[0]}")
        elif self._plain:
            self._say(f"{len(self._plain)} {_s(len(self._plain), 'step')}: equal to the ledger, bit for bit")

    def _fork(self, outcome: Outcome, table: SideBySide) -> None:
        if not self._as_json:
            console = Console(soft_wrap=True, markup=False, highlight=False)
            print_options(console, self._settings, "original", "fork")
            print_side_by_side(console, table, "original", "fork")
        if self._question.exclude:
            self._say(f"without {', '.join(sorted(self._question.exclude))}")
        if outcome.distance is None:
            self._say("the original's weights no longer exist: the fork's distance from them is unknown")
            return
        total = outcome.distance.total
        if total.distance == 0:
            self._say("the fork's weights are the original's, bit for bit")
            return
        self._say(f"weights: {total.relative:.3g} of their norm away from the original's ({total.distance:.3g} of {total.norm:.3g})")
        shown = outcome.distance.tensors[:_TENSORS]
        for tensor in shown:
            self._say(f"    {tensor.relative:.3g}  {tensor.name}")
        if more := len(outcome.distance.tensors) - len(shown):
            self._say(f"    and {more} more, nearer ones (--json lists all)")

    def _document(self, outcome: Outcome, table: SideBySide | None) -> dict[str, Any]:
        published, distance = outcome.published, outcome.distance
        return {
            "model_id": self._question.model_id,
            "start": 0 if outcome.route.start is None else outcome.route.start.step,
            "equal": outcome.equal,
            "steps": [_step_document(step, self._first) for step in outcome.steps],
            "settings": self._settings,
            "fork": table,
            "distance": None
            if distance is None
            else {
                "relative": distance.total.relative,
                **asdict(distance.total),
                "tensors": [{"relative": each.relative, **asdict(each)} for each in distance.tensors],
            },
            "published": None if published is None else published.model_id,
            "weights": None if self._question.keep is None else str(self._question.keep),
        }

    def _say(self, text: str) -> None:
        typer.echo(text, err=self._as_json)

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(f"    {text}")


def likely_cause(rerun: Rerun) -> str:
    """Why a step may have come out otherwise."""
    if rerun.fingerprint_differences:
        return "the environment, " + "; ".join(rerun.fingerprint_differences)
    if not _same(rerun)["plan"]:
        return (
            "the plan is made of other tokens or other rows: another tokenizer or chat template in the base model's folder, or another "
            "worker.tokens_per_pass than the worker had"
        )
    return (
        "the plan is the same and its arithmetic is not: other files of the base model, other worker settings (activation_checkpointing, "
        "offload_optimizer), or a device that does not repeat its sums"
    )


def _same(rerun: Rerun) -> dict[str, bool]:
    return {
        "plan": rerun.result.plan_digest == rerun.record.plan_digest,
        "weights": rerun.weights_digest == rerun.record.weights.digest,
    }


def _step_document(step: ReplayedStep, first: int) -> dict[str, Any]:
    record, rerun = step.record, step.rerun
    document: dict[str, Any] = {"step": record.step, "cut": record.cut, "asked_for": record.step >= first, "forked": step.forked}
    if rerun is None:
        return document
    return document | {
        "loss": rerun.result.loss,
        "ledger_loss": record.loss,
        "plan_digest": rerun.result.plan_digest,
        "weights_digest": rerun.weights_digest,
        **{f"same_{kind}": same for kind, same in _same(rerun).items()},
        "differences": rerun.differences,
        "fingerprint_differences": rerun.fingerprint_differences,
        "seconds": step.seconds,
    }


def _steps(steps: range) -> str:
    return f"{_s(len(steps), 'step')} {ranges_text(steps)}"


def _s(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


app = typer.Typer(help="Run committed steps again: to the same bits, or as a fork.", invoke_without_command=True, add_completion=False)


@app.callback()
def replay(  # noqa: PLR0917 - typer passes them by name
    context: typer.Context,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Id or name.")] = None,
    steps: Annotated[str | None, typer.Option(help="A..B, A.., ..B or A; both ends belong to it.")] = None,
    project: Project = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="Train otherwise: learning_rate=1e-4, optimizer.beta1=0.8; may be given again."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GROUP_ID", help="Train without this group; may be given again.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, max=1024, help="World size; the ledger's unless given.")] = None,
    publish_to: Annotated[str | None, typer.Option(metavar="NAME", help="Go on with the outcome as a new model of the project.")] = None,
    to: Annotated[Path | None, typer.Option(help="New folder for the weights after the last step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, progress on standard error.")] = False,
) -> None:
    """Run steps again. Exit code 0 only if all are equal to the ledger; a fork's need not be."""
    if context.invoked_subcommand is not None:
        return

    for name, value in (("--model", model), ("--steps", steps)):
        if value is None:
            raise typer.BadParameter("it is needed: which steps of which model?", param_hint=name)
    settings = Settings()
    question = Question(
        model_id=asyncio.run(model_id(settings, project, str(model))),
        steps=StepRange.parse(str(steps)),
        changes=OptionChanges.parse(set_ or ()),
        exclude=frozenset(exclude or ()),
        ranks=ranks,
        publish=None if publish_to is None else (project or "default", publish_to),
        keep=None if to is None else to.absolute(),
    )
    output = Output(question, as_json=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ranks and files go in order
    try:
        outcome = asyncio.run(_answer(settings, question, output))
    except CannotRerunError:
        output.judge()  # what has run is worth knowing
        raise
    output.end(outcome)
    if not (question.forks or outcome.equal):
        raise typer.Exit(1)


async def _answer(settings: Settings, question: Question, output: Output) -> Outcome:

    return await answer(settings, question, opened=output.opened, ran=output.ran)


@app.command()
def groups(  # noqa: PLR0917 - typer passes them by name
    model: Annotated[str, typer.Option("--model", "-m", help="Id, or name in the project.")],
    to: Annotated[str, typer.Option("--to", help="A new file of JSON lines, topic:NAME, or - for the standard output.")],
    project: Project = None,
    since: Annotated[str | None, typer.Option(help="From when on: 10m ago (s, m, h, d), or 2026-11-30T08:15:00Z.")] = None,
    until: Annotated[str | None, typer.Option(help="Until when, in the same forms.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only what these steps trained on: A..B.")] = None,
    group: Annotated[list[str] | None, typer.Option(help="Only this group id; may be given again.")] = None,
    where: Annotated[str | None, typer.Option(help="Only groups with a trajectory that fits, as in 'reward < 0'.")] = None,
    to_bootstrap: Annotated[
        str | None, typer.Option(help="Brokers of the cluster that topic:NAME is in; reached with this one's security settings.")
    ] = None,
) -> None:
    """Copy raw groups out. What can't be read is named and left out; the exit code is then 1."""
    if to_bootstrap is not None and not to.startswith("topic:"):
        raise typer.BadParameter("it says where a topic is: give --to topic:NAME with it", param_hint="--to-bootstrap")
    first, last = _times(since, until)
    chosen = None if steps is None else StepRange.parse(steps)
    condition = None if where is None else Where.parse(where)
    settings = Settings()

    async def run() -> Copied:
        view = await get_model(settings, await model_id(settings, project, model))
        shadowed = None if view.state is None else view.state.shadow_of
        offsets = None if chosen is None else await trained_offsets(settings, view.model_id, chosen, shadowed)
        selection = Selection(since=first, until=last, offsets=offsets, group_ids=frozenset(group or ()), where=condition)
        return await copy_groups(settings, shadowed or view.model_id, selection, to, bootstrap=to_bootstrap, report=_say)

    try:
        copied = asyncio.run(run())
    except BrokenPipeError:
        # Who reads our output has enough of it; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    claims = f"; {copied.claims} of them are claims, whose payloads stay in this object store" if copied.claims else ""
    typer.echo(f"copied {copied.groups} of {copied.of} groups{claims}", err=to == "-")
    if copied.unusable:
        raise typer.Exit(1)


def _say(found: Unusable) -> None:
    typer.echo(f"offset {found.offset}: {found.detail}", err=True)


def _times(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:

    now = utc_now()
    first, last = (None if text is None else parse_time(text, now) for text in (since, until))
    if first is not None and last is not None and last <= first:
        raise typer.BadParameter(f"{until} is not after --since {since}", param_hint="--until")
    return first, last
