"""The training engine: one resident training state on one rank of a world; a plan in, a step out.

Guarantees: a step starts from exactly the state that its plan names, resident or loaded, else it fails (exactly-once rule 5); random
generators are set from (seed, incarnation, step); a step with nothing to train changes nothing and still writes its files. All ranks of
a world run the same plan; rank 0 reads and writes files. Gives up: several base models at once.
"""

import hashlib
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from headrace.schemas.state import Fingerprint, TrainingScalars
from headrace.trainer.batches import RowShape, policy_updates, sft_options, sft_updates
from headrace.trainer.deepspeed_setup import device, join_world, over_ranks
from headrace.trainer.logprobs_file import write_logprobs
from headrace.trainer.metrics import batch_metrics, peak_memory, reset_peak_memory, token_metrics
from headrace.trainer.options import StepOptions, resolve
from headrace.trainer.passes import Passed, StepPasses
from headrace.trainer.placed import placed_rows
from headrace.trainer.plan import BaseSource, Saved, SavePlan, StateKey, StepPlan, StepResult
from headrace.trainer.resident import Loaded, Resident
from headrace.trainer.reward_trend import add, reward_deviation
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.rows_out import write_rows
from headrace.trainer.training_state import check_finite, save_state
from headrace.trainer.update import joined
from headrace.trainer.world import Seat, WorldSettings

logger = logging.getLogger(__name__)

# Tokens of one row: their activations live until its backward. 2,048 tokens of a 135M model in float32 are about 4 GiB.
TOKENS = {"cpu": 2_048, "cuda": 16_384}


