"""Which engines serve a model's version, from their acks. Pure.

An engine serves version N of model M under the name that its ack says (`served_as`), or `M@N`. Guarantees: acks of another incarnation of
the model, count for nothing, and an engine that could not take the newest version counts with the one that it goes on with; the newest
version first, and the engine with the fewest requests first. Gives up: whether an engine still lives; who asks finds out, and asks the next
one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.model_views import ModelView
from headrace.gateway.tables import Tables
from headrace.schemas.weights import WeightsApplied

_ARTIFACT = re.compile(r"(?:wandb-artifact:///)?(?P<entity>[^/:]+)/(?P<project>[^/:]+)/(?P<name>[^/:]+)(?::(?P<alias>.+))?")
_STEP = re.compile(r"(?:step|v)(\d+)")


class UnknownNameError(Exception):
    """A model name that means nothing; says what names look like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model, and the version of it that was named; None: the latest."""

    account: str
    project: str | None
    """None: `model_id` is given."""
    name: str | None
    model_id: str | None
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One engine that serves one version."""

    engine_id: str
    base_url: str
    """Ends with `/v1`, without a slash."""
    served_as: str
    version: int


def parse_name(name: str, account: str) -> Wanted:
    """A model's name: `wandb-artifact:///entity/project/name[:stepN]`, with or without the scheme, or a model id, perhaps with `@N`.

    Raises:
        UnknownNameError: neither.
    """
    model_id, at, version = name.partition("@")
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", model_id) and (not at or version.isdigit()):
        return Wanted(account=account, project=None, name=None, model_id=model_id, version=int(version) if at else None)
    found = _ARTIFACT.fullmatch(name)
    if found is None:
        raise UnknownNameError(
            f"model {name[:200]!r} is no name of a model: wandb-artifact:///entity/project/name, with :stepN for a version, or a model id"
        )
    alias = found["alias"]
    step = None if alias in {None, "latest"} else _STEP.fullmatch(alias)
    if alias not in {None, "latest"} and step is None:
        raise UnknownNameError(f"model {name[:200]!r}: {alias!r} is no version: :step3 is the third, :latest or nothing the newest")
    return Wanted(
        account=found["entity"], project=found["project"], name=found["name"], model_id=None, version=int(step[1]) if step else None
    )


def newest_version(tables: Tables, model: ModelView) -> int:
    """The latest version of a model that was published; 0: the base model."""
    published = tables.published.get(model.model_id)
    if published is None or model.state is None or published.incarnation != model.state.incarnation:
        return 0
    return published.policy_version


def engines_of(tables: Tables, model: ModelView, busy: Mapping[str, int], *, at_least: int = 0) -> list[Served]:
    """Engines whose last ack is of this model at this version or a later one: newest version first, then the least busy.

    Those that have fallen silent are left out; but where there is no other they are tried, since one of them may only have lost its way
    to Kafka.

    Args:
        tables: What is known.
        model: Of which model.
        busy: Requests under way, by engine id.
        at_least: The lowest version that counts.
    """
    incarnations = {""} if model.state is None else {"", model.state.incarnation}
    found: list[Served] = []
    silent: set[str] = set()
    for ack in tables.acks.values():
        # Version 0 is the same in every incarnation.
        if ack.model_id != model.model_id or ack.base_url is None or ack.incarnation not in incarnations:
            continue
        # One that could not take the newest goes on with what it has.
        version = ack.policy_version if isinstance(ack, WeightsApplied) else ack.serving
        if version is not None and version >= at_least:
            said = ack.served_as if isinstance(ack, WeightsApplied) else None
            served_as = said or f"{model.model_id}@{version}"
            if tables.is_silent(ack):
                silent.add(ack.engine_id)
            found.append(Served(engine_id=ack.engine_id, base_url=ack.base_url.rstrip("/"), served_as=served_as, version=version))
    found = [served for served in found if served.engine_id not in silent] or found
    return sorted(found, key=lambda served: (-served.version, busy.get(served.engine_id, 0), served.engine_id))
