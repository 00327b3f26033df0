"""`headrace inspect MODEL STEP`: everything that the ledger, the report and the kept rows of one step hold."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.arguments import Model, Project, counts, model_id, moment, number, numbers, plain, print_table
from headrace.cli.model_history import ModelHistory, read_history
from headrace.cli.steps import Incarnation
from headrace.core.errors import HeadraceError
from headrace.core.ledger import StepRange, ranges_text
from headrace.core.reports import Arrays, NoReportError, PackedRows, open_rows, read_report, read_rows
from headrace.core.settings import Settings
from headrace.core.store import DigestMismatchError, open_store
from headrace.schemas.events import GroupRejected, TrajectoryRejected
from headrace.schemas.state import ROWS_FILE, StepRecord, StepReport


def inspect(  # noqa: PLR0917 - typer passes them by name
    model: Model,
    step: Annotated[int, typer.Argument(min=1, help="Which step.")],
    project: Project = None,
    incarnation: Incarnation = None,
    rows: Annotated[bool, typer.Option("--rows", help="Also the packed rows that were kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The ledger's record and the report, one JSON object.")] = False,
) -> None:
    """Show one step: its ledger record, its report, and the packed rows that were kept."""
    process = Settings()

    async def read() -> ModelHistory:
        wanted = await model_id(process, project, model)
        return await read_history(process, wanted, incarnation=incarnation, steps=StepRange(first=step, last=step))

    history = asyncio.run(read())
    if not history.records:
        raise HeadraceError(f"{history.view.name} has no step {step}: `headrace steps {model}` lists those there are")
    (record,) = history.records
    store = open_store(process.store.url, process.s3)
    report: StepReport | None = None
    problem: str | None = None
    try:
        report = read_report(store, record.report)
    except (NoReportError, DigestMismatchError) as error:
        problem = str(error)
    if as_json:
        shown = {
            "record": record.model_dump(mode="json"),
            "report": None if report is None else report.model_dump(mode="json"),
            "report_problem": problem,
        }
        typer.echo(orjson.dumps(shown))
        return
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"step {step} of {history.view.name} ({record.model_id}), incarnation {record.incarnation}")
    _print_record(console, record)
    if report is None:
        _section(console, "report", {"none": problem})
    else:
        _print_report(console, record, report)
    if rows:
        print_rows(console, read_rows(store, record.report))


def _print_record(console: Console, record: StepRecord) -> None:

    offsets = ranges_text(offset for found in record.offsets for offset in range(found.first, found.last + 1))
    _fields(
        console,
        {
            "version": f"{record.policy_version_before} → {record.policy_version_after}",
            "cut": record.cut,
            "job": record.job_id,
            "groups": f"{record.groups}, at offset{'s' if record.groups > 1 else ''} {offsets} of lane {record.lane}"
            if record.groups
            else "0",
            "refused": counts(record.refusals),
            "trajectories refused": counts(record.trajectory_refusals),
            "updates": record.updates,
            "loss": number(record.loss),
            "grad norm": number(record.grad_norm),
            "seed": record.seed,
            "attempt": record.attempt,
            "committed at": moment(record.committed_at),
        },
    )
    if record.rebased is not None:
        _section(console, "rebased", record.rebased.model_dump())
    if record.forked is not None:
        _section(console, "forked", record.forked.model_dump(mode="json", exclude={"scalars"}))
    said = record.config.model_dump(exclude_none=True)
    _section(console, "config (options that are not named have their defaults)", said or {"all": "at its default"})
    if record.sft is not None:
        _section(console, "supervised", record.sft.model_dump(mode="json"))
    _print_metrics(console, record)
    before, after = record.scalars_before.model_dump(mode="json"), record.scalars.model_dump(mode="json")
    _section(console, "scalars", {name: f"{_shown(before[name])} → {_shown(after[name])}" for name in after if before[name] != after[name]})
    _section(console, "digests", {"config": record.config_digest, "plan": record.plan_digest})
    for name in ("weights", "snapshot", "report", "plots"):
        if (ref := getattr(record, name)) is not None:
            _fields(console, {name: f"{ref.digest}  {ref.uri}"})
    _section(console, "fingerprint", record.fingerprint.model_dump(mode="json"))


def _print_metrics(console: Console, record: StepRecord) -> None:
    """In as many columns as fit: there are many."""
    if not record.metrics:
        return
    console.print("\nmetrics", style="bold")
    names = max(map(len, record.metrics))
    columns = max(1, min(3, console.width // (names + 14))) if console.is_terminal else 3
    table = Table.grid(padding=(0, 2))
    cells = [cell for name, value in record.metrics.items() for cell in (name, number(value))]
    for at in range(0, len(cells), 2 * columns):
        table.add_row("", *cells[at : at + 2 * columns])
    console.print(table)


def _print_report(console: Console, record: StepRecord, report: StepReport) -> None:

    console.print(f"\ngroups ({len(report.groups)})", style="bold")
    columns = ("group", "offset", "producer", "trajectories", "tokens", "trained", "sampled by", "rewards", "advantages")
    rows = [
        [
            plain(group.group_id),
            str(group.offset),
            plain(group.producer or "-"),
            str(len(group.trajectories)),
            str(sum(member.tokens for member in group.trajectories)),
            str(sum(member.trainable_tokens for member in group.trajectories)),
            _versions(member.initial_policy_version for member in group.trajectories),
            numbers([member.reward for member in group.trajectories]),
            numbers([member.advantage for member in group.trajectories]),
        ]
        for group in report.groups
    ]
    print_table(columns, rows, important=("group", "rewards", "advantages", "trained", "offset", "sampled by"))
    if report.refused or report.refused_trajectories or report.refused_unlisted:
        listed: tuple[GroupRejected | TrajectoryRejected, ...] = (*report.refused, *report.refused_trajectories)
        total = len(listed) + report.refused_unlisted
        console.print(f"\nrejected since the step before ({total})", style="bold")
        rejected = []
        for event in listed:
            where = "-" if event.trajectory is None else str(event.trajectory)
            texts = (event.group_id, where, str(event.offset), event.job_id or "-", event.reason.value, event.detail)
            rejected.append([*map(plain, texts)])
        print_table(
            ("group", "trajectory", "offset", "job", "reason", "detail"), rejected, important=("group", "reason", "detail", "trajectory")
        )
        if report.refused_unlisted:
            console.print(f"and {report.refused_unlisted} more, in the topic training-events")
    _section(console, "seconds", {name: number(value) for name, value in report.timings.items()})
    kept = "none kept (worker.report_rows)"
    if report.rows != "none" and record.report is not None:
        kept = f"{report.rows}, in {record.report.uri}/{ROWS_FILE}"
    _section(console, "packed rows", {"kept": kept})


def _versions(versions: Iterable[int | None]) -> str:
    """The policy versions that sampled a group."""
    found = sorted({-1 if version is None else version for version in versions})
    return ", ".join("unknown" if version < 0 else str(version) for version in found)


def _section(console: Console, title: str, values: Mapping[str, Any]) -> None:
    if values:
        console.print(f"\n{title}", style="bold")
        _fields(console, values)


def _fields(console: Console, values: Mapping[str, Any]) -> None:
    width = max([len(name) for name in values] + [len("trajectories refused")])
    for name, value in values.items():
        console.print(f"  {name:<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:  # noqa: ANN401 - any value of a record
    """`-` for nothing; nested values on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return "-" if value in {None, ""} else str(value)


