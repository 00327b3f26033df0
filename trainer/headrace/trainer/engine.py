"""The training engine: one resident training state on one device; a plan in, a step out.

Guarantees: a step starts from exactly the state that its plan names, resident or loaded, else it fails (exactly-once rule 5); one
optimizer update a step over all packed rows, normalised by the step's trainable tokens, so the gradient does not depend on the
number of micro batches; random generators are set from (seed, incarnation, step); a step with nothing to train changes nothing
and still writes its files. Gives up: several ranks; several base models at once.
"""

import hashlib
import logging
import math
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import HeadraceError
from headrace.schemas.state import Fingerprint
from headrace.schemas.training import ModelSettings
from headrace.trainer.advantages import batch_credits
from headrace.trainer.deepspeed_setup import device, join_world, start_engine
from headrace.trainer.forward import micro_batches, sampled_logprobs
from headrace.trainer.loss import policy_loss
from headrace.trainer.metrics import StepMetrics
from headrace.trainer.model import RowLayout, adapt, load_base, row_layout, trainable_parameters
from headrace.trainer.options import StepOptions, resolve
from headrace.trainer.packing import PackedRows, pack
from headrace.trainer.plan import BaseSource, StateKey, StepPlan, StepResult
from headrace.trainer.training_state import load_state, save_state
from headrace.trainer.weights_out import WeightsWriter

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Loaded:
    """A model on the device."""

    base: BaseSource
    settings: ModelSettings
    engine: Any
    """DeepSpeed's."""
    optimizer: torch.optim.AdamW
    parameters: dict[str, torch.nn.Parameter]
    writer: WeightsWriter
    layout: RowLayout


