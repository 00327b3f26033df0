"""The training engine: one resident training state on one rank of a world; a plan in, a step out.

Guarantees: a step starts from exactly the state that its plan names, resident or loaded, else it fails (exactly-once rule 5); random
generators are set from (seed, incarnation, step); a step with nothing to train changes nothing and still writes its files. All ranks of
a world run the same plan; rank 0 reads and writes files. Limitations: several base models at once.
"""

import hashlib
import logging
import os
import platform
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch

from headrace.core.job_views import turn_messages
from headrace.schemas.state import Fingerprint, TrainingScalars
from headrace.trainer.batches import RowShape, policy_updates, sft_options, sft_updates
from headrace.trainer.computed import Clock, ComputedStep
from headrace.trainer.deepspeed_setup import device, join_world, over_ranks
from headrace.trainer.metrics import peak_memory, reset_peak_memory, turn_counts
from headrace.trainer.options import StepOptions, resolve
from headrace.trainer.passes import StepPasses
from headrace.trainer.plan import BaseSource, Saved, SavePlan, StepPlan, StepResult
from headrace.trainer.resident import Resident
from headrace.trainer.reward_trend import add, reward_deviation
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.training_state import check_finite, save_state
from headrace.trainer.world import Seat, WorldSettings

logger = logging.getLogger(__name__)

