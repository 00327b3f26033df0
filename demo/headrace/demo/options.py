"""What a run of the demo is asked for, and the settings that were found to learn.

Vault: GRPO with 12 questions × 8 rollouts a step. Tried in one process with the real base models, seeds 0 to 4, lags 0, 1, 4 and 6
(docs: `docs/lab-notes.md`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
        return 8 if self.model == "vault" else 4

    @property
    def model_settings(self) -> ModelSettings:
        """How the demo's model is trained."""
        if self.model == "vault":
            return ModelSettings(
                base_model=BASE_MODEL,
                adaptation="full",
                optimizer=OptimizerSettings(weight_decay=0.0, max_grad_norm=1.0),
                batch=BatchPolicy(groups_per_step=12),
                train=TrainConfig(learning_rate=8e-4, loss_fn="ppo", scale_rewards=False),
                max_policy_lag=self.lag,
                max_sequence_tokens=64,
                seed=self.seed,
            )
        return ModelSettings(
            base_model=BASE_MODEL,
            adaptation="lora",
            lora=LoraSettings(r=8, alpha=16),
            batch=BatchPolicy(groups_per_step=4),
            train=TrainConfig(learning_rate=1e-4),
            max_policy_lag=self.lag,
            max_sequence_tokens=256,
            seed=self.seed,
        )
