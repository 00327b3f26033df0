"""`headrace models create|list|show|resume|delete`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
import yaml

from headrace.cli.arguments import Model, Project, derived_id, model_id, print_table
from headrace.cli.export import export
from headrace.cli.model_settings import model_settings
from headrace.core import models, presets
from headrace.core.model_views import ModelView
from headrace.core.settings import Settings

app = typer.Typer(
    help="Models: created and deleted by command, trained by the worker of their group.", no_args_is_help=True, add_completion=False
)

_STOPPED = {"stopped", "diverged"}
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until a worker has taken it up.")]
Seconds = Annotated[float, typer.Option("--timeout", min=0, help="Seconds that --wait waits at most.")]


@app.command()
def create(  # noqa: PLR0917 - typer passes them by name
    name: Annotated[str, typer.Argument(help="Name, unique in the project.")],
    base_model: Annotated[str | None, typer.Option(help="Name in the catalogue (base_models in the settings).")] = None,
    project: Annotated[str, typer.Option("--project", "-p", help="Project of the model.")] = "default",
    full: Annotated[bool | None, typer.Option("--full/--lora", help="Train all parameters, or a LoRA adapter (default).")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the adapter.")] = None,
    groups_per_step: Annotated[int | None, typer.Option(help="Groups that make a batch of the stream.")] = None,
    preset: Annotated[str | None, typer.Option(help="Options of a method: grpo, dapo or gspo; what --settings says wins over it.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's rate.")] = None,
    max_policy_lag: Annotated[int | None, typer.Option(help="Refuse groups sampled more versions ago.")] = None,
    max_sequence_tokens: Annotated[int | None, typer.Option(help="Refuse longer trajectories.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the model.")] = None,
    settings: Annotated[Path | None, typer.Option(help="JSON or YAML file with all settings; options win over it.")] = None,
    shadow_of: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Train on the groups of this model under worker.shadow_prefix; its settings are the defaults."),
    ] = None,
    wait: Wait = False,
    timeout: Seconds = 120,
    as_json: AsJson = False,
) -> None:
    """Create a model and print its id. A model that lives already with the same settings is left as it is."""
    if full and lora_rank is not None:
        raise typer.BadParameter("it is of an adapter, but --full trains all parameters: leave one of them out", param_hint="--lora-rank")
    options = {
        "base_model": base_model,
        "adaptation": None if full is None else ("full" if full else "lora"),
        "lora.r": lora_rank,
        "batch.groups_per_step": groups_per_step,
        "train.learning_rate": learning_rate,
        "max_policy_lag": max_policy_lag,
        "max_sequence_tokens": max_sequence_tokens,
        "seed": seed,
    }

    async def run() -> ModelView:
        shadowed = None if shadow_of is None else await models.shadowed_model(process, derived_id(process, project, shadow_of))
        below = None if shadowed is None else shadowed.settings
        wanted = model_settings(settings, options, None if preset is None else presets.preset(preset), below)
        source = None if shadowed is None else shadowed.model_id
        view = await models.create_model(process, project=project, name=name, model=wanted, shadow_of=source)
        return await models.wait_for_model(process, view, timeout) if wait else view

    process = Settings()
    view = asyncio.run(run())
    _print_one(view, as_json) if as_json else typer.echo(view.model_id)
    _fail_if_stopped(view)


app.command()(export)


@app.command("list")
def list_(
    project: Annotated[str | None, typer.Option("--project", "-p", help="Only this project.")] = None,
    account: Annotated[str | None, typer.Option(help="Only this account.")] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted models too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List models, also those that no worker has taken up yet."""
    views = asyncio.run(models.list_models(Settings(), account=account, project=project, deleted=deleted))
    if as_json:
        typer.echo(orjson.dumps([_as_dict(view) for view in views]))
        return
    rows = []
    for view in views:
        version, groups = (view.state.policy_version, view.state.groups_trained) if view.state else (0, 0)
        trained, base = view.settings.adaptation, view.settings.base_model
        rows.append([view.project, view.name, view.model_id, base, trained, view.status, str(version), str(groups)])
    columns = ("project", "name", "id", "base model", "trained", "status", "version", "groups")
    print_table(
        columns, rows, important=("name", "status", "version", "groups", "base model", "trained", "project"), right={"version", "groups"}
    )
    for view in views:
        if view.status in _STOPPED:
            typer.echo(f"{view.name} is {view.status}: {view.status_detail}\n  To resume it: headrace models resume {view.model_id}")
        elif view.status == "waiting":
            typer.echo(f"{view.name} is waiting: {view.status_detail}\n  It resumes by itself when that is repaired.")
        if view.state is not None and view.state.unknown_versions:
            names = "\n  ".join(view.state.unknown_versions)
            typer.echo(f"{view.name} has published versions that its ledger does not know (Kafka has lost their records):\n  {names}")


@app.command()
def show(model: Model, project: Project = None, as_json: AsJson = False) -> None:
    """Show a model: its state as its owner wrote it last, and its settings."""

    async def run() -> ModelView:
        return await models.get_model(process, await model_id(process, project, model))

    process = Settings()
    _print_one(asyncio.run(run()), as_json)


@app.command()
def resume(model: Model, project: Project = None, wait: Wait = False, timeout: Seconds = 120, as_json: AsJson = False) -> None:
    """Resume a model that is stopped or has diverged.

    A diverged model resumes from the last step that a rerun could reproduce, as a new version that the ledger marks `rebased`. Lost groups
    are rejected as `expired`. Exit code 1 if it is stopped or diverged again.
    """

    async def run() -> ModelView:
        view = await models.resume_model(process, await model_id(process, project, model))
        return await models.wait_for_model(process, view, timeout) if wait else view

    process = Settings()
    view = asyncio.run(run())
    _print_one(view, as_json) if as_json else typer.echo(f"{view.model_id} {view.status}")
    _fail_if_stopped(view)


@app.command()
def delete(model: Model, project: Project = None, wait: Wait = False, timeout: Seconds = 120) -> None:
    """Delete a model: from then on its groups are refused. Its weights and its history stay."""

    async def run() -> ModelView:
        view = await models.delete_model(process, await model_id(process, project, model))
        return await models.wait_for_model(process, view, timeout) if wait else view

    process = Settings()
    view = asyncio.run(run())
    typer.echo(f"{view.model_id} {view.status}")


def _fail_if_stopped(view: ModelView) -> None:
    if view.status in _STOPPED:
        typer.echo(f"The model is {view.status}: {view.status_detail}", err=True)
        raise typer.Exit(1)


def _as_dict(view: ModelView) -> dict[str, Any]:
    return {
        "id": view.model_id,
        "account": view.account,
        "project": view.project,
        "name": view.name,
        "status": view.status,
        "status_detail": view.status_detail,
        "worker_group": view.worker_group,
        "shadow_of": view.shadow_of,
        "created_at": view.created_at,
        "policy_version": view.state.policy_version if view.state else 0,
        "settings": view.settings.model_dump(mode="json"),
        "state": view.state.model_dump(mode="json", exclude={"settings"}) if view.state else None,
    }


def _print_one(view: ModelView, as_json: bool) -> None:

    text = orjson.dumps(_as_dict(view))
    # Through JSON, so that times and numbers read the same in both.
    typer.echo(text if as_json else yaml.safe_dump(orjson.loads(text), sort_keys=False, allow_unicode=True).rstrip())