# Tokens of one row: their activations live until its backward. 2,048 tokens of a 135M model in float32 are about 4 GiB.
TOKENS = {"cpu": 2_048, "cuda": 16_384}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A step that is packed before its turn."""

    out_dir: str
    """Of its plan, and of no other."""
    shape: RowShape
    updates: list[PackedUpdate]
    deviation: float | None
    """Of its rewards."""


class TrainingEngine:
    """Trains on this process's device, as one rank of a world.

    Args:
        world: Of how many ranks, and how they share.
        seat: This rank's place; the constructor returns when all ranks are there.
    """

    def __init__(self, world: WorldSettings | None = None, seat: Seat | None = None) -> None:
        self._world = world or WorldSettings()
        self._seat = seat or Seat()
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", self._world.size))  # ranks on this machine, as a launcher says it
        self._threads = self._world.threads or max(1, (os.cpu_count() or 1) // beside)
        torch.set_num_threads(self._threads)
        join_world(self._world, self._seat)
        self._resident = Resident(self._world)
        self._warned: set[tuple[str, str]] = set()
        self._shape: RowShape | None = None
        """Of the last step's rows."""
        self._ready: _Ready | None = None

    def make_ready(self, plan: StepPlan) -> None:
        """Pack a step that comes next, in the shape of the one that runs; may be called from another thread meanwhile.

        Raises:
            HeadraceError: as `run`.
        """
        shape = self._shape
        if shape is not None and plan.becomes is None:
            updates = self._updates(plan, _options(plan), shape, seed_of(plan))
            self._ready = _Ready(out_dir=plan.out_dir, shape=shape, updates=updates, deviation=_deviation(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step, its files included; at rank 0.

        Raises:
            HeadraceError: as `compute`.
        """
        return self.compute(plan).finish()

    def compute(self, plan: StepPlan) -> ComputedStep:
        """Make the step's new state; to write it down, and what was done, is left to `finish`.

        Raises:
            HeadraceError: the base model, the snapshot or the KL reference can't be used, the plan names a state that is neither resident
                nor given, or the gradient is not finite.
        """
        try:
            return self._compute(plan)
        except BaseException:
            # Half a step leaves weights, moments and gradients that no one knows: the next plan starts from files.
            self._resident.drop()
            raise

    def _compute(self, plan: StepPlan) -> ComputedStep:
        clock = Clock.start()
        reset_peak_memory()
        options = _options(plan)
        self._warn(plan, options)
        loaded = self._resident.at(plan)
        seed = seed_of(plan)
        _seed_generators(seed)
        clock.lap("prepare")
        shape = self._shape = RowShape(
            tokens=self._world.tokens_per_pass or TOKENS[device().type], ranks=self._world.size, alone=loaded.scorer.width is None
        )
        ready, self._ready = self._ready, None
        if ready is not None and (ready.out_dir, ready.shape) == (plan.out_dir, shape):
            updates, deviation = ready.updates, ready.deviation
        else:
            updates, deviation = self._updates(plan, options, shape, seed), _deviation(plan)
        clock.lap("pack")
        passed = StepPasses(loaded, plan, options, self._world, self._seat).run(updates, shape, clock.lap)
        key = plan.becomes or replace(plan.state, step=plan.state.step + 1, attempt=plan.attempt)
        check_finite(loaded.trainable)
        tensors = loaded.writer.tensors()
        snapshot = loaded.trainable.training_tensors() if plan.snapshot else None
        self._resident.is_now(key)
        peak = over_ranks(torch.tensor([peak_memory()], dtype=torch.float64), torch.distributed.ReduceOp.MAX)
        clock.lap("write")
        return ComputedStep(
            plan=plan,
            options=options,
            key=key,
            scalars=_scalars(plan, len(passed.done), deviation),
            updates=updates,
            passed=passed,
            seed=seed,
            writer=loaded.writer,
            tensors=tensors,
            snapshot=snapshot,
            peak_memory=float(peak),
            fingerprint=self.fingerprint,
            clock=clock,
        )

    def save(self, plan: SavePlan) -> Saved:
        """Write the resident state as a snapshot. Called by all ranks; rank 0 writes.

        Raises:
            HeadraceError: another state is resident.
        """
        save_state(Path(plan.folder), plan.state, self._resident.holding(plan.state).trainable)
        return Saved()

    def _warn(self, plan: StepPlan, options: StepOptions) -> None:
        """Each warning once a model, by rank 0."""
        if self._seat.rank != 0:
            return
        model_id = plan.state.model_id
        for kind, warning in {**{text: text for text in options.warnings}, **turn_messages(turn_counts(plan.groups))}.items():
            if (model_id, kind) not in self._warned:
                self._warned.add((model_id, kind))
                logger.warning("model %s: %s", model_id, warning)

    @staticmethod
    def _updates(plan: StepPlan, options: StepOptions, shape: RowShape, seed: int) -> list[PackedUpdate]:
        if plan.forward_only:
            return []
        if plan.sft is not None:
            return sft_updates(plan.groups, plan.sft, shape, seed, options.packed_sequence_length)
        return policy_updates(plan.groups, options, shape, plan.state.step)

    def preload(self, base: BaseSource) -> None:
        """Load a base model that the first plan will need; another base drops it."""
        self._resident.preload(base)

    def drop(self) -> None:
        """Free the model on the device; the next plan loads one."""
        self._resident.drop()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The environment."""
        return Fingerprint(
            headrace=version("headrace"),
            torch=torch.__version__,
            transformers=version("transformers"),
            deepspeed=version("deepspeed"),
            python=platform.python_version(),
            device=torch.cuda.get_device_name() if device().type == "cuda" else "CPU",
            world_size=self._world.size,
            threads=self._threads,
            zero_stage=self._world.zero_stage,
        )


def _seed_generators(seed: int) -> None:
    if device().type == "cpu":  # for GPUs that are not there torch keeps a stack trace, which takes half a millisecond
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _deviation(plan: StepPlan) -> float | None:
    return None if plan.sft is not None or plan.forward_only else reward_deviation(plan.groups)


def _scalars(plan: StepPlan, updates: int, deviation: float | None) -> TrainingScalars:
    """Of the new state."""
    trend = plan.scalars.reward_trend
    if deviation is not None:
        trend = add(trend, plan.state.step + 1, deviation)
    return TrainingScalars(updates=plan.scalars.updates + (updates if plan.sft is None else 0), reward_trend=trend)


def _options(plan: StepPlan) -> StepOptions:
    return resolve(plan.config) if plan.sft is None else sft_options(resolve(plan.config))


def seed_of(plan: StepPlan) -> int:
    """What the random generators are set to: from the model's seed, its incarnation and the step, never from what ran before."""
    text = f"{plan.settings.seed}/{plan.state.incarnation}/{plan.state.step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
