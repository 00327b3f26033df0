"""What an agent process is told at its start, as JSON in its first argument. Apart from `agent`, which imports torch."""

from typing import Literal

from headrace.schemas.base import Record


class AgentConfig(Record):
    """What an agent is told at its start; how to reach Kafka and the store is in its settings."""

    name: str
    task: Literal["vault", "smollm2"]
    model_id: str
    base_path: str
    cache_dir: str
    """Where it downloads weights to."""
    groups_per_step: int
    share: float
    """Of the groups of a step that this agent samples."""
    rollouts: int
    max_policy_lag: int
    seed: int
