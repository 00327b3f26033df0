"""`headrace models export MODEL[@VERSION] DIR`: a published version as a Hugging Face folder.

Guarantees: every file is checked against the digest that the ledger committed; DIR appears whole or not at all.
Limitations: GGUF files are not written, since the `gguf` library writes tensors but converts no model: llama.cpp's `convert_hf_to_gguf.py`
reads the folder that `--merge` writes.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import Project, model_id
from headrace.cli.model_history import read_history
from headrace.core.errors import HeadraceError
from headrace.core.importing import importing
from headrace.core.model_views import ModelView
from headrace.core.settings import BaseModelEntry, Settings
from headrace.core.store import fetch_folder, open_store
from headrace.schemas.state import StepRecord


class ExportError(HeadraceError):
    """This version can't be exported."""


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL[@VERSION]", help="Id or name; without a version the newest.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder.")],
    project: Project = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model: a folder that loads alone.")] = False,
) -> None:
    """Write the weights of a version into a folder: a whole model, or a peft adapter (`--merge` makes it whole)."""
    if folder.exists():
        raise typer.BadParameter(f"{folder} exists already: name a new folder", param_hint="DIR")
    name, _, text = model.rpartition("@") if "@" in model else (model, "", "")
    if text and not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is not a policy version: write MODEL@3", param_hint="MODEL[@VERSION]")
    settings = Settings()
    view, record = asyncio.run(_find_version(settings, name, project, int(text) if text else None))
    adapter = view.settings.adaptation == "lora"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".headrace-export-") as aside:
        stored, merged = Path(aside, "stored"), Path(aside, "merged")
        fetch_folder(open_store(settings.store.url, settings.s3), record.weights.uri, record.weights.digest, stored)
        if adapter and merge:
            _merge(_base_model(settings, view.settings.base_model), stored, merged)
        (merged if adapter and merge else stored).rename(folder)
    kind = "peft adapter" if adapter and not merge else "whole model"
    typer.echo(f"{view.name} version {record.policy_version_after}, {kind}: {folder}")


async def _find_version(settings: Settings, model: str, project: str | None, version: int | None) -> tuple[ModelView, StepRecord]:
    history = await read_history(settings, await model_id(settings, project, model))
    found = [record for record in history.records if version in {None, record.policy_version_after}]
    if not found:
        latest = history.records[-1].policy_version_after if history.records else 0
        raise ExportError(f"{history.view.name} has no version {version or 1}: its newest is {latest}, and 0 is its base model")
    return history.view, found[-1]


def _base_model(settings: Settings, name: str) -> BaseModelEntry:
    if (entry := settings.base_models.get(name)) is None:
        raise ExportError(f"the base model {name!r} is not in base_models of the settings: --merge needs its folder")
    return entry


def _merge(base: BaseModelEntry, adapter: Path, folder: Path) -> None:
    """Load base model and adapter on the CPU, add the adapter's product to the weights, and save the sum with the tokenizer."""
    with importing():
        from peft import PeftModel  # noqa: PLC0415 - takes seconds

        from headrace.consumers.worker.base_models import base_source  # noqa: PLC0415
        from headrace.trainer.base_tokenizer import load_tokenizer  # noqa: PLC0415
        from headrace.trainer.model import load_base  # noqa: PLC0415

    source = base_source(base)
    PeftModel.from_pretrained(load_base(source), adapter).merge_and_unload().save_pretrained(folder)
    if (tokenizer := load_tokenizer(source)) is not None:
        tokenizer.save_pretrained(folder)
