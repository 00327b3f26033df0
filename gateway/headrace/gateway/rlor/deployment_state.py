"""Deployments of the RLOR API: the fields of a deployment, its engines by their acks, and the version that they should serve.

Guarantees: every accepted field comes back unchanged. State of engines is only what they reported themselves.
Limitations: most fields have no effect: operators start engines (`headrace engine --deployment ID`) on their own hardware. With every
transition type, running requests keep the version that they began with, and later requests do not wait for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pydantic import Field

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.resources import Int32, Wire, find_record, records_under, resource_name
from headrace.gateway.tables import Tables, engine_of
from headrace.schemas.deployments import (
    DeployedModel,
    DeploymentFact,
    HotLoad,
    LoadRequest,
    deployed_model_key,
    deployment_key,
    hot_load_key,
)
from headrace.schemas.weights import WeightsApplied, WeightsFailed, WeightsPublished

Ack = WeightsApplied | WeightsFailed
BucketType = Literal["BUCKET_TYPE_UNSPECIFIED", "MINIO", "S3", "NEBIUS", "FW_HOSTED"]
Transition = Literal["HOT_LOAD_TRANSITION_TYPE_UNSPECIFIED", "ASYNC", "SYNC"]
DirectRoute = Literal["DIRECT_ROUTE_TYPE_UNSPECIFIED", "INTERNET", "GCP_PRIVATE_SERVICE_CONNECT", "AWS_PRIVATELINK"]
DeployedState = Literal["DEPLOYING", "DEPLOYED", "UNDEPLOYING"]


class DeploymentFields(Wire):
    """All that a client can set on a deployment."""

    base_model: str = Field(default="", max_length=256)
    display_name: str = Field(default="", max_length=63)
    description: str = Field(default="", max_length=4096)
    min_replica_count: Int32 | None = Field(default=None, ge=0)
    max_replica_count: Int32 | None = Field(default=None, ge=0)
    accelerator_type: str | None = Field(default=None, max_length=64)
    accelerator_count: Int32 | None = Field(default=None, ge=0)
    deployment_shape: str | None = Field(default=None, max_length=256)
    precision: str | None = Field(default=None, max_length=64)
    region: str | None = Field(default=None, max_length=64)
    max_context_length: Int32 | None = Field(default=None, ge=0)
    enable_addons: bool = False
    enable_hot_load: bool = False
    enable_hot_reload_latest_addon: bool = False
    enable_session_affinity: bool | None = None
    for_training: bool = False
    hot_load_bucket_type: BucketType | None = None
    hot_load_bucket_url: str = Field(default="", max_length=1024)
    hot_load_trainer_job: str = Field(default="", max_length=256)
    hot_load_transition_type: Transition | None = None
    direct_route_type: DirectRoute | None = None
    direct_route_api_keys: list[str] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment: its record and the fields of its request."""

    record: DeploymentFact
    fields: DeploymentFields

    @property
    def name(self) -> str:
        """The resource name."""
        return resource_name(self.record.account, "deployments", self.record.id)

    @property
    def snapshot_folder(self) -> str:
        """The folder of its snapshots below `deployments/` in the store: its own, or its trainer's."""
        trainer = self.fields.hot_load_trainer_job
        return _trainer_folder(trainer.rpartition("/")[2]) if trainer else self.record.id


@dataclass(slots=True)
class Replica:
    """An engine of a deployment, by its acks."""

    engine: str
    acks: list[Ack] = field(default_factory=list)
    """The last one of each model that it has."""

    @property
    def serving(self) -> WeightsApplied | None:
        """The version that it loaded last; None: none yet."""
        applied = [ack for ack in self.acks if isinstance(ack, WeightsApplied)]
        return max(applied, key=lambda ack: ack.applied_at, default=None)

    def find_ack(self, version: WeightsPublished) -> Ack | None:
        """Its ack of a version, or of a later one of the same model, which it serves instead; None: there is none."""
        return next((ack for ack in self.acks if _covers(ack, version)), None)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The version that a deployment's engines should serve: that of the latest request."""

    version: WeightsPublished
    identity: str | None
    """The client's name for it; None: a step or a model's name requested it."""
    requested_at: datetime


@dataclass(frozen=True, slots=True)
class ModelOnDeployment:
    """A model on a deployment: its record and its state."""

    record: DeployedModel
    state: DeployedState
    fault: str | None
    """Why an engine does not have it."""

    @property
    def name(self) -> str:
        """The resource name."""
        return resource_name(self.record.account, "deployedModels", self.record.id)

    @property
    def deployment(self) -> str:
        """The resource name of the deployment."""
        return resource_name(self.record.account, "deployments", self.record.deployment)


def check_deployment(fields: DeploymentFields, account: str) -> None:
    """Raise `ProblemError` 400 if the fields contradict each other."""
    if not fields.base_model:
        raise ProblemError(400, "baseModel: a deployment needs the name of a base model")
    low, high = fields.min_replica_count, fields.max_replica_count
    if low is not None and high is not None and low > high:
        raise ProblemError(400, f"minReplicaCount: {low} is more than maxReplicaCount, {high}")
    if fields.direct_route_api_keys:
        raise ProblemError(400, "directRouteApiKeys: engines have no keys of their own here: reach them through this gateway")
    bucket, trainer = fields.hot_load_bucket_url, fields.hot_load_trainer_job
    if (bucket or trainer) and not fields.enable_hot_load:
        raise ProblemError(400, "enableHotLoad: must be true where hotLoadBucketUrl or hotLoadTrainerJob is given")
    if bucket and trainer:
        raise ProblemError(400, "hotLoadBucketUrl and hotLoadTrainerJob: a deployment has a bucket of its own, or its trainer's, not both")
    if bucket and f"/rl-checkpoints/{account}/" not in f"{bucket.rstrip('/')}/":
        raise ProblemError(400, f"hotLoadBucketUrl: must lie below rl-checkpoints/{account}/")


