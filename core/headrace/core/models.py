"""Models as everyone but their owner sees them: states in `models`, with the commands folded over them that no owner has read yet.

Guarantees: a model shows as soon as its command is in the log, also with no worker alive; commands are idempotent (the id derives from
account, project and name). Limitations: what a command leads to is the owner's to say; until then the view says `creating`, `resuming` or
`deleting`.
"""

import re
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace

import orjson

from headrace.core.commands import commands_through, lane_states, read_lanes, send_command
from headrace.core.deadline import deadline
from headrace.core.errors import HeadraceError
from headrace.core.kafka import client_options
from headrace.core.kafka_outage import folding
from headrace.core.lanes import lane_of
from headrace.core.model_views import ModelView, created_view, fold, latest_states
from headrace.core.settings import Settings
from headrace.core.topic_admin import lane_count
from headrace.schemas.base import unknown_fields
from headrace.schemas.commands import CreateModel, DeleteModel, ResumeModel
from headrace.schemas.state import StartFrom
from headrace.schemas.training import ModelSettings
from headrace.schemas.weights import WeightsRef

_NAMESPACE = uuid.UUID("9d3f2a64-54b0-5c1e-8a52-1f1c0a6f7be3")
_SOURCE = "headrace/models"


class UnknownModelError(HeadraceError):
    """There is no such model."""


class ModelNotReadyError(HeadraceError):
    """No worker has read a model's command yet."""


