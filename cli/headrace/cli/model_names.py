"""How the commands name a model: by its id, or by its name, which may begin with its project."""

import uuid
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.core.settings import Settings

Project = Annotated[str | None, typer.Option("--project", "-p", help="Project of the model; any.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Id or name; PROJECT/NAME where several projects have the name.")]


async def model_id(process: "Settings", project: str | None, model: str) -> str:
    """The id as it is, or that of the name, of a deleted model too.

    With a project nothing is read: whether there is such a model shows when it is.

    Raises:
        UnknownModelError: no model has the name, or several have it.
    """
    from headrace.core.model_names import find_model  # noqa: PLC0415  (aiokafka: `headrace --help` does not wait for it)

    if project is not None:
        return derived_id(process, project, model)
    try:
        return str(uuid.UUID(model))
    except ValueError:
        return (await find_model(process, model, deleted=True)).model_id


def derived_id(process: "Settings", project: str, model: str) -> str:
    """The id as it is, or that of the name in a project. Nothing is read."""
    from headrace.core.models import model_id_of  # noqa: PLC0415  (as above)

    try:
        return str(uuid.UUID(model))
    except ValueError:
        return model_id_of(process.account, project, model)
