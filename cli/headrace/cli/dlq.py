"""`headrace dlq list|show|retry|drop`: what could not be read, and what became of it.

A letter holds text of others: characters that a terminal would obey are escaped. `--raw` gives the bytes unchanged.
"""

import asyncio
import base64
import getpass
import os
import socket
import sys
from dataclasses import asdict
from typing import Annotated, Any

import orjson
import typer

from headrace.cli.arguments import Project, model_id, plain, print_table
from headrace.core.dead_letters import CLIENT_ID, DeadLetter, LetterFilter, Original, Place, get_letter, list_letters, open_cut
from headrace.core.kafka import client_options
from headrace.core.model_names import AmbiguousModelError
from headrace.core.models import UnknownModelError
from headrace.core.resolving import Action, Outcome, resolve
from headrace.core.settings import Settings
from headrace.core.times import parse_time
from headrace.schemas.base import utc_now
from headrace.schemas.reasons import DeadLetterReason

app = typer.Typer(
    help="Dead letters: records that could not be read, with their bytes untouched.", no_args_is_help=True, add_completion=False
)

_SHOWN = 2_000
"""Characters of a value that `show` prints."""

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Reason = Annotated[DeadLetterReason | None, typer.Option("--reason", help="Only of this reason.")]
OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Only with this key: a model's id, or its name in the project.")]
Since = Annotated[str | None, typer.Option(help="Only since then: 1h ago (s, m, h, d), or 2026-11-30T08:15:00Z.")]
Places = Annotated[list[str] | None, typer.Argument(metavar="PARTITION:OFFSET", help="Letters, as `list` shows them.")]
Everything = Annotated[bool, typer.Option("--all", help="All unresolved letters that match.")]
By = Annotated[str | None, typer.Option(help="Who does it; written down. Default: user and machine.")]


