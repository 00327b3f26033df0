"""Topic names, what their keys are, and how they are cleaned up.

Guarantees: every name carries the prefix; topics whose key is the model id have the same partition count, so that one partition
number (the lane) holds all that one model is about. Partition counts are fixed at creation: keyed order depends on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
