"""Topic names, what their keys are, and how they are cleaned up.

Guarantees: every name carries the prefix; topics whose key is the model id have the same partition count, so that one partition
number (the lane) holds all that one model is about. Partition counts are fixed at creation: keyed order depends on them.

The key that a record of Headrace stands under, told from the record itself.

Guarantees: the process that writes a record of these kinds takes this key, so one under another key is another's copy of it, and no
reader may take it for what it says. Limitations: groups and events, which are read in order and not by key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from headrace.schemas.commands import Command
from headrace.schemas.deployments import DeployedModel, DeploymentFact, HotLoad, deployed_model_key, deployment_key, hot_load_key
from headrace.schemas.gateway import DeletedCheckpoint, GatewayJob, LoggedGroups, checkpoint_key, job_key, log_key
from headrace.schemas.jobs import JobDocument
from headrace.schemas.rlor import (
    DatasetFact,
    DatasetFile,
    ModelAlias,
    RlorJob,
    RlorRun,
    dataset_file_key,
    dataset_key,
    model_alias_key,
    rlor_job_key,
    rlor_run_key,
)
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished, alive_key

LANE_KEY_PREFIX = "lane:"
"""Of the keys of lanes in `models`: no model has such an id."""
_DAY_MS = 24 * 60 * 60 * 1000

TRAJECTORY_GROUPS = "trajectory-groups"
COMMANDS = "commands"
STEPS = "steps"
MODELS = "models"
TRAINING_EVENTS = "training-events"
WEIGHTS = "weights"
WEIGHT_ACKS = "weight-acks"
JOBS = "jobs"
DEAD_LETTERS = "dead-letters"
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """One topic: its name without the prefix, what its key is, and its Kafka settings."""

    name: str
    key: str
    carries: str
    lane: bool
    """Key is the model id: the partition count is the lane count."""
    config: Mapping[str, str] = field(default_factory=dict)


TOPICS: tuple[TopicSpec, ...] = (
    TopicSpec(
        name=TRAJECTORY_GROUPS,
        key="model id",
        carries="what trains, in one order: groups, claims, training jobs",
        lane=True,
        # LogAppendTime: a late spool stamped days back would be deleted at the next retention pass (rule 19).
        config={
            "cleanup.policy": "delete",
            "retention.ms": str(7 * _DAY_MS),
            "message.timestamp.type": "LogAppendTime",
        },
    ),
    TopicSpec(
        name=COMMANDS,
        key="model id",
        carries="requests to a lane's owner",
        lane=True,
        config={"cleanup.policy": "delete", "retention.ms": str(30 * _DAY_MS)},
    ),
    TopicSpec(
        name=STEPS,
        key="model id",
        carries="the step ledger",
        lane=True,
        config={"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"},
    ),
    TopicSpec(
        name=MODELS,
        key="model id, or lane:<p>",
        carries="the current state of each model and of the lane",
        lane=True,
        # A huge uncompacted segment makes recovery slow (rule 15).
        config={"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024), "segment.ms": str(10 * 60 * 1000)},
    ),
    TopicSpec(
        name=TRAINING_EVENTS,
        key="model id",
        carries="steps completed, groups rejected, job state changes, starved",
        lane=True,
        config={"cleanup.policy": "delete", "retention.ms": str(30 * _DAY_MS)},
    ),
    TopicSpec(
        name=WEIGHTS,
        key="model id",
        carries="published policy versions",
        lane=True,
        config={"cleanup.policy": "compact"},
    ),
    TopicSpec(
        name=WEIGHT_ACKS,
        key="engine id",
        carries="what engines did with them",
        lane=False,
        config={"cleanup.policy": "compact"},
    ),
    TopicSpec(name=JOBS, key="job id", carries="current job documents", lane=False, config={"cleanup.policy": "compact"}),
    TopicSpec(
        name=GATEWAY,
        key="<kind>/<id>",
        carries="what only gateways know: who asked for a job, datasets, deployments",
        lane=False,
        config={"cleanup.policy": "compact"},
    ),
    TopicSpec(
        name=DEAD_LETTERS,
        key="as the original",
        carries="records that could not be read, bytes untouched; and what became of them",
        lane=False,
        # The original's bytes and our headers on top: a record at the broker's default limit must still fit.
        config={"cleanup.policy": "delete", "retention.ms": str(30 * _DAY_MS), "max.message.bytes": str(2 * 1024 * 1024)},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """Full topic names under a prefix: `Topics(prefix="headrace.").steps` is `headrace.steps`."""

    prefix: str = "headrace."

    def full(self, name: str) -> str:
        """The full name of a topic."""
        return self.prefix + name

    @property
    def trajectory_groups(self) -> str:
        """What trains."""
        return self.full(TRAJECTORY_GROUPS)

    @property
    def commands(self) -> str:
        """Requests to a lane's owner."""
        return self.full(COMMANDS)

    @property
    def steps(self) -> str:
        """The ledger."""
        return self.full(STEPS)

    @property
    def models(self) -> str:
        """Model and lane states."""
        return self.full(MODELS)

    @property
    def training_events(self) -> str:
        """Events for subscribers."""
        return self.full(TRAINING_EVENTS)

    @property
    def weights(self) -> str:
        """Published policy versions."""
        return self.full(WEIGHTS)

    @property
    def weight_acks(self) -> str:
        """Acks from engines."""
        return self.full(WEIGHT_ACKS)

    @property
    def jobs(self) -> str:
        """Job documents."""
        return self.full(JOBS)

    @property
    def gateway(self) -> str:
        """What only gateways know."""
        return self.full(GATEWAY)

    @property
    def dead_letters(self) -> str:
        """What could not be read."""
        return self.full(DEAD_LETTERS)


def lane_key(lane: int) -> str:
    """The key of a lane's own record in `models`."""
    return f"{LANE_KEY_PREFIX}{lane}"


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
