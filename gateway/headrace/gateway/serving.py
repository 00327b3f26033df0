"""Which version a model's name means, and which engines serve it, from their acks. Pure.

An engine serves version N of model M under the name that its ack says (`served_as`), or `M@N`. Guarantees: an ack of another incarnation
of the model is ignored; an engine that could not load the newest version counts with the version that it still serves; the newest version
comes first, then the engine with the fewest requests. Limitations: an engine in the list may have died since its last ack; the caller tries
the next one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.core.model_views import ModelView
from headrace.gateway.tables import Tables
from headrace.schemas.weights import WeightsApplied, WeightsFailed

MODEL_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ARTIFACT = re.compile(r"(?:wandb-artifact:///)?(?P<entity>[^/:]+)/(?P<project>[^/:]+)/(?P<name>[^/:]+)(?::(?P<alias>.+))?")
_STEP = re.compile(r"(?:step|v)([0-9]{1,18})")
_ID = re.compile(rf"(?P<id>{MODEL_ID.pattern})(?:@(?P<version>[0-9]{{1,18}}))?")


class UnknownNameError(Exception):
    """A model name that means nothing; says what names look like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model, and the version that a request names; None: the newest one."""

    account: str
    project: str | None
    """None: `model_id` is given."""
    name: str | None
    model_id: str | None
    version: int | None
    latest_served: bool = False
    """The newest version that an engine serves now will do, although a newer one may be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One engine that serves one version."""

    engine_id: str
    base_url: str
    """Ends with `/v1`, without a slash."""
    served_as: str
    version: int


def without_latest_served(name: str) -> tuple[str, bool]:
    """A name without the ending `@latest-served` (or `:latest-served`), and whether it had one."""
    bare = name.removesuffix("@latest-served").removesuffix(":latest-served")
    return bare, bare != name


def parse_name(name: str, account: str) -> Wanted:
    """A model's name: `wandb-artifact:///entity/project/name[:stepN]`, with or without the scheme, or a model id, perhaps with `@N`.

    Either may end with `@latest-served` instead of a version.

    Raises:
        UnknownNameError: The name has neither form.
    """
    bare, latest_served = without_latest_served(name)
    wanted = _parse(bare, account)
    if latest_served and wanted.version is not None:
        raise UnknownNameError(f"model {name[:200]!r} names a version and @latest-served: leave one of them out")
    return replace(wanted, latest_served=latest_served)


def _parse(name: str, account: str) -> Wanted:
    if (said := _ID.fullmatch(name)) is not None:
        version = None if said["version"] is None else int(said["version"])
        return Wanted(account=account, project=None, name=None, model_id=said["id"], version=version)
    found = _ARTIFACT.fullmatch(name)
    if found is None:
        raise UnknownNameError(
            f"model {name[:200]!r} is no name of a model: wandb-artifact:///entity/project/name, with :stepN for a version, or a model id"
        )
    alias = found["alias"]
    step = None if alias in {None, "latest"} else _STEP.fullmatch(alias)
    if alias not in {None, "latest"} and step is None:
        raise UnknownNameError(
            f"model {name[:200]!r}: {alias!r} is no version: :step3 is the third, :latest or nothing is the newest, and :latest-served is "
            "the newest that an engine serves now"
        )
    return Wanted(
        account=found["entity"], project=found["project"], name=found["name"], model_id=None, version=int(step[1]) if step else None
    )


def newest_version(tables: Tables, model: ModelView) -> int:
    """The latest version of a model that was published; 0: the base model."""
    published = tables.published.get(model.model_id)
    if published is None or model.state is None or published.incarnation != model.state.incarnation:
        return 0
    return published.policy_version


def load_failures(tables: Tables, model: ModelView, version: int) -> list[str]:
    """Why engines could not load a version of a model, a sentence for each engine that said so last; at most five."""
    incarnation = model.incarnation or ""
    failed = (
        ack
        for ack in tables.acks.values()
        if isinstance(ack, WeightsFailed) and (ack.model_id, ack.incarnation, ack.policy_version) == (model.model_id, incarnation, version)
    )
    return [f"engine {ack.engine_id.partition(':')[0]} failed: {ack.error[:200]}" for ack in list(failed)[:5]]


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
        # One that could not take the newest continues with what it has.
        version = ack.policy_version if isinstance(ack, WeightsApplied) else ack.serving
        if version is not None and version >= at_least:
            said = ack.served_as if isinstance(ack, WeightsApplied) else None
            served_as = said or f"{model.model_id}@{version}"
            if tables.is_silent(ack):
                silent.add(ack.engine_id)
            found.append(Served(engine_id=ack.engine_id, base_url=ack.base_url.rstrip("/"), served_as=served_as, version=version))
    found = [served for served in found if served.engine_id not in silent] or found
    return sorted(found, key=lambda served: (-served.version, busy.get(served.engine_id, 0), served.engine_id))
