"""Models on deployments, as the gateway knows them: what was asked for, and what the engines say."""

from dataclasses import dataclass
from typing import Literal

from headrace.gateway.rlor.deployment_facts import replicas_of
from headrace.gateway.rlor.names import name_of
from headrace.gateway.tables import Tables
from headrace.schemas.deployments import DeployedModel, deployed_model_key
from headrace.schemas.weights import WeightsApplied, WeightsFailed

DeployedState = Literal["DEPLOYING", "DEPLOYED", "UNDEPLOYING"]


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model on a deployment."""

    fact: DeployedModel
    state: DeployedState
    fault: str | None
    """Why an engine does not have it."""

    @property
    def name(self) -> str:
        """The resource name."""
        return name_of(self.fact.account, "deployedModels", self.fact.id)

    @property
    def deployment(self) -> str:
        """The resource name of the deployment."""
        return name_of(self.fact.account, "deployments", self.fact.deployment)


def deployed_of(tables: Tables, account: str, *, model: str | None = None, deployment: str | None = None) -> list[Deployed]:
    """Models on deployments of an account, by id; of one model or of one deployment only, if asked."""
    facts = [fact for fact in tables.facts_under(deployed_model_key(account, "")) if isinstance(fact, DeployedModel)]
    chosen = (fact for fact in facts if model in {None, fact.model} and deployment in {None, fact.deployment})
    return [found for fact in chosen if (found := deployed(tables, fact)) is not None]


def deployed(tables: Tables, fact: DeployedModel) -> Deployed | None:
    """How a model on a deployment stands; None: it was taken away, and no engine serves it."""
    acks = [ack for replica in replicas_of(tables, fact.deployment) if (ack := replica.ack_of(fact.published)) is not None]
    applied = any(isinstance(ack, WeightsApplied) for ack in acks)
    fault = next((ack.error for ack in acks if isinstance(ack, WeightsFailed)), None)
    if fact.removed_at is not None:
        return Deployed(fact, "UNDEPLOYING", fault) if applied else None
    return Deployed(fact, "DEPLOYED" if applied else "DEPLOYING", fault)
