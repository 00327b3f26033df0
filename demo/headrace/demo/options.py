"""Options of a demo run, and the settings that learn.

Vault: 16 questions × 8 rollouts a step, PPO's clip, advantages centred but not divided by the group's deviation, AdamW 6e-4. The demo
itself, on two quiet cores, mean reward of the first and of the last ten of 100 steps: `--lag 4`, seeds 0 to 4: 0.11 to 0.16 and 0.95 to
0.97, in 62 to 69 s; lag 1, seeds 0 and 1: 0.21 and 0.15, 0.96 and 0.97, in 85 to 90 s.

In one process, what did worse, at lag 4: CISPO with the ratio capped at 5 (two of five seeds fell back to 0.6 to 0.8), capped at 2 (one
fell back to 0.88), and advantages divided by the deviation, which near the end turn one lucky rollout in eight into a large step.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.schemas.base import Record
from headrace.schemas.training import BatchPolicy, LoraSettings, ModelSettings, OptimizerSettings, TrainConfig

ModelName = Literal["vault", "smollm2"]
BASE_MODEL = "demo"
"""The base model's name in the catalogue of the run."""
AGENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """One run."""

    model: ModelName = "vault"
    seed: int = 0
    steps: int
    lag: int = 1
    """`max_policy_lag`: versions that a rollout may be behind when it is trained on."""
    keep: bool = False
    """Leave topics and files."""
    out: Path
    """Folder for the figure."""

    @property
    def rollouts(self) -> int:
        """Trajectories of a group."""
        return 8 if self.model == "vault" else 6

    @property
    def model_settings(self) -> ModelSettings:
        """How the demo's model is trained."""
        if self.model == "vault":
            return ModelSettings(
                base_model=BASE_MODEL,
                adaptation="full",
                optimizer=OptimizerSettings(weight_decay=0.0, max_grad_norm=1.0),
                batch=BatchPolicy(groups_per_step=16),
                train=TrainConfig(learning_rate=6e-4, loss_fn="ppo", scale_rewards=False),
                max_policy_lag=self.lag,
                max_sequence_tokens=64,
                seed=self.seed,
            )
        return ModelSettings(
            base_model=BASE_MODEL,
            adaptation="lora",
            lora=LoraSettings(r=8, alpha=16),
            batch=BatchPolicy(groups_per_step=4, zero_variance="refuse"),  # it is right one time in six: many groups are all wrong
            train=TrainConfig(learning_rate=1e-4),
            max_policy_lag=self.lag,
            max_sequence_tokens=256,
            seed=self.seed,
        )


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
