"""Whole tensors of a model that ZeRO may have sharded: parameters, Adam's moments, and how they are put back.

Guarantees: what `training_tensors` returns does not depend on the ZeRO stage or the number of ranks, so a snapshot of any world is loaded
by any other; `restore` makes the state that `training_tensors` gave. Every function here is called by all ranks, in the same order.
Limitations: tensors that do not fit into one rank's memory one at a time.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import get_rank, get_world_size

from headrace.trainer.deepspeed_setup import over_ranks

MOMENTS = ("exp_avg", "exp_avg_sq")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """What trains of a loaded model."""

    engine: Any
    """DeepSpeed's."""
    optimizer: torch.optim.Optimizer
    """Torch's own, below ZeRO's."""
    parameters: dict[str, torch.nn.Parameter]
    """By name, in one order."""
    zero_stage: int

    @property
    def _zero(self) -> Any:  # noqa: ANN401 - ZeRO's optimizer, untyped
        return self.engine.optimizer

    @property
    def _flat(self) -> list[torch.Tensor]:
        """ZeRO's own flat partitions, over which torch's optimizer runs."""
        name = "fp32_partitioned_groups_flat" if self.zero_stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self._zero, name))

    def start_moments(self) -> None:
        """Zero moments where ZeRO has none yet: it makes them at the first update only, too late to be restored."""
        if self.zero_stage == 0:
            return
        for flat in self._flat:
            state = self.optimizer.state[flat]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in MOMENTS:
                    state[name] = torch.zeros_like(flat, memory_format=torch.preserve_format)
        if self.zero_stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters by name, whole, where they are; one at a time. Called by all ranks, to the end."""
        return ((name, self._parameter(parameter)) for name, parameter in self.parameters.items())

    def training_tensors(self) -> tuple[Tensors, Tensors]:
        """Parameters by name, and moments by `name/exp_avg`, `name/exp_avg_sq`, `name/step`: whole copies on the CPU, at rank 0 only."""
        kept = get_rank() == 0
        parameters = {name: _cpu(value) for name, value in self.whole_parameters() if kept}
        moments: Tensors = {}
        for name, parameter in self.parameters.items():
            moments |= {f"{name}/{part}": _cpu(value) for part, value in self._moments(parameter).items() if kept}
        return parameters, moments

    def restore(self, parameters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
        """Put parameters and moments back; names and shapes are the model's (the caller has seen to it)."""
        self.set_parameters(parameters)
        if self.zero_stage == 0:
            self.optimizer.state.clear()
            for full, value in moments.items():
                name, _, part = full.rpartition("/")
                parameter = self.parameters[name]
                # Adam's step counter stays on the CPU, as torch keeps it.
                self.optimizer.state[parameter][part] = value.clone() if part == "step" else value.to(parameter.device, copy=True)
            return
        self.start_moments()
        steps = {float(value) for full, value in moments.items() if full.endswith("/step")} or {0.0}
        (step,) = steps  # one optimizer updates all parameters together
        for flat in self._flat:
            self.optimizer.state[flat]["step"] = torch.tensor(step)
        for name, parameter in self.parameters.items():
            for part in MOMENTS:
                moment = moments.get(f"{name}/{part}")
                self._set_high_precision(parameter, torch.zeros(_shape(parameter)) if moment is None else moment, part)

    def set_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set parameters, where the model computes with them and where ZeRO keeps its own copy."""
        with torch.no_grad():
            for name, value in values.items():
                parameter = self.parameters[name]
                if self.zero_stage > 0:
                    self._set_high_precision(parameter, value, None)
                with gathered([parameter], write=True):
                    parameter.data.copy_(value)

    @contextmanager
    def instead(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with other values for a while; bit for bit the old ones afterwards."""
        before = {name: _cpu(_gathered_copy(self.parameters[name])) for name in values}
        self._compute_with(values)
        try:
            yield
        finally:
            self._compute_with(before)

    def _compute_with(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                with gathered([self.parameters[name]], write=True):
                    self.parameters[name].data.copy_(value)

    def grad_norm(self) -> float:
        """Euclidean norm of the whole gradient before clipping; without ZeRO before the update, with ZeRO after it."""
        if self.zero_stage > 0:
            norm = self.engine.get_global_grad_norm()
            return float(norm) if norm is not None else 0.0
        norms = [parameter.grad.detach().float().norm() for parameter in self.parameters.values() if parameter.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def norm(self) -> tuple[float, int]:
        """Euclidean norm of all weights that train, and how many they are. Called by all ranks; infinite where squares overflow."""
        parts = [parameter.detach() for parameter in self.parameters.values()] if self.zero_stage == 0 else self._flat
        norms = torch.stack(torch._foreach_norm(parts)).detach().double() if parts else torch.zeros(1, dtype=torch.float64)
        square = (norms**2).sum().reshape(1)
        if self.zero_stage > 0:
            square = over_ranks(square)
        return math.sqrt(float(square)), sum(_shape(parameter).numel() for parameter in self.parameters.values())

    def _parameter(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if self.zero_stage == 0:
            return parameter
        from deepspeed.utils import safe_get_full_fp32_param  # noqa: PLC0415 - `join_world` imported it

        return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]  # untyped

    def _moments(self, parameter: torch.nn.Parameter) -> Tensors:
        if self.zero_stage == 0:
            return dict(self.optimizer.state.get(parameter, {}))
        from deepspeed.utils import safe_get_full_optimizer_state  # noqa: PLC0415 - `join_world` imported it

        self.start_moments()
        step = self.optimizer.state[self._flat[0]]["step"]
        return {part: safe_get_full_optimizer_state(parameter, part) for part in MOMENTS} | {"step": torch.tensor(float(step))}

    def _set_high_precision(self, parameter: Any, value: torch.Tensor, part: str | None) -> None:  # noqa: ANN401 - as DeepSpeed extends it
        if self.zero_stage == 3:
            from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state  # noqa: PLC0415 - as above

            # By hand: DeepSpeed's setter of whole tensors cuts beyond the end where a partition is padded.
            share = parameter.ds_tensor.numel()
            padded = torch.zeros(share * get_world_size())
            padded[: value.numel()] = value.flatten()
            own = padded[share * get_rank() : share * (get_rank() + 1)]
            safe_set_local_fp32_param(parameter, own) if part is None else safe_set_local_optimizer_state(parameter, own, part)
        else:
            from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state  # noqa: PLC0415 - as above

            value = value.to(parameter.device)
            safe_set_full_fp32_param(parameter, value) if part is None else safe_set_full_optimizer_state(parameter, value, part)


@contextmanager
def gathered(parameters: list[Any], *, write: bool = False) -> Iterator[None]:
    """Parameters whole while inside, where ZeRO 3 has sharded them; what rank 0 writes counts."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed  # noqa: PLC0415 - `join_world` imported it

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
        yield


def _gathered_copy(parameter: torch.nn.Parameter) -> torch.Tensor:
    with gathered([parameter]):
        return parameter.detach().clone()


def _shape(parameter: Any) -> torch.Size:  # noqa: ANN401 - as DeepSpeed extends it
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, also of what is there already: the model trains on."""
    return tensor.detach().to("cpu", copy=True).contiguous()
