"""What gateways keep of deployments: that one is wanted, and what its engines are asked to load. In the compacted topic `gateway`.

Guarantees: a request to load names the weights themselves (a version with its digest), so an engine needs nothing else to follow it. Of all
that a deployment's engines are asked for of one model, by these records and by `WeightsPublished.rollout_deployments`, the latest version
counts: an engine does not go back. Engines know deployments by their ids alone, so an id is one account's. Limitations: an id that two
accounts take in one moment.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from headrace.schemas.base import Record, utc_now
from headrace.schemas.weights import WeightsPublished

PromptCacheReset = Literal["all", "none", "new_session"]


class DeploymentFact(Record):
    """A deployment. Key `deployment/<account>/<id>`. Its engines are started with that id (`headrace engine --deployment`)."""

    account: str
    id: str
    owner: str
    base_model: str
    """Name in the catalogue."""
    request: dict[str, Any]
    """What was asked for: the API's JSON in normal form, without secrets."""
    created_at: datetime = Field(default_factory=utc_now)
    updated_at: datetime = Field(default_factory=utc_now)


class LoadRequest(Record):
    """The engines of a deployment are asked to serve a version."""

    account: str
    deployment: str
    published: WeightsPublished
    """The version, as `weights` had it; without its list of files, which the manifest has."""
    requested_at: datetime = Field(default_factory=utc_now)


class DeployedModel(LoadRequest):
    """A model by name on a deployment. Key `deployed-model/<account>/<id>`."""

    removed_at: datetime | None = None
    """Engines are no longer asked to have it."""

    id: str
    model: str
    """Id of the model's name."""
    owner: str
    display_name: str = ""
    description: str = ""
    default: bool = False
    public: bool = False
    created_at: datetime = Field(default_factory=utc_now)


class HotLoad(LoadRequest):
    """The snapshot that a deployment was asked to load last. Key `hot-load/<account>/<deployment>`."""

    identity: str
    reset_prompt_cache: PromptCacheReset = "all"


def deployment_key(account: str, deployment: str) -> str:
    """The key of a deployment."""
    return f"deployment/{account}/{deployment}"


def deployed_model_key(account: str, deployed_model: str) -> str:
    """The key of a model on a deployment."""
    return f"deployed-model/{account}/{deployed_model}"


def hot_load_key(account: str, deployment: str) -> str:
    """The key of the snapshot that a deployment was asked to load."""
    return f"hot-load/{account}/{deployment}"