class TrainingEngine:
    """Trains on this process's device.

    Args:
        threads: Torch threads; 0: all cores. Part of the fingerprint: another number gives other bits.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads or os.cpu_count() or 1
        torch.set_num_threads(self._threads)
        join_world()
        self._loaded: _Loaded | None = None
        self._resident: StateKey | None = None
        self._preloaded: tuple[BaseSource, Any] | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            HeadraceError: the base model or the snapshot can't be used, or the plan names a state that is neither resident nor given.
        """
        try:
            return self._run(plan)
        except BaseException:
            # Half a step leaves weights, moments and gradients that nobody knows: the next plan starts from files.
            self._loaded = self._resident = None
            raise

    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        options = resolve(plan.config)
        loaded = self._at(plan)
        seed = seed_of(plan)
        torch.manual_seed(seed)
        prepared = time.perf_counter()
        rows = pack(
            plan.groups,
            batch_credits(plan.groups, options.advantages),
            options.packed_sequence_length,
            alone=loaded.layout is RowLayout.ALONE,
        )
        metrics = StepMetrics(plan.groups, rows)
        packed = time.perf_counter()
        trained = rows.trainable_tokens > 0
        if trained:
            self._update(loaded, rows, options, metrics)
        updated = time.perf_counter()
        key = StateKey(model_id=plan.state.model_id, incarnation=plan.state.incarnation, step=plan.state.step + 1, attempt=plan.attempt)
        self._write(loaded, Path(plan.out_dir), key)
        self._resident = key
        ended = time.perf_counter()
        phases = {
            "seconds_prepare": prepared - began,
            "seconds_pack": packed - prepared,
            "seconds_update": updated - packed,
            "seconds_write": ended - updated,
        }
        return StepResult(
            key=key,
            scalars=plan.scalars,
            updates=int(trained),
            loss=metrics.loss if trained else None,
            grad_norm=metrics.grad_norm if trained else None,
            num_sequences=rows.rows,
            tokens=rows.tokens,
            metrics={**metrics.as_dict(options, seconds=updated - packed), **phases},
            plan_digest=rows.digest(),
            seed=seed,
            weights_format=loaded.writer.format,
            seconds=ended - began,
            fingerprint=self.fingerprint(),
        )

    def preload(self, base: BaseSource) -> None:
        """Load a base model that the first plan will need; another base drops it."""
        if self._loaded is None:
            self._preloaded = (base, load_base(base))

    def fingerprint(self) -> Fingerprint:
        """The environment."""
        return Fingerprint(
            headrace=version("headrace"),
            torch=torch.__version__,
            transformers=version("transformers"),
            deepspeed=version("deepspeed"),
            python=platform.python_version(),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            world_size=1,
            threads=self._threads,
        )

    def _at(self, plan: StepPlan) -> _Loaded:
        """The model in the state that the plan starts from."""
        loaded = self._loaded
        fits = loaded is not None and (loaded.base, loaded.settings) == (plan.base, plan.settings)
        if loaded is not None and fits and plan.state == self._resident:
            return loaded
        if plan.state.step > 0 and plan.load_from is None:
            raise HeadraceError(
                f"the plan starts from {plan.state}, which this rank does not hold ({self._resident}), and brings no snapshot"
            )
        if loaded is None or not fits or plan.state.step == 0:
            loaded = self._load(plan)
        self._resident = None
        if plan.load_from is not None:
            load_state(Path(plan.load_from), plan.state, loaded.parameters, loaded.optimizer)
        return loaded

    def _load(self, plan: StepPlan) -> _Loaded:
        self._loaded = self._resident = None  # frees the memory of the former model first
        preloaded, self._preloaded = self._preloaded, None
        base = preloaded[1] if preloaded is not None and preloaded[0] == plan.base else load_base(plan.base)
        torch.manual_seed(plan.settings.seed)  # LoRA's first factor is random
        model = adapt(base, plan.settings).to(device())
        layout = row_layout(model)
        if layout is RowLayout.ALONE:
            logger.warning("%s lets packed sequences see each other: every sequence gets a row of its own", plan.base.path)
        parameters = trainable_parameters(model)
        settings = plan.settings.optimizer
        optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=0.0, betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=settings.weight_decay
        )
        writer = WeightsWriter(model, plan.base, plan.settings.adaptation)
        self._loaded = _Loaded(
            base=plan.base,
            settings=plan.settings,
            engine=start_engine(model, optimizer, settings.max_grad_norm),
            optimizer=optimizer,
            parameters=parameters,
            writer=writer,
            layout=layout,
        )
        return self._loaded

    @staticmethod
    def _update(loaded: _Loaded, rows: PackedRows, options: StepOptions, metrics: StepMetrics) -> None:
        for group in loaded.optimizer.param_groups:
            group["lr"] = options.learning_rate
        batches = micro_batches(rows, device())
        # Never in training mode: dropout would make the learner another policy than the sampler, and a replay depend on the packing.
        loaded.engine.module.eval()
        for i, batch in enumerate(batches):
            loaded.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            new_N, entropy_N = sampled_logprobs(loaded.engine, batch)
            output = policy_loss(new_N, batch.tokens, options.loss)
            loss = output.total / rows.trainable_tokens
            loaded.engine.backward(loss)
            metrics.add(new_N.detach(), entropy_N, batch.tokens, output, loss.detach())
            if i == len(batches) - 1:
                metrics.grad_norm = _grad_norm(loaded.parameters)
                if not math.isfinite(metrics.grad_norm):
                    raise HeadraceError(f"the gradient is not finite (loss {metrics.loss}): the weights stay as they were")
            loaded.engine.step()

    @staticmethod
    def _write(loaded: _Loaded, out_dir: Path, key: StateKey) -> None:
        for name in ("weights", "snapshot"):
            (out_dir / name).mkdir(parents=True, exist_ok=True)
        loaded.writer.write(out_dir / "weights")
        save_state(out_dir / "snapshot", key, loaded.parameters, loaded.optimizer)


def seed_of(plan: StepPlan) -> int:
    """What the random generators are set to: from the model's seed, its incarnation and the step, never from what ran before."""
    text = f"{plan.settings.seed}/{plan.state.incarnation}/{plan.state.step}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _grad_norm(parameters: dict[str, torch.nn.Parameter]) -> float:
    norms = [parameter.grad.detach().float().norm() for parameter in parameters.values() if parameter.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
