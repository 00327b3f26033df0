"""How the commands name a model: by its id, or by its name in a project of the settings' account."""

import uuid
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.core.settings import Settings

Project = Annotated[str, typer.Option("--project", "-p", help="Project of the model.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Id, or name in the project.")]


def model_id(process: "Settings", project: str, model: str) -> str:
    """The id as it is, or that of the name. Nothing is asked: whether there is such a model shows when it is read."""
    from headrace.core.models import model_id_of  # noqa: PLC0415  (aiokafka: `headrace --help` does not wait for it)

    try:
        return str(uuid.UUID(model))
    except ValueError:
        return model_id_of(process.account, project, model)