@app.command("list")
def list_(  # noqa: PLR0917 - typer passes them by name
    reason: Reason = None,
    model: OfModel = None,
    project: Project = None,
    since: Since = None,
    resolved: Annotated[bool, typer.Option("--all", help="Those that were sent again or dropped too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first."""
    process = Settings()
    letters = asyncio.run(list_letters(process, _filter(process, reason, model, project, since, resolved=resolved)))
    if as_json:
        typer.echo(orjson.dumps([_as_dict(letter) for letter in letters]))
        return
    columns = ["letter", "since (UTC)", "reason", "from", "key", "bytes", "detail", *(["what became of it"] if resolved else [])]
    rows = []
    for letter in letters:
        size = "null" if letter.size is None else str(letter.size)
        fault = f"{letter.path}: {letter.detail}" if letter.path else letter.detail
        source = f"{letter.topic} {letter.partition}:{letter.offset}"
        cells = [str(letter.place), f"{letter.written_at:%Y-%m-%d %H:%M:%S}", letter.reason, source, _text(letter.key), size, fault]
        rows.append([*map(plain, cells), *([_fate(letter)] if resolved else [])])
    print_table(columns, rows, important=("letter", "reason", columns[-1], "detail", "from", "key"), right={"bytes"})


@app.command()
def show(
    place: Annotated[str, typer.Argument(metavar="PARTITION:OFFSET", help="A letter, as `list` shows it.")],
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Nothing but the original's value, byte for byte.")] = False,
) -> None:
    """Show a dead letter: what is wrong, the original's headers, and its value."""
    if raw and as_json:
        raise typer.BadParameter("--raw gives bytes, --json gives JSON: leave one of them out", param_hint="--raw")
    letter, original = asyncio.run(get_letter(Settings(), Place.parse(place)))
    if raw:
        if letter.cut is not None:
            original = asyncio.run(open_cut(client_options(Settings().kafka, CLIENT_ID), letter))
        if original.value is None:
            typer.echo("the original has no value", err=True)
        sys.stdout.buffer.write(original.value or b"")
        sys.stdout.flush()
    elif as_json:
        typer.echo(orjson.dumps(_as_dict(letter) | _encoded("value", original.value)))
    else:
        _print(letter, original)


@app.command()
def retry(  # noqa: PLR0917 - typer passes them by name
    places: Places = None,
    everything: Everything = False,
    reason: Reason = None,
    model: OfModel = None,
    project: Project = None,
    since: Since = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Send the original records again, each once, to where they came from (after `wrong_lane`: to the partition of their key)."""
    _resolve("retried", places, everything, (reason, model, project, since), by, as_json=as_json)


@app.command()
def drop(  # noqa: PLR0917 - typer passes them by name
    places: Places = None,
    everything: Everything = False,
    reason: Reason = None,
    model: OfModel = None,
    project: Project = None,
    since: Since = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Decide to forget letters: they are listed no more. The records stay until retention takes them."""
    _resolve("dropped", places, everything, (reason, model, project, since), by, as_json=as_json)


def _resolve(
    action: Action,
    places: list[str] | None,
    everything: bool,
    which: tuple[DeadLetterReason | None, str | None, str | None, str | None],
    by: str | None,
    *,
    as_json: bool,
) -> None:

    reason, model, project, since = which
    if everything == bool(places):
        raise typer.BadParameter("name letters, or say --all", param_hint="PARTITION:OFFSET")
    if not everything and (reason, model, since) != (None, None, None):
        raise typer.BadParameter("--reason, --model and --since choose among --all", param_hint="--all")
    process = Settings()
    wanted = _filter(process, reason, model, project, since) if everything else [Place.parse(place) for place in places or ()]
    outcomes = asyncio.run(resolve(process, action, wanted, by=by or _somebody()))
    if as_json:
        typer.echo(orjson.dumps([_outcome(outcome) for outcome in outcomes]))
    elif not outcomes:
        typer.echo("no dead letter waits that fits")
    for outcome in outcomes:
        if outcome.refused is not None:
            typer.echo(f"{outcome.place}: {outcome.refused}", err=True)
        elif outcome.resolved is not None and not as_json:
            done = outcome.resolved
            where = f" to {done.topic} partition {done.new_partition} offset {done.new_offset}" if done.action == "retried" else ""
            typer.echo(f"{outcome.place} {done.action}{where}")
    if any(outcome.refused for outcome in outcomes):
        raise typer.Exit(1)


def _filter(
    process: Settings,
    reason: DeadLetterReason | None,
    model: str | None,
    project: str | None,
    since: str | None,
    *,
    resolved: bool = False,
) -> LetterFilter:

    return LetterFilter(
        reason=None if reason is None else reason.value,
        # As it was given too: a letter of an unknown model may have any key.
        keys=None if model is None else _keys(process, project, model),
        since=None if since is None else parse_time(since, utc_now()),
        resolved=resolved,
    )


def _keys(process: Settings, project: str | None, model: str) -> frozenset[str]:

    try:
        return frozenset({model, asyncio.run(model_id(process, project, model))})
    except AmbiguousModelError:
        raise
    except UnknownModelError:
        return frozenset({model})


def _somebody() -> str:

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name (KeyError until Python 3.12)
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _as_dict(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter": str(letter.place),
        "reason": letter.reason,
        "path": letter.path,
        "detail": letter.detail,
        "error_type": letter.error_type,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "sent_at": letter.sent_at,
        "written_at": letter.written_at,
        "bytes": letter.size,
        "cut": None if letter.cut is None else asdict(letter.cut),
        **_encoded("key", letter.key),
        "headers": [{"name": name, **_encoded("value", value)} for name, value in letter.headers],
        "resolved": None if letter.resolved is None else letter.resolved.model_dump(mode="json"),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    done = outcome.resolved
    return {
        "letter": str(outcome.place),
        "refused": outcome.refused,
        "resolved": None if done is None else done.model_dump(mode="json"),
    }


def _encoded(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes as JSON: as text, or, where they are no text, in base64 under the name NAME_base64."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _fate(letter: DeadLetter) -> str:
    done = letter.resolved
    if done is None:
        return "waits"
    where = f" to {done.topic} {done.new_partition}:{done.new_offset}" if done.action == "retried" else ""
    return plain(f"{done.action}{where} by {done.by}, {done.resolved_at:%Y-%m-%d %H:%M:%S}")


def _print(letter: DeadLetter, original: Original) -> None:
    sent = "" if letter.sent_at is None else f", written {letter.sent_at:%Y-%m-%d %H:%M:%S} UTC"
    lines = [
        ("letter", f"{letter.place}, since {letter.written_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("reason", letter.reason),
        ("path", letter.path),
        ("detail", letter.detail),
        ("error type", letter.error_type),
        ("from", f"{letter.topic} partition {letter.partition} offset {letter.offset}{sent}"),
        ("key", _text(letter.key)),
        *((f"header {name}", _text(value)) for name, value in letter.headers),
        ("became of it", _fate(letter)),
        ("value", "null" if original.value is None else f"{letter.size} bytes"),
    ]
    if letter.cut is not None:
        has = f"{len(letter.key or b'')} bytes of {letter.cut.key_bytes} of the key, {len(letter.headers)} of {letter.cut.headers} headers"
        value = f"{len(original.value or b'')} bytes of the value"
        lines.append(("cut", f"the record is too large for a letter, which has {has} and {value}"))
        lines.append(
            ("SHA-256", f"{letter.cut.sha256} of the whole record, which --raw and retry read where it is, until retention takes it")
        )
    for name, value in lines:
        typer.echo(f"{plain(name)}: {plain(value)}")
    if original.value:
        text = _text(original.value)
        typer.echo("\n".join(plain(line) for line in text[:_SHOWN].splitlines()))
        if len(text) > _SHOWN:
            more = f"{len(text) - _SHOWN} more characters" if letter.cut is None else "more"
            typer.echo(f"… and {more}: --raw prints the whole value")


def _text(data: bytes | None) -> str:
    return "null" if data is None else data.decode(errors="backslashreplace")
