"""Which records each topic carries: one table for readers, for subscribers and for the AsyncAPI document.

The first of a topic is what a record without `ce_type` is read as. Of `dead-letters` only our own records are here: the letters are
foreign bytes, whatever their `ce_type` says (`headrace.schemas.dead_letters`).
"""

from pydantic import BaseModel

from headrace.schemas import topics
from headrace.schemas.claim import GroupClaim
from headrace.schemas.commands import COMMANDS
from headrace.schemas.dead_letters import DeadLetterResolved
from headrace.schemas.events import GroupRejected, JobStateChanged, ModelStatusChanged, Starved, StepCompleted, TrajectoryRejected
from headrace.schemas.gateway import FACTS
from headrace.schemas.jobs import JobDocument, TrainingJob
from headrace.schemas.state import LaneState, ModelState, StepRecord
from headrace.schemas.trajectory import TrajectoryGroup
from headrace.schemas.weights import EngineAlive, WeightsApplied, WeightsFailed, WeightsPublished

CARRIED: dict[str, tuple[type[BaseModel], ...]] = {
    topics.TRAJECTORY_GROUPS: (TrajectoryGroup, GroupClaim, TrainingJob),
    topics.COMMANDS: COMMANDS,
    topics.STEPS: (StepRecord,),
    topics.MODELS: (ModelState, LaneState),
    topics.TRAINING_EVENTS: (StepCompleted, GroupRejected, TrajectoryRejected, JobStateChanged, ModelStatusChanged, Starved),
    topics.WEIGHTS: (WeightsPublished,),
    topics.WEIGHT_ACKS: (WeightsApplied, WeightsFailed, EngineAlive),
    topics.JOBS: (JobDocument,),
    topics.GATEWAY: FACTS,
    topics.DEAD_LETTERS: (DeadLetterResolved,),
}
"""Record models by topic name without the prefix."""


def topic_of(model: type[BaseModel]) -> str:
    """The topic (without the prefix) that carries a record model.

    Raises:
        LookupError: no topic carries it; names those that are carried.
    """
    for topic, models in CARRIED.items():
        if model in models:
            return topic
    known = ", ".join(m.__name__ for models in CARRIED.values() for m in models)
    raise LookupError(f"no topic carries {model.__name__}; records are: {known}")