_SEQUENCES = 40
_TOKENS = 12
"""Trained tokens shown of the first sequence of each of the first rows."""
_ROWS = 2


def print_rows(console: Console, body: bytes | None) -> None:
    """Print what a `rows.safetensors` holds; None: nothing was kept.

    Raises:
        RowsUnreadableError: safetensors is not installed, or the bytes are none.
    """
    if body is None:
        console.print("no rows were kept: set worker.report_rows to sample or all")
        return
    packed = open_rows(body)
    arrays, groups = packed.arrays, packed.groups
    if not packed.laid_out:
        table = Table("array", "type", "shape", box=None, header_style="bold")
        for name, array in sorted(arrays.items()):
            table.add_row(name, str(array.dtype), str(list(array.shape)))
        console.print(table)
        return
    kept = len(arrays["row_numbers"])
    console.print(f"\nsequences of {kept} of {packed.rows} rows", style="bold")
    console.print(_sequences(packed))
    if (more := len(arrays["sequence_groups"]) - _SEQUENCES) > 0:
        console.print(f"and {more} more sequences")
    for row in range(min(kept, _ROWS)):
        s = int(arrays["row_sequences"][row])
        trained = packed.trained(s)
        name = f"{groups[arrays['sequence_groups'][s]]}, trajectory {arrays['sequence_trajectories'][s]}"
        console.print(
            f"\nrow {arrays['row_numbers'][row]}: first {min(len(trained), _TOKENS)} of {len(trained)} trained tokens of {name}",
            style="bold",
        )
        console.print(_tokens(arrays, trained[:_TOKENS]))


def _sequences(packed: PackedRows) -> Table:
    arrays = packed.arrays
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("row", "update", "step", "rank", "group", "trajectory", "part", "tokens", "trained", "advantage", "ratio", "lag"):
        table.add_column(heading, justify="left" if heading == "group" else "right")
    for row in range(len(arrays["row_numbers"])):
        place = [str(arrays[name][row]) for name in ("row_numbers", "row_updates", "row_micro_steps", "row_ranks")]
        for s in range(arrays["row_sequences"][row], arrays["row_sequences"][row + 1]):
            if s >= _SEQUENCES:
                return table
            at = packed.trained(s)
            lags = arrays["lags"][at]
            table.add_row(
                *place,
                packed.groups[arrays["sequence_groups"][s]],
                str(arrays["sequence_trajectories"][s]),
                str(arrays["sequence_parts"][s]),
                str(arrays["sequence_tokens"][s + 1] - arrays["sequence_tokens"][s]),
                str(len(at)),
                _mean(arrays["advantages"][at]),
                _mean(arrays["ratios"][at]),
                _mean(lags[lags >= 0]),
            )
    return table


def _tokens(arrays: Arrays, at: npt.NDArray[np.int64]) -> Table:
    floats = ("advantages", "weights", "ratios", "behaviour_logprobs", "old_logprobs", "new_logprobs")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("position", "token", "lag", "advantage", "weight", "ratio", "behaviour", "old", "new"):
        table.add_column(heading, justify="right")
    for i in at:
        lag = int(arrays["lags"][i])
        numbers = [float(arrays[name][i]) for name in floats]
        table.add_row(
            str(arrays["position_ids"][i]),
            str(arrays["token_ids"][i]),
            "-" if lag < 0 else str(lag),
            *("-" if np.isnan(value) else number(value) for value in numbers),
        )
    return table


def _mean(values: npt.NDArray[Any]) -> str:
    return number(float(values.mean(dtype=np.float64))) if len(values) else "-"
