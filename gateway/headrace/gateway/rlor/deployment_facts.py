"""Deployments as the gateway knows them: what was asked for, the engines that belong to them, and what those were asked to load."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.deployment_fields import DeploymentFields
from headrace.gateway.rlor.names import name_of
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


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment: its record and what was asked for."""

    fact: DeploymentFact
    fields: DeploymentFields

    @property
    def name(self) -> str:
        """The resource name."""
        return name_of(self.fact.account, "deployments", self.fact.id)

    @property
    def snapshot_folders(self) -> tuple[str, ...]:
        """Names under which jobs write snapshots for it, below `deployments/` in the store: its own, or its trainer's."""
        trainer = self.fields.hot_load_trainer_job
        return (self.fact.id,) if not trainer else (trainer_folder(trainer.rpartition("/")[2]),)


@dataclass(slots=True)
class Replica:
    """An engine of a deployment, by its acks."""

    engine: str
    acks: list[Ack] = field(default_factory=list)
    """The last one for each model that it has."""

    @property
    def serving(self) -> WeightsApplied | None:
        """What it took last; None: nothing yet."""
        applied = [ack for ack in self.acks if isinstance(ack, WeightsApplied)]
        return max(applied, key=lambda ack: ack.applied_at, default=None)

    def ack_of(self, version: WeightsPublished) -> Ack | None:
        """What it says of a version, or of a later one of the same model, which it serves in its place; None: nothing."""
        return next((ack for ack in self.acks if _concerns(ack, version)), None)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What a deployment's engines should serve, as it was asked for last."""

    version: WeightsPublished
    identity: str | None
    """As the client named it; None: it was asked for by a step, or by a model's name."""
    asked_at: datetime


def trainer_folder(job_id: str) -> str:
    """The snapshot folder that a job has to itself."""
    return f"trainer-{job_id}"


def find_deployment(tables: Tables, account: str, deployment: str) -> Deployment:
    """A deployment by its id.

    Raises:
        ProblemError: 404.
    """
    fact = tables.facts.get(deployment_key(account, deployment))
    if not isinstance(fact, DeploymentFact):
        raise ProblemError(404, f"{name_of(account, 'deployments', deployment)[:300]} does not exist")
    return deployment_of(fact)


def is_of_another(tables: Tables, account: str, deployment: str) -> bool:
    """Whether another account has a deployment of this id: engines know deployments by their ids alone, so each id is one account's."""
    kind = deployment_key("", "").partition("/")[0]
    return any(
        isinstance(fact, DeploymentFact) and fact.id == deployment and fact.account != account for fact in tables.facts_under(f"{kind}/")
    )


def deployment_of(fact: DeploymentFact) -> Deployment:
    """A deployment from its record."""
    return Deployment(fact, DeploymentFields.model_validate(fact.request))


def deployments_of(tables: Tables, account: str) -> list[Deployment]:
    """All deployments of an account."""
    return [deployment_of(fact) for fact in tables.facts_under(deployment_key(account, "")) if isinstance(fact, DeploymentFact)]


def replicas_of(tables: Tables, deployment: str) -> list[Replica]:
    """The engines that said they belong to a deployment, by name; without those that have fallen silent."""
    found: dict[str, Replica] = {}
    for ack in tables.acks.values():
        if ack.deployment == deployment and not tables.is_silent(ack):
            engine = engine_of(ack)
            found.setdefault(engine, Replica(engine)).acks.append(ack)
    return [found[engine] for engine in sorted(found)]


def load_target(tables: Tables, deployment: Deployment) -> LoadTarget | None:
    """What its engines should serve; None: nobody asked for anything yet."""
    return max(_targets(tables, deployment), key=lambda target: target.asked_at, default=None)


def snapshot_folder(tables: Tables, account: str, job_id: str, deployment: str) -> str | None:
    """The folder that a job's steps write snapshots to; None: nobody asked for any.

    Args:
        tables: As of now.
        account: Of the job.
        job_id: The job.
        deployment: Id of the deployment that the job itself names; empty: none.
    """
    if deployment:
        return deployment
    name = name_of(account, "rlorTrainerJobs", job_id)
    attached = any(found.fields.hot_load_trainer_job in {name, job_id} for found in deployments_of(tables, account))
    return trainer_folder(job_id) if attached else None


def check_own_bucket(tables: Tables, account: str, deployment: str) -> None:
    """Refuse a job that names a deployment which takes its snapshots from a trainer.

    Raises:
        ProblemError: 400.
    """
    fact = tables.facts.get(deployment_key(account, deployment))
    if isinstance(fact, DeploymentFact) and (trainer := deployment_of(fact).fields.hot_load_trainer_job):
        raise ProblemError(
            400,
            f"hotLoadDeploymentId: {deployment} takes its snapshots from {trainer} (hotLoadTrainerJob): either the job names "
            "the deployment, or the deployment the job",
        )


def _concerns(ack: Ack, version: WeightsPublished) -> bool:
    if (ack.model_id, ack.incarnation) != (version.model_id, version.incarnation):
        return False
    return ack.policy_version == version.policy_version or (isinstance(ack, WeightsApplied) and ack.policy_version > version.policy_version)


def _targets(tables: Tables, deployment: Deployment) -> Iterator[LoadTarget]:
    account, name = deployment.fact.account, deployment.fact.id
    for published in tables.published.values():
        if name in published.rollout_deployments:
            view = tables.model(published.model_id)
            if view is not None and view.account == account:
                yield LoadTarget(published, None, published.published_at)
    named = [fact for fact in tables.facts_under(deployed_model_key(account, "")) if isinstance(fact, DeployedModel)]
    requests: list[LoadRequest] = [fact for fact in named if fact.removed_at is None]
    hot = tables.facts.get(hot_load_key(account, name))
    if isinstance(hot, HotLoad):
        requests.append(hot)
    for request in requests:
        if request.deployment == name:
            yield LoadTarget(request.published, request.identity if isinstance(request, HotLoad) else None, request.requested_at)