@dataclass(slots=True, kw_only=True)
class _Clock:
    """Seconds by phase."""

    began: float
    phases: dict[str, float]

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[f"seconds_{phase}"] = now - self.began
        self.began = now


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A step that is packed before its turn."""

    out_dir: str
    """Of its plan, and of no other."""
    shape: RowShape
    updates: list[PackedUpdate]


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
            self._ready = _Ready(out_dir=plan.out_dir, shape=shape, updates=self._updates(plan, _options(plan), shape, seed_of(plan)))

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            HeadraceError: the base model, the snapshot or the KL reference can't be used, the plan names a state that is neither resident
                nor given, or the gradient is not finite.
        """
        try:
            return self._run(plan)
        except BaseException:
            # Half a step leaves weights, moments and gradients that nobody knows: the next plan starts from files.
            self._resident.drop()
            raise

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        clock = _Clock(began=began, phases={})
        reset_peak_memory()
        options = _options(plan)
        self._warn(plan.state.model_id, options)
        loaded = self._resident.at(plan)
        seed = seed_of(plan)
        torch.manual_seed(seed)
        clock.lap("prepare")
        shape = self._shape = RowShape(
            tokens=self._world.tokens_per_pass or TOKENS[device().type], ranks=self._world.size, alone=loaded.scorer.width is None
        )
        ready, self._ready = self._ready, None
        if ready is not None and (ready.out_dir, ready.shape) == (plan.out_dir, shape):
            updates = ready.updates
        else:
            updates = self._updates(plan, options, shape, seed)
        clock.lap("pack")
        passed = StepPasses(loaded, plan, options, self._world, self._seat).run(updates, shape, clock.lap)
        done, packed = passed.done, passed.packed
        key = plan.becomes or replace(plan.state, step=plan.state.step + 1, attempt=plan.attempt)
        self._write(loaded, plan, options, updates, key)
        if self._seat.rank == 0:
            self._write_tokens(plan, key, passed, seed)
        self._resident.is_now(key)
        clock.lap("write")
        loss = sum(updated.loss for updated in done) / len(done) if done else None
        norm = max((updated.grad_norm for updated in done), default=None)
        peak = over_ranks(torch.tensor([peak_memory()], dtype=torch.float64), torch.distributed.ReduceOp.MAX)
        metrics = batch_metrics(plan.groups, packed) | {"updates": float(len(done)), "peak_memory_bytes": float(peak)} | clock.phases
        metrics |= {f"eval/{name}": value for name, value in passed.evaluation.items()}
        metrics |= token_metrics(joined(passed.stats)) if passed.stats else {}  # at other ranks than 0 perhaps none
        if loss is not None and norm is not None:
            seconds = clock.phases["seconds_update"]
            metrics |= {
                "loss": loss,
                "policy_loss": sum(updated.policy_loss for updated in done) / len(done),
                "kl_loss": sum(updated.kl_loss for updated in done) / len(done),
                "grad_norm": norm,
                "learning_rate": passed.rates[-1],
                "tokens_per_second": metrics["tokens"] / seconds if seconds > 0 else 0.0,
            }
        return StepResult(
            key=key,
            scalars=self._scalars(plan, len(done)),
            updates=len(done),
            loss=loss,
            grad_norm=norm,
            num_sequences=sum(1 for update in packed for _ in update.rows),
            tokens=sum(len(row) for update in packed for row in update.rows),
            metrics=metrics,
            plan_digest=_digest(packed),
            seed=seed,
            weights_format=loaded.writer.format,
            seconds=time.perf_counter() - began,
            fingerprint=self.fingerprint(),
        )

    def save(self, plan: SavePlan) -> Saved:
        """Write the resident state as a snapshot. Called by all ranks; rank 0 writes.

        Raises:
            HeadraceError: another state is resident.
        """
        save_state(Path(plan.folder), plan.state, self._resident.holding(plan.state).trainable)
        return Saved()

    def _warn(self, model_id: str, options: StepOptions) -> None:
        """Each warning once, by rank 0."""
        for warning in options.warnings if self._seat.rank == 0 else ():
            if (model_id, warning) not in self._warned:
                self._warned.add((model_id, warning))
                logger.warning("model %s: %s", model_id, warning)

    @staticmethod
    def _updates(plan: StepPlan, options: StepOptions, shape: RowShape, seed: int) -> list[PackedUpdate]:
        if plan.forward_only:
            return []
        if plan.sft is not None:
            return sft_updates(plan.groups, plan.sft, shape, seed, options.packed_sequence_length)
        return policy_updates(plan.groups, options, shape, plan.state.step)

    @staticmethod
    def _scalars(plan: StepPlan, updates: int) -> TrainingScalars:
        trend = plan.scalars.reward_trend
        deviation = None if plan.sft is not None or plan.forward_only else reward_deviation(plan.groups)
        if deviation is not None:
            trend = add(trend, plan.state.step + 1, deviation)
        return TrainingScalars(updates=plan.scalars.updates + (updates if plan.sft is None else 0), reward_trend=trend)

    def preload(self, base: BaseSource) -> None:
        """Load a base model that the first plan will need; another base drops it."""
        self._resident.preload(base)

    def drop(self) -> None:
        """Free the model on the device; the next plan loads one."""
        self._resident.drop()

    def fingerprint(self) -> Fingerprint:
        """The environment."""
        return Fingerprint(
            headrace=version("headrace"),
            torch=torch.__version__,
            transformers=version("transformers"),
            deepspeed=version("deepspeed"),
            python=platform.python_version(),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            world_size=self._world.size,
            threads=self._threads,
            zero_stage=self._world.zero_stage,
        )

    def _write(self, loaded: Loaded, plan: StepPlan, options: StepOptions, updates: Sequence[PackedUpdate], key: StateKey) -> None:
        out_dir = Path(plan.out_dir)
        # Rank 0 writes; the others take part in gathering what is sharded.
        if self._seat.rank == 0:
            for name in ("weights", "snapshot") if plan.snapshot else ("weights",):
                (out_dir / name).mkdir(parents=True, exist_ok=True)
        loaded.writer.write(out_dir / "weights")
        if plan.snapshot:
            save_state(out_dir / "snapshot", key, loaded.trainable)
        else:
            check_finite(loaded.trainable)
        if options.plot_tensors and updates and self._seat.rank == 0:
            from headrace.trainer.plots import plot_rows  # noqa: PLC0415 - draws with matplotlib, seldom asked for

            plot_rows(updates, out_dir / "plots")

    def _write_tokens(self, plan: StepPlan, key: StateKey, passed: Passed, seed: int) -> None:
        ranks = self._world.size
        if plan.forward_only:
            write_logprobs(Path(plan.out_dir, "logprobs"), key, plan.groups, placed_rows(passed.packed, passed.stats, ranks))
        else:
            write_rows(Path(plan.out_dir, "rows"), plan, key, passed.packed, passed.stats, ranks=ranks, seed=seed)


def _digest(updates: Sequence[PackedUpdate]) -> str:
    """SHA-256 over the plans of all updates."""
    return hashlib.sha256("".join(update.digest() for update in updates).encode()).hexdigest()


def _options(plan: StepPlan) -> StepOptions:
    return resolve(plan.config) if plan.sft is None else sft_options(resolve(plan.config))


def seed_of(plan: StepPlan) -> int:
    """What the random generators are set to: from the model's seed, its incarnation and the step, never from what ran before."""
    text = f"{plan.settings.seed}/{plan.state.incarnation}/{plan.state.step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
