"""A step that has been computed: what its files and its result are made of.

Guarantees: `finish` looks at nothing that the next step changes, so that it may run next to it, in another thread; it makes no collective
call. Limitations: memory, since it holds copies of the weights, and of the optimizer's moments where a snapshot is due.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.state import Fingerprint, TrainingScalars
from headrace.trainer.logprobs_file import write_logprobs
from headrace.trainer.metrics import batch_metrics, token_metrics
from headrace.trainer.options import StepOptions
from headrace.trainer.passes import Passed
from headrace.trainer.placed import placed_rows
from headrace.trainer.plan import StateKey, StepPlan, StepResult
from headrace.trainer.rows import PackedUpdate
from headrace.trainer.rows_out import write_rows
from headrace.trainer.shards import Tensors
from headrace.trainer.training_state import write_state
from headrace.trainer.update import joined
from headrace.trainer.weights_out import WeightsWriter


@dataclass(slots=True, kw_only=True)
class Clock:
    """Seconds by phase."""

    started: float
    began: float
    phases: dict[str, float]

    @classmethod
    def start(cls) -> "Clock":
        """Now."""
        now = time.perf_counter()
        return cls(started=now, began=now, phases={})

    def lap(self, phase: str) -> None:
        """A phase ends; one that was lapped before continues."""
        now = time.perf_counter()
        name = f"seconds_{phase}"
        self.phases[name] = self.phases.get(name, 0.0) + now - self.began
        self.began = now

    @property
    def seconds(self) -> float:
        """From the start to the last lap."""
        return self.began - self.started


@dataclass(slots=True, kw_only=True)
class ComputedStep:
    """At one rank; files and result are rank 0's to make."""

    plan: StepPlan
    options: StepOptions
    key: StateKey
    """The new state, which is on the device."""
    scalars: TrainingScalars
    """Of the new state."""
    updates: Sequence[PackedUpdate]
    passed: Passed
    seed: int
    writer: WeightsWriter
    tensors: Tensors
    """The weights, at rank 0."""
    snapshot: tuple[Tensors, Tensors] | None
    """Parameters and moments, at rank 0; None where the plan asks for no snapshot."""
    peak_memory: float
    """Bytes, the most of all ranks."""
    fingerprint: Fingerprint
    clock: Clock
    beside: bool = False
    """Whether the next step runs while this one is finished: the time of that is not this one's."""

    def finish(self) -> StepResult:
        """Write the step's files, and say what it did. At rank 0.

        Raises:
            OSError: a file can't be written.
        """
        out_dir = Path(self.plan.out_dir)
        (out_dir / "weights").mkdir(parents=True, exist_ok=True)
        self.writer.write(out_dir / "weights", self.tensors)
        if self.snapshot is not None:
            (out_dir / "snapshot").mkdir(exist_ok=True)
            write_state(out_dir / "snapshot", self.key, *self.snapshot)
        if self.options.plot_tensors and self.updates:
            from headrace.trainer.plots import plot_rows  # noqa: PLC0415 - draws with matplotlib, seldom asked for

            plot_rows(self.updates, out_dir / "plots")
        self._write_tokens(out_dir)
        if not self.beside:
            self.clock.lap("write")
        return self._result()

    def _write_tokens(self, out_dir: Path) -> None:
        plan, packed, stats, ranks = self.plan, self.passed.packed, self.passed.stats, self.fingerprint.world_size
        if plan.forward_only:
            write_logprobs(out_dir / "logprobs", self.key, plan.groups, placed_rows(packed, stats, ranks))
        else:
            write_rows(out_dir / "rows", plan, self.key, packed, stats, ranks=ranks, seed=self.seed)

    def _result(self) -> StepResult:
        passed, done, packed = self.passed, self.passed.done, self.passed.packed
        loss = sum(updated.loss for updated in done) / len(done) if done else None
        norm = max((updated.grad_norm for updated in done), default=None)
        metrics = batch_metrics(self.plan.groups, packed) | {"updates": float(len(done)), "peak_memory_bytes": self.peak_memory}
        metrics |= self.clock.phases
        metrics |= {f"eval/{name}": value for name, value in passed.evaluation.items()}
        metrics |= token_metrics(joined(passed.stats)) if passed.stats else {}
        if loss is not None and norm is not None:
            seconds = self.clock.phases["seconds_update"]
            metrics |= {
                "loss": loss,
                "policy_loss": sum(updated.policy_loss for updated in done) / len(done),
                "kl_loss": sum(updated.kl_loss for updated in done) / len(done),
                "grad_norm": norm,
                "learning_rate": passed.rates[-1],
                "tokens_per_second": metrics["tokens"] / seconds if seconds > 0 else 0.0,
            }
        return StepResult(
            key=self.key,
            scalars=self.scalars,
            updates=len(done),
            loss=loss,
            grad_norm=norm,
            num_sequences=sum(1 for update in packed for _ in update.rows),
            tokens=sum(len(row) for update in packed for row in update.rows),
            metrics=metrics,
            plan_digest=_digest(packed),
            seed=self.seed,
            weights_format=self.writer.format,
            seconds=self.clock.seconds,
            fingerprint=self.fingerprint,
        )


def _digest(updates: Sequence[PackedUpdate]) -> str:
    """SHA-256 over the plans of all updates."""
    return hashlib.sha256("".join(update.digest() for update in updates).encode()).hexdigest()
