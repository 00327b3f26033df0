"""`headrace replay groups`: raw trajectory groups out of the log, into a file, a topic or a pipe."""

import asyncio
import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.model_names import Project, model_id

if TYPE_CHECKING:
    from headrace.consumers.replay.copy import Copied
    from headrace.consumers.replay.groups import Unusable


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
    from headrace.consumers.replay.copy import copy_groups, trained_offsets  # noqa: PLC0415  (`headrace --help` does not wait for it)
    from headrace.consumers.replay.groups import Selection  # noqa: PLC0415
    from headrace.consumers.replay.where import Where  # noqa: PLC0415
    from headrace.core.models import get_model  # noqa: PLC0415
    from headrace.core.settings import Settings  # noqa: PLC0415
    from headrace.core.step_range import StepRange  # noqa: PLC0415

    if to_bootstrap is not None and not to.startswith("topic:"):
        raise typer.BadParameter("it says where a topic is: give --to topic:NAME with it", param_hint="--to-bootstrap")
    first, last = _times(since, until)
    chosen = None if steps is None else StepRange.parse(steps)
    condition = None if where is None else Where.parse(where)
    settings = Settings()

    async def run() -> "Copied":
        view = await get_model(settings, await model_id(settings, project, model))
        shadowed = None if view.state is None else view.state.shadow_of
        offsets = None if chosen is None else await trained_offsets(settings, view.model_id, chosen, shadowed)
        selection = Selection(since=first, until=last, offsets=offsets, group_ids=frozenset(group or ()), where=condition)
        return await copy_groups(settings, shadowed or view.model_id, selection, to, bootstrap=to_bootstrap, say=_say)

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


def _say(found: "Unusable") -> None:
    typer.echo(f"offset {found.offset}: {found.detail}", err=True)


def _times(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    from headrace.core.times import parse_time  # noqa: PLC0415 - as above
    from headrace.schemas.base import utc_now  # noqa: PLC0415 - as above

    now = utc_now()
    first, last = (None if text is None else parse_time(text, now) for text in (since, until))
    if first is not None and last is not None and last <= first:
        raise typer.BadParameter(f"{until} is not after --since {since}", param_hint="--until")
    return first, last
