"""A fork becomes a model: its last state goes into the store, then a command asks the owner of the new model's lane to begin with it.

Guarantees: the command is sent only after every file is durable; a name that lives is refused, by `check_name` before anything runs and
again here, and then nothing stays in the store. Limitations: `forks/<uuid>/` after the owner has made its own snapshot of it, and where
it is not known whether the command was sent: the command may still need it.
"""

import asyncio
import uuid
from pathlib import Path

from headrace.core.model_views import ModelView
from headrace.core.models import ModelRefusedError, UnknownModelError, create_model, get_model, model_id_of
from headrace.core.settings import Settings
from headrace.core.store import ObjectStore, open_store, store_folder
from headrace.schemas.state import StartFrom, StepRecord, TrainingScalars
from headrace.schemas.training import ModelSettings


async def check_name(settings: Settings, project: str, name: str) -> None:
    """Refuse a name that a living model has.

    Raises:
        ModelRefusedError: it does, or these are the settings of a shadow.
    """
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


async def publish_fork(
    settings: Settings, *, project: str, name: str, model: ModelSettings, snapshot: Path, last: StepRecord, scalars: TrainingScalars
) -> ModelView:
    """Store a fork's state and ask for the model.

    Args:
        settings: Of this process; the model will belong to `settings.worker.group`.
        project: Of the new model.
        name: Of the new model.
        model: How it trains on.
        snapshot: Folder with the state.
        last: The last step that the fork has run.
        scalars: Of the state.

    Raises:
        ModelRefusedError: the name was taken meanwhile.
        HeadraceError: the store or the broker is away.
    """
    store = open_store(settings.store.url, settings.s3)
    prefix = f"forks/{uuid.uuid4()}"
    _, stored = await asyncio.to_thread(
        store_folder,
        store,
        f"{prefix}/snapshot",
        snapshot,
        kind="snapshot",
        model_id=last.model_id,
        incarnation=last.incarnation,
        step=last.step,
        attempt=last.attempt,
    )
    start = StartFrom(
        snapshot=stored,
        scalars=scalars,
        forked_from=last.model_id,
        incarnation=last.incarnation,
        step=last.step,
        attempt=last.attempt,
    )
    try:
        return await create_model(settings, project=project, name=name, model=model, start_from=start)
    except ModelRefusedError:
        await asyncio.to_thread(_delete, store, prefix)
        raise


def _delete(store: ObjectStore, prefix: str) -> None:
    for stored in list(store.list(prefix + "/")):
        store.delete(stored.key)