def find_deployment(tables: Tables, account: str, deployment: str) -> Deployment:
    """A deployment by its id. Raises ProblemError (404)."""
    name = resource_name(account, "deployments", deployment)
    return deployment_from_record(find_record(tables, deployment_key(account, deployment), DeploymentFact, name))


def deployment_from_record(record: DeploymentFact) -> Deployment:
    """A deployment with the fields of its request."""
    return Deployment(record, DeploymentFields.model_validate(record.request))


def list_account_deployments(tables: Tables, account: str) -> list[Deployment]:
    """All deployments of an account."""
    return [deployment_from_record(record) for record in records_under(tables, deployment_key(account, ""), DeploymentFact)]


def belongs_to_another(tables: Tables, account: str, deployment: str) -> bool:
    """Whether another account has a deployment of this id. Engines know deployments by their ids alone, so one account has each id."""
    kind = deployment_key("", "").partition("/")[0]
    return any(record.id == deployment and record.account != account for record in records_under(tables, f"{kind}/", DeploymentFact))


def find_replicas(tables: Tables, deployment: str) -> list[Replica]:
    """The engines that reported that they belong to a deployment, by name; without engines whose heartbeats stopped."""
    found: dict[str, Replica] = {}
    for ack in tables.acks.values():
        if ack.deployment == deployment and not tables.is_silent(ack):
            engine = engine_of(ack)
            found.setdefault(engine, Replica(engine)).acks.append(ack)
    return [found[engine] for engine in sorted(found)]


def find_load_target(tables: Tables, deployment: Deployment) -> LoadTarget | None:
    """The version that its engines should serve; None: none was requested."""
    return max(_load_targets(tables, deployment), key=lambda target: target.requested_at, default=None)


def find_deployed_models(
    tables: Tables, account: str, *, model: str | None = None, deployment: str | None = None
) -> list[ModelOnDeployment]:
    """Models on deployments of an account, by id; optionally of one model or of one deployment only."""
    records = records_under(tables, deployed_model_key(account, ""), DeployedModel)
    chosen = (record for record in records if model in {None, record.model} and deployment in {None, record.deployment})
    return [found for record in chosen if (found := deployed_model_from_record(tables, record)) is not None]


def deployed_model_from_record(tables: Tables, record: DeployedModel) -> ModelOnDeployment | None:
    """A model on a deployment with its state; None: it was deleted, and no engine serves it."""
    acks = [ack for replica in find_replicas(tables, record.deployment) if (ack := replica.find_ack(record.published)) is not None]
    applied = any(isinstance(ack, WeightsApplied) for ack in acks)
    fault = next((ack.error for ack in acks if isinstance(ack, WeightsFailed)), None)
    if record.removed_at is not None:
        return ModelOnDeployment(record, "UNDEPLOYING", fault) if applied else None
    return ModelOnDeployment(record, "DEPLOYED" if applied else "DEPLOYING", fault)


def find_snapshot_folder(tables: Tables, account: str, job_id: str, deployment: str) -> str | None:
    """The folder that a job's steps write snapshots to, given the deployment that it names, if any; None: they write none."""
    if deployment:
        return deployment
    name = resource_name(account, "rlorTrainerJobs", job_id)
    attached = any(found.fields.hot_load_trainer_job in {name, job_id} for found in list_account_deployments(tables, account))
    return _trainer_folder(job_id) if attached else None


def check_snapshot_source(tables: Tables, account: str, deployment: str) -> None:
    """Reject a job that names a deployment which takes its snapshots from a trainer. Raises ProblemError (400)."""
    record = tables.facts.get(deployment_key(account, deployment))
    if isinstance(record, DeploymentFact) and (trainer := deployment_from_record(record).fields.hot_load_trainer_job):
        raise ProblemError(
            400,
            f"hotLoadDeploymentId: {deployment} takes its snapshots from {trainer} (hotLoadTrainerJob): either the job names "
            "the deployment, or the deployment the job",
        )


def _trainer_folder(job_id: str) -> str:
    return f"trainer-{job_id}"


def _covers(ack: Ack, version: WeightsPublished) -> bool:
    if (ack.model_id, ack.incarnation) != (version.model_id, version.incarnation):
        return False
    return ack.policy_version == version.policy_version or (isinstance(ack, WeightsApplied) and ack.policy_version > version.policy_version)


def _load_targets(tables: Tables, deployment: Deployment) -> Iterator[LoadTarget]:
    account, id = deployment.record.account, deployment.record.id  # noqa: A001 - the API's word
    for published in tables.published.values():
        if id in published.rollout_deployments:
            view = tables.model(published.model_id)
            if view is not None and view.account == account:
                yield LoadTarget(published, None, published.published_at)
    models = records_under(tables, deployed_model_key(account, ""), DeployedModel)
    requests: list[LoadRequest] = [record for record in models if record.removed_at is None]
    hot_load = tables.facts.get(hot_load_key(account, id))
    if isinstance(hot_load, HotLoad):
        requests.append(hot_load)
    for request in requests:
        if request.deployment == id:
            yield LoadTarget(request.published, request.identity if isinstance(request, HotLoad) else None, request.requested_at)
