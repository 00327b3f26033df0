"""The key that a record of Headrace stands under, told from the record itself.

Guarantees: the process that writes a record of these kinds takes this key, so one under another key is another's copy of it, and no
reader may take it for what it says. Limitations: groups and events, which are read in order and not by key.
"""

from pydantic import BaseModel

from headrace.schemas.commands import Command
from headrace.schemas.deployments import DeployedModel, DeploymentFact, HotLoad, deployed_model_key, deployment_key, hot_load_key
from headrace.schemas.gateway import DeletedCheckpoint, GatewayJob, LoggedGroups, checkpoint_key, job_key, log_key
from headrace.schemas.jobs import JobDocument
from headrace.schemas.rlor import RlorJob, RlorRun, rlor_job_key, rlor_run_key
from headrace.schemas.rlor_resources import DatasetFact, DatasetFile, ModelAlias, dataset_file_key, dataset_key, model_alias_key
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.topics import lane_key
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished, alive_key


def key_of(record: BaseModel) -> str | None:  # noqa: PLR0911 - one line for each kind
    """The key of a record; None: its kind is not read by key."""
    if isinstance(record, Command):
        return record.model_id
    match record:
        case ModelState() | StepRecord() | WeightsPublished():
            return record.model_id
        case LaneState():
            return lane_key(record.lane)
        case JobDocument():
            return record.job_id
        case WeightsApplied() | WeightsFailed():
            return record.engine_id
        case EngineAlive():
            return alive_key(record.engine_id)
        case _:
            return _fact_key(record)


def _fact_key(fact: BaseModel) -> str | None:  # noqa: PLR0911 - one line for each kind
    match fact:
        case GatewayJob():
            return job_key(fact.job_id)
        case DeletedCheckpoint():
            return checkpoint_key(fact.model_id, fact.incarnation, fact.step)
        case LoggedGroups():
            return log_key(fact.model_id, fact.id)
        case RlorJob():
            return rlor_job_key(fact.account, fact.id)
        case RlorRun():
            return rlor_run_key(fact.account, fact.job)
        case DatasetFact():
            return dataset_key(fact.account, fact.dataset)
        case DatasetFile():
            return dataset_file_key(fact)
        case ModelAlias():
            return model_alias_key(fact.account, fact.id)
        case DeploymentFact():
            return deployment_key(fact.account, fact.id)
        case DeployedModel():
            return deployed_model_key(fact.account, fact.id)
        case HotLoad():
            return hot_load_key(fact.account, fact.deployment)
        case _:
            return None