class ModelRefusedError(HeadraceError):
    """A model that can't be created as asked; says which field and what is possible.

    Args:
        message: For people.
        field: The one that is at fault, where one is; None: what was asked for contradicts what is there.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def model_id_of(account: str, project: str, name: str) -> str:
    """The id of a model: a UUID5, so that the process that asks for the same model means the same id."""
    return str(uuid.uuid5(_NAMESPACE, orjson.dumps([account, project, name]).decode()))


_MODEL_NAME = re.compile(r"(?:wandb-artifact:///)?([^/:@]+)/([^/:@]+)/([^/:@]+)")


def names_model(name: str, model_id: str) -> bool:
    """Whether a name without a version (`wandb-artifact:///entity/project/name`, or a model id) is that of a model."""
    found = _MODEL_NAME.fullmatch(name)
    return name == model_id or (found is not None and model_id_of(*found.groups()) == model_id)


async def create_model(
    settings: Settings,
    *,
    project: str,
    name: str,
    model: ModelSettings,
    account: str | None = None,
    start_from: StartFrom | None = None,
    start_weights: WeightsRef | None = None,
    shadow_of: str | None = None,
) -> ModelView:
    """Ask for a model; one that lives already with the same settings is returned as it is.

    Args:
        settings: Of this process; the model will belong to `settings.worker.group`.
        project: Project.
        name: Name, unique in the project.
        model: What is trained and how; fixed from now on.
        account: Owner; None: `settings.account`.
        start_from: A stored state that it begins with; None: the base model.
        start_weights: Stored weights of a model with the same base model, adaptation and adapter settings (`uri` and `digest` of a
            published version): its version 0 is these. Not together with `start_from`.
        shadow_of: Id of the model, under `worker.shadow_prefix`, whose groups it trains on; needed there, and only there.

    Raises:
        ModelRefusedError: the base model is unknown or can't be trained that way, a name is not usable, or the model lives with
            other settings or start weights; with `start_from`, that it lives at all; the model to shadow can't be shadowed.
        KafkaUnavailableError: no broker; nothing was sent, or it is not known: repeating is harmless.
    """
    account = account or settings.account
    check_new_model(settings, model, account=account, project=project, name=name)
    if start_from is not None and start_weights is not None:
        raise ModelRefusedError("start_from and start_weights exclude each other: both say what the model begins with")
    model_id = model_id_of(account, project, name)
    if shadow_of is not None:
        await _check_shadow(settings, model_id, name, shadow_of)
    elif settings.worker.shadow_prefix is not None:
        raise ModelRefusedError(
            f"worker group {settings.worker.group!r} shadows the models under {settings.worker.shadow_prefix!r} (worker.shadow_prefix): "
            "say which with --shadow-of, or create the model with settings without worker.shadow_prefix"
        )
    command = CreateModel(
        model_id=model_id,
        account=account,
        project=project,
        name=name,
        settings=model,
        worker_group=settings.worker.group,
        shadow_of=shadow_of,
        start_from=start_from,
        start_weights=start_weights,
    )
    known = living_model((await read_models(settings, model_id)).get(model_id), command)
    if known is not None:
        return known
    place = await send_command(settings, command, source=_SOURCE, shadow_of=shadow_of)
    return replace(created_view(command), command=place)


def living_model(known: ModelView | None, command: CreateModel) -> ModelView | None:
    """The model that a command asks for, if it lives already; None: the command is to be written. Pure.

    Raises:
        ModelRefusedError: it lives with other settings or start weights, or `start_from` asks for a new one.
    """
    project, name = command.project, command.name
    if known is not None and known.shadow_of != command.shadow_of:
        # Also a deleted one: an id stays on one lane.
        there = "is no shadow" if known.shadow_of is None else f"is a shadow of {known.shadow_of}"
        raise ModelRefusedError(f"project {project!r} has had a model {name!r} already, which {there}: take another name")
    if known is None or known.status in {"deleted", "deleting"}:
        return None
    if command.start_from is not None:
        raise ModelRefusedError(f"project {project!r} has a model {name!r} already: take another name, or delete it first")
    if known.start_weights != command.start_weights:
        begun = "the base model" if known.start_weights is None else known.start_weights.uri
        raise ModelRefusedError(
            f"model {name!r} of project {project!r} exists, and began with {begun}: take another name, or delete it first"
        )
    if known.settings != command.settings or known.worker_group != command.worker_group:
        there_settings = known.settings.model_dump()
        differing = sorted(k for k, v in command.settings.model_dump().items() if v != there_settings.get(k))
        raise ModelRefusedError(
            f"model {name!r} of project {project!r} exists with other settings ({', '.join(differing) or 'worker.group'}), which are fixed "
            "at creation: take another name, or delete it first"
        )
    return known


async def delete_model(settings: Settings, model_id: str) -> ModelView:
    """Ask for a model's deletion; its state stays and refuses groups.

    Raises:
        UnknownModelError: there is none.
        KafkaUnavailableError: no broker.
    """
    known = await get_model(settings, model_id)
    if known.status in {"deleted", "deleting"}:
        return known
    place = await send_command(settings, DeleteModel(model_id=model_id), source=_SOURCE, shadow_of=known.shadow_of)
    return replace(known, status="deleting", command=place)


async def get_model(settings: Settings, model_id: str) -> ModelView:
    """One model; a deleted one too.

    Raises:
        UnknownModelError: there is none.
        KafkaUnavailableError: no broker.
    """
    found = (await read_models(settings, model_id)).get(model_id)
    if found is None:
        raise UnknownModelError(f"there is no model {model_id}: `headrace models list` shows those there are")
    return found


async def list_models(
    settings: Settings, *, account: str | None = None, project: str | None = None, deleted: bool = False
) -> list[ModelView]:
    """All models, those of an account or project, by account, project and name; deleted ones only if asked for.

    Raises:
        KafkaUnavailableError: no broker.
    """
    views = (await read_models(settings, None)).values()
    chosen = [
        view
        for view in views
        if (account is None or view.account == account)
        and (project is None or view.project == project)
        and (deleted or view.status != "deleted")
    ]
    return sorted(chosen, key=lambda view: (view.account, view.project, view.name))


async def resume_model(settings: Settings, model_id: str) -> ModelView:
    """Ask that a model that is stopped or has diverged continues.

    A diverged one continues from what could be run again of its steps, as a new version; groups that were lost are refused as `expired`.

    Raises:
        UnknownModelError: there is none.
        ModelRefusedError: it is neither stopped nor diverged.
        KafkaUnavailableError: no broker.
    """
    known = await get_model(settings, model_id)
    if known.status == "resuming":
        return known
    if known.status not in {"stopped", "diverged"}:
        raise ModelRefusedError(f"model {known.name} ({model_id}) is {known.status}: only one that is stopped or diverged can be resumed")
    place = await send_command(settings, ResumeModel(model_id=model_id), source=_SOURCE, shadow_of=known.shadow_of)
    return replace(known, status="resuming", command=place)


async def wait_for_model(settings: Settings, view: ModelView, seconds: float) -> ModelView:
    """Wait until the owner of its lane has done what was asked for (created, deleted, resumed), by following `models`.

    A model that was resumed may be stopped or diverged after it, with another detail: the owner found that it still can't continue.

    Args:
        settings: Of this process.
        view: What `create_model`, `delete_model` or `resume_model` returned.
        seconds: Give up after.

    Raises:
        ModelNotReadyError: no worker has answered by then, or one is still at it.
    """
    if view.command is None:
        return view
    reached = {"deleted"} if view.status == "deleting" else {"active", "waiting", "stopped", "diverged"}
    lane, offset = view.command
    taken_up = False
    try:
        with folding(lambda: client_options(settings.kafka, "headrace-models")):
            async with deadline(seconds), aclosing(lane_states(settings, lane)) as batches:
                async for states in batches:
                    now = fold(states, []).get(view.model_id)
                    taken_up = commands_through(states).get(lane, 0) > offset
                    # The lane's record and the model's are of one transaction, but may come in two batches.
                    if taken_up and now is not None and now.status in reached and (now.state is None or now.state.rebasing is None):
                        return now
    except TimeoutError as error:
        whom = f"{view.name} ({view.model_id})"
        if taken_up:
            said = f"a worker has taken up {whom} and is not done within {seconds:g} s: `headrace models show` tells what comes of it"
        else:
            said = (
                f"no worker has taken up {whom} within {seconds:g} s: is one of group {view.worker_group!r} running (`headrace worker`)? "
                "The command stays in the log and is read when one starts"
            )
        raise ModelNotReadyError(said) from error
    raise AssertionError("follow does not end")


def check_new_model(settings: Settings, model: ModelSettings, *, account: str, project: str, name: str) -> None:
    """Check what can be known of a new model without asking Kafka.

    Raises:
        ModelRefusedError: a name is not usable, the base model is unknown or can't be trained that way, or a setting is unknown.
    """
    _check_names(account=account, project=project, name=name)
    check_base_model(settings, model)
    if unknown := [".".join(map(str, path)) for path in unknown_fields(model)]:
        raise ModelRefusedError(f"{', '.join(unknown[:10])}: no such setting of a model (docs/training.md lists them)", unknown[0])


def check_base_model(settings: Settings, model: ModelSettings) -> None:
    """Raise `ModelRefusedError` unless the catalogue has the base model and lets it be trained that way."""
    entry = settings.base_models.get(model.base_model)
    if entry is None:
        there = ", ".join(sorted(settings.base_models)) or "none: name some under base_models in the file that HEADRACE_CONFIG names"
        raise ModelRefusedError(f"base_model: {model.base_model!r} is not in the catalogue; there are {there}", "base_model")
    if model.adaptation not in entry.trainable:
        raise ModelRefusedError(
            f"adaptation: {model.base_model!r} can be trained as {' or '.join(entry.trainable)}, not {model.adaptation}", "adaptation"
        )


async def shadowed_model(settings: Settings, model_id: str) -> ModelView:
    """A model of the worker group that this configuration shadows.

    Raises:
        ModelRefusedError: this configuration shadows none, or the model can't be shadowed; says why.
        KafkaUnavailableError: no broker.
    """
    return _shadowed(settings, model_id, await _read_shadowed(settings))


async def _read_shadowed(settings: Settings) -> dict[str, ModelView]:
    prefix = settings.worker.shadow_prefix
    if prefix is None:
        raise ModelRefusedError(
            "this configuration shadows no worker group: set worker.shadow_prefix to the topic prefix of the models to shadow, and "
            "topics.prefix to one of its own"
        )
    topics = settings.topics.model_copy(update={"prefix": prefix})
    return await read_models(settings.model_copy(update={"topics": topics}), None)


def _shadowed(settings: Settings, model_id: str, there: Mapping[str, ModelView]) -> ModelView:
    where = f"under {settings.worker.shadow_prefix!r} (worker.shadow_prefix)"
    known = there.get(model_id)
    if known is None or known.status in {"deleted", "deleting"}:
        names = ", ".join(sorted(f"{view.project}/{view.name}" for view in there.values() if view.status not in {"deleted", "deleting"}))
        raise ModelRefusedError(f"shadow_of: there is no model {model_id} {where}, or it was deleted; there are: {names or 'none'}")
    if known.shadow_of is not None:
        raise ModelRefusedError(
            f"shadow_of: model {known.name!r} {where} is a shadow itself: set worker.shadow_prefix to the prefix that it shadows, and "
            f"shadow {known.shadow_of}"
        )
    return known


async def _check_shadow(settings: Settings, model_id: str, name: str, shadow_of: str) -> None:
    there = await _read_shadowed(settings)
    _shadowed(settings, shadow_of, there)
    if model_id in there:
        raise ModelRefusedError(
            f"name: {name!r} is the name of a model under {settings.worker.shadow_prefix!r}, and both would have one id: give the shadow a "
            "name of its own"
        )


async def read_models(settings: Settings, model_id: str | None) -> dict[str, ModelView]:
    """Views of all models, or of those on one model's lane."""
    options, topics = client_options(settings.kafka, "headrace-models"), settings.topic_names
    lanes = await lane_count(options, topics)
    if model_id is not None:
        states, commands = await read_lanes(options, topics, [lane_of(model_id, lanes)])
        views = fold(latest_states(states), commands)
        if model_id in views:
            return views
    # A shadow is on the lane of the model that it shadows, which only its own records tell.
    states, commands = await read_lanes(options, topics, None)
    return fold(latest_states(states), commands)


def _check_names(**names: str) -> None:
    for field, value in names.items():
        if not 1 <= len(value) <= 128 or not value.isprintable() or value != value.strip():
            raise ModelRefusedError(f"{field}: {value[:140]!r} must have 1 to 128 printable characters, without blanks around them", field)
