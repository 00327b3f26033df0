"""`headrace lineage MODEL`: from a version back to what it trained on, or from a group on to the versions that it influenced."""

import asyncio
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.cli.arguments import Model, Project, model_id, number, numbers
from headrace.cli.model_history import ModelHistory, read_history
from headrace.cli.steps import Incarnation
from headrace.core.errors import HeadraceError
from headrace.core.ledger import ranges_text
from headrace.core.lineage import GroupLineage, Lineage, VersionLineage
from headrace.core.settings import Settings
from headrace.core.store import open_store


def lineage(  # noqa: PLR0917 - typer passes them by name
    model: Model,
    project: Project = None,
    version: Annotated[int | None, typer.Option(min=1, help="What the step that made this version trained on.")] = None,
    every: Annotated[bool, typer.Option("--all", help="With --version: all versions up to it, too.")] = False,
    group: Annotated[str | None, typer.Option(help="What became of this group: id.")] = None,
    incarnation: Incarnation = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say which trajectories a version was trained on, or which versions a group influenced."""
    if (version is None) == (group is None):
        raise typer.BadParameter("give one of the two", param_hint="--version, --group")
    if every and version is None:
        raise typer.BadParameter("it needs --version: all versions up to that one", param_hint="--all")
    process = Settings()
    wanted = asyncio.run(model_id(process, project, model))
    if version is not None:
        found = asyncio.run(_of_version(process, wanted, incarnation, version, every=every))
        _print_json({"model_id": wanted, "versions": [_version_dict(each) for each in found]}) if as_json else _print_versions(found)
    elif group is not None:
        went = asyncio.run(_of_group(process, wanted, incarnation, group))
        _print_json({"model_id": wanted, **_group_dict(went)}) if as_json else _print_group(went)


async def _of_version(process: Settings, wanted: str, incarnation: str | None, version: int, *, every: bool) -> list[VersionLineage]:

    history, of = await _open(process, wanted, incarnation)
    records = [record for record in history.records if record.policy_version_after <= version]
    if not records or records[-1].policy_version_after != version:
        latest = history.records[-1].policy_version_after if history.records else 0
        raise HeadraceError(f"{history.view.name} has no version {version}: its latest is {latest}, and 0 is its base model")
    return [await of.version(record) for record in (records if every else records[-1:])]


async def _of_group(process: Settings, wanted: str, incarnation: str | None, group_id: str) -> GroupLineage:
    _, of = await _open(process, wanted, incarnation)
    return await of.group(group_id)


async def _open(process: Settings, wanted: str, incarnation: str | None) -> tuple[ModelHistory, Lineage]:

    history = await read_history(process, wanted, incarnation=incarnation)
    state = history.view.state
    if state is not None and incarnation not in {None, state.incarnation}:
        state = None
    store = open_store(process.store.url, process.s3)
    return history, Lineage(process, store, wanted, state, history.records)


def _version_dict(found: VersionLineage) -> dict[str, Any]:
    record = found.record
    return {
        "version": record.policy_version_after,
        "step": record.step,
        "job_id": record.job_id,
        "cut": record.cut,
        "updates": record.updates,
        "forked": None if record.forked is None else record.forked.model_dump(mode="json"),
        "rebased": None if record.rebased is None else record.rebased.model_dump(mode="json"),
        "lane": record.lane,
        "offsets": [each.model_dump() for each in record.offsets],
        "source": found.source,
        "problem": found.problem,
        "groups": [each.model_dump(mode="json") for each in found.groups],
    }


def _group_dict(went: GroupLineage) -> dict[str, Any]:
    trained = went.trained
    return {
        "group_id": went.group_id,
        "status": went.status,
        "step": None if trained is None else trained.step,
        "version": None if trained is None else trained.policy_version_after,
        "job_id": None if trained is None else trained.job_id,
        "versions": went.versions,
        "group": None if went.group is None else went.group.model_dump(mode="json"),
        "waiting": None if went.waiting is None else went.waiting.model_dump(mode="json"),
        "refusals": [each.model_dump(mode="json") for each in went.refusals],
        "trajectories_refused": [each.model_dump(mode="json") for each in went.trajectories_refused],
        "unsearched": went.unsearched,
    }


def _print_json(shown: dict[str, Any]) -> None:

    typer.echo(orjson.dumps(shown))


def _print_versions(found: list[VersionLineage]) -> None:

    table = Table("version", "cut", "group", "offset", "producer", "trajectories", "tokens", "rewards", box=None, header_style="bold")
    for each in found:
        version, cut = str(each.record.policy_version_after), each.record.cut
        for group in each.groups:
            members = group.trajectories
            known = each.source == "report"
            count, tokens = (str(len(members)), str(sum(member.tokens for member in members))) if known else ("-", "-")
            rewards = numbers([member.reward for member in members]) or "-"
            table.add_row(version, cut, group.group_id, str(group.offset), group.producer or "-", count, tokens, rewards)
        if not each.groups:
            offsets = ranges_text(offset for at in each.record.offsets for offset in range(at.first, at.last + 1))
            table.add_row(version, cut, "- (none)" if not offsets else "- (not known)", offsets or "-", "-", "-", "-", "-")
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    all_members = [member for each in found for group in each.groups for member in group.trajectories]
    total = sum(member.tokens for member in all_members)
    console.print(
        f"{sum(each.record.groups for each in found)} groups; as far as reports say {len(all_members)} trajectories, {total} tokens"
    )
    for each in found:
        if (origin := each.record.forked) is not None:
            console.print(
                f"version {each.record.policy_version_after} is a fork of model {origin.forked_from} after its step {origin.step}: "
                f"`headrace lineage {origin.forked_from} --version {origin.step} --all` has what that trained on"
            )
        if each.record.rebased is not None and each.record.rebased.resumed_from is not None:
            console.print(
                f"version {each.record.policy_version_after} continues from step {each.record.rebased.resumed_from}: what the versions "
                "between trained on is not in it"
            )
    for each in found:
        if each.problem is not None and each.record.groups:
            typer.echo(f"version {each.record.policy_version_after}: {each.problem}", err=True)


def _print_group(went: GroupLineage) -> None:

    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(_sentence(went))
    if went.trained is not None and went.group is not None:
        by = f", sent by {went.group.producer}" if went.group.producer else ""
        console.print(f"  offset {went.group.offset} of lane {went.trained.lane}{by}")
        console.print(f"  {_influence(went.versions)}{'' if went.trained.updates else ': the step made no update'}")
        if went.group.trajectories:
            table = Table("trajectory", "reward", "advantage", "tokens", "trained", "version", box=None, header_style="bold")
            for member in went.group.trajectories:
                version = "-" if member.initial_policy_version is None else str(member.initial_policy_version)
                counted = (str(member.tokens), str(member.trainable_tokens))
                table.add_row(str(member.index), number(member.reward), number(member.advantage), *counted, version)
            console.print(table)
    for refusal in went.refusals:
        console.print(f"  refused at offset {refusal.offset}: {refusal.reason.value}: {refusal.detail}")
    for lost in went.trajectories_refused:
        console.print(f"  trajectory {lost.trajectory} was refused alone: {lost.reason.value}: {lost.detail}")
    if went.status == "unknown":
        raise typer.Exit(1)


def _influence(versions: tuple[int, ...]) -> str:

    if len(versions) == 1:
        return f"version {versions[0]} rests on it"
    return f"versions {ranges_text(versions)} rest on it" if versions else "no version rests on it"


def _sentence(went: GroupLineage) -> str:

    bucket = "the stream" if went.waiting is None or went.waiting.job_id is None else f"job {went.waiting.job_id}"
    match went.status:
        case "trained" if went.trained is not None:
            job = f", job {went.trained.job_id}" if went.trained.job_id is not None else ""
            return (
                f"{went.group_id} was trained on in step {went.trained.step}{job}, which made version {went.trained.policy_version_after}"
            )
        case "waiting" if went.waiting is not None:
            return f"{went.group_id} waits at offset {went.waiting.offset}, in the bucket of {bucket}"
        case "sent" if went.waiting is not None:
            beyond = "beyond what its owner has committed: it waits for more groups, or no worker has read it yet"
            return f"{went.group_id} is at offset {went.waiting.offset}, for {bucket}, {beyond}"
        case "refused":
            return f"{went.group_id} was refused"
    missing = (
        f" Steps {ranges_text(went.unsearched)} have no report, and the log no longer has their groups: it may have been trained on there."
        if went.unsearched
        else ""
    )
    return (
        f"{went.group_id} is unknown: it was not trained on, is not among the refused, and does not wait.{missing} "
        "What could not be read as a group at all is a dead letter"
    )
