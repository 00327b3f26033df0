"""What `headrace replay` says: a line for each step, what differs and why it may, the table of a fork, or all of it as JSON."""

from dataclasses import asdict
from typing import Any

import orjson
import typer
from rich.console import Console

from headrace.cli.figures import number
from headrace.cli.side_by_side_text import print_options, print_side_by_side
from headrace.consumers.replay.run import ReplayedStep
from headrace.consumers.replay.session import Outcome, Question
from headrace.consumers.replay.start import Route
from headrace.consumers.worker.rerun import Rerun
from headrace.core.side_by_side import OptionDifference, SideBySide, option_differences, side_by_side
from headrace.core.step_range import ranges_text
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
            self._say(f"{name}  {record.cut}: it trained nothing; what follows begins anew from its snapshot")
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
            self._say(f"model {model.name} ({model.model_id}) is asked for: a worker of group {model.worker_group} makes it")
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
            self._say("the original's weights are gone: how far the fork is from them can't be told")
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
