"""Which model someone means: by its id, or by its name as `name`, `project/name` or `account/project/name`.

Guarantees: one model, or an error that names what there is. A name belongs to an account and a project: without an account it means the
account of the settings, without a project any project of it, and a name that several projects have is refused with the list of them.
A model is found as soon as its command is in the log. A model's id is accepted after its deletion too, its name is not.
"""

import uuid
from collections.abc import Iterable

from aiokafka.errors import TopicAuthorizationFailedError

from headrace.core.kafka import KafkaUnavailableError
from headrace.core.model_views import ModelView
from headrace.core.models import UnknownModelError, read_models
from headrace.core.settings import Settings
from headrace.core.topic_admin import TopicsDifferError

_NAMED = 10


class AmbiguousModelError(UnknownModelError):
    """Several models have this name."""


def pick_model(views: Iterable[ModelView], wanted: str, *, account: str, project: str | None = None, deleted: bool = False) -> ModelView:
    """The model that is meant. Pure.

    Args:
        views: All models, or those that the asker may know of.
        wanted: Id or name.
        account: Whose names count where `wanted` has none.
        project: Look for names in this project only; None: in all.
        deleted: Where no model that lives has the name, a deleted one may.

    Raises:
        UnknownModelError: there is none.
        AmbiguousModelError: there are several.
    """
    there = list(views)
    if by_id := [view for view in there if view.model_id == wanted]:
        return by_id[0]
    living = [view for view in there if view.status not in {"deleting", "deleted"}]
    found = _named(living, wanted, account, project) or (_named(there, wanted, account, project) if deleted else [])
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(sorted(f"{view.project}/{view.name} ({view.model_id})" for view in found))
        raise AmbiguousModelError(f"several models are named {wanted!r}: {candidates}. Give PROJECT/NAME or the id")
    names = sorted(f"{view.project}/{view.name}" for view in living if view.account == account)
    listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    scope = f"account {account!r}" if project is None else f"project {project!r} of account {account!r}"
    raise UnknownModelError(f"there is no model {wanted!r} in {scope}; models of the account: {listed or 'none'} (`headrace models list`)")


def _named(views: list[ModelView], wanted: str, account: str, project: str | None) -> list[ModelView]:
    """Those of this name; the longest form that fits counts, since a name may hold a slash."""
    own = [view for view in views if view.account == account]
    return (
        [view for view in views if wanted == f"{view.account}/{view.project}/{view.name}"]
        or [view for view in own if wanted == f"{view.project}/{view.name}"]
        or [view for view in own if wanted == view.name and project in {None, view.project}]
    )


async def find_model(settings: Settings, wanted: str, *, project: str | None = None, deleted: bool = False) -> ModelView:
    """The model that is meant, read from the log. Arguments as of `pick_model`.

    Raises:
        UnknownModelError: there is none, or several have the name.
        KafkaUnavailableError: no broker.
        TopicsDifferError: the topics are missing, or the login may not see them.
    """
    model_id = _as_id(wanted)
    views = await read_models(settings, model_id)
    return pick_model(views.values(), model_id or wanted, account=settings.account, project=project, deleted=deleted)


async def known_model_id(settings: Settings, wanted: str) -> str:
    """The id of the model that is meant. A process without the right to read `models` and `commands` gives an id, which is not checked.

    Raises:
        UnknownModelError: there is none, several have the name, or it is a name and names can't be read.
        KafkaUnavailableError: no broker.
    """
    try:
        return (await find_model(settings, wanted)).model_id
    except (TopicsDifferError, KafkaUnavailableError) as error:
        unseen = isinstance(error, TopicsDifferError) or isinstance(error.__cause__, TopicAuthorizationFailedError)
        if unseen and (model_id := _as_id(wanted)) is not None:
            return model_id
        if unseen:
            raise UnknownModelError(f"model {wanted!r} can't be looked up by its name: give its id. {error}") from error
        raise


def _as_id(wanted: str) -> str | None:
    """A model id in its usual form; None: it is a name."""
    try:
        return str(uuid.UUID(wanted))
    except ValueError:
        return None
