"""The one model on this rank's device, and the state that it is in.

Guarantees: `at` gives the model in exactly the state that a plan names, as it lies there or loaded from the plan's snapshot, else it raises
(exactly-once rule 5: what a failed commit left on the device is no state); a model that leaves frees its memory before the next one comes.
Limitations: several models side by side.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import HeadraceError
from headrace.schemas.training import ModelSettings
from headrace.trainer.deepspeed_setup import device, start_engine
from headrace.trainer.forward import Scorer
from headrace.trainer.model import adapt, load_base, self_test, trainable_parameters
from headrace.trainer.plan import BaseSource, StateKey, StepPlan
from headrace.trainer.shards import Trainable
from headrace.trainer.training_state import from_rank_0, load_state
from headrace.trainer.weights_in import read_weights
from headrace.trainer.weights_out import WeightsWriter
from headrace.trainer.world import WorldSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A model on the device."""

    base: BaseSource
    settings: ModelSettings
    model: Any
    """As transformers and peft made it, below DeepSpeed's engine."""
    trainable: Trainable
    writer: WeightsWriter
    scorer: Scorer


class Resident:
    """What is on the device.

    Args:
        world: ZeRO stage, recomputation.
    """

    def __init__(self, world: WorldSettings) -> None:
        self._world = world
        self._loaded: Loaded | None = None
        self._state: StateKey | None = None
        self._preloaded: tuple[BaseSource, Any] | None = None

    def preload(self, base: BaseSource) -> None:
        """Load a base model that the first plan will need; another base drops it."""
        if self._loaded is None:
            self._preloaded = (base, load_base(base))

    def drop(self) -> None:
        """Nothing on the device is to be trusted: the next plan starts from files."""
        self._loaded = self._state = None

    def is_now(self, state: StateKey) -> None:
        """A step has made the model's state this one."""
        self._state = state

    def holding(self, state: StateKey) -> Loaded:
        """The model, if it is in just this state.

        Raises:
            HeadraceError: it is not.
        """
        if self._loaded is None or self._state != state:
            raise HeadraceError(f"this rank does not hold {state}, but {self._state}")
        return self._loaded

    def at(self, plan: StepPlan) -> Loaded:
        """The model in the state that the plan starts from.

        Raises:
            HeadraceError: the state is not here and the plan brings no snapshot; or the base model or the snapshot can't be used.
        """
        loaded = self._loaded
        fits = loaded is not None and (loaded.base, loaded.settings) == (plan.base, plan.settings)
        if loaded is not None and fits and plan.state == self._state:
            return loaded
        if plan.state.step > 0 and plan.load_from is None:
            raise HeadraceError(f"the plan starts from {plan.state}, which this rank does not hold ({self._state}), and brings no snapshot")
        if loaded is None or not fits or plan.state.step == 0:
            loaded = self._load(plan)
        self._state = None
        if plan.load_from is not None and plan.state.step == 0:
            self._begin_with(Path(plan.load_from), loaded)
        elif plan.load_from is not None:
            load_state(Path(plan.load_from), plan.state, loaded.trainable)
        return loaded

    @staticmethod
    def _begin_with(folder: Path, loaded: Loaded) -> None:
        """A model whose version 0 is stored weights; its optimizer is new."""
        read = partial(read_weights, folder, loaded.trainable, loaded.model, loaded.settings.adaptation, what="the warm start")
        loaded.trainable.set_parameters(from_rank_0(read))

    def _load(self, plan: StepPlan) -> Loaded:
        self.drop()  # frees the memory of the former model first
        preloaded, self._preloaded = self._preloaded, None
        base = preloaded[1] if preloaded is not None and preloaded[0] == plan.base else load_base(plan.base)
        torch.manual_seed(plan.settings.seed)  # LoRA's first factor is random
        model = adapt(base, plan.settings).to(device())
        scorer = self_test(model)
        if self._world.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        parameters = trainable_parameters(model)
        settings = plan.settings.optimizer
        optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=0.0, betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=settings.weight_decay
        )
        writer = WeightsWriter(model, plan.base, plan.settings.adaptation)
        engine = start_engine(model, optimizer, settings.max_grad_norm, self._world)
        trainable = Trainable(engine=engine, optimizer=optimizer, parameters=parameters, zero_stage=self._world.zero_stage)
        self._loaded = Loaded(base=plan.base, settings=plan.settings, model=model, trainable=trainable, writer=writer, scorer=scorer)
        return self._loaded
