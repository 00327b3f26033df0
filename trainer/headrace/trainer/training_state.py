"""A training state on disk: trainable parameters, Adam's moments and the step, as safetensors and JSON. Never pickle.

Guarantees: what is read back continues bit for bit; a file that does not fit the model is refused with the name that does not fit.
Gives up: state sharded over ranks.
"""

from pathlib import Path

import orjson
import torch
from safetensors.torch import load_file, save_file

from headrace.core.errors import HeadraceError
from headrace.trainer.plan import StateKey

PARAMETERS = "parameters.safetensors"
MOMENTS = "moments.safetensors"
STATE = "state.json"


class SnapshotError(HeadraceError):
    """A snapshot that does not fit: another model's, another state's, or damaged."""


def save_state(folder: Path, key: StateKey, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write a state into an existing folder."""
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in parameters.items()}
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for part, value in optimizer.state.get(parameter, {}).items():
            moments[f"{name}/{part}"] = value.detach().cpu().contiguous()
    save_file(tensors, folder / PARAMETERS)
    save_file(moments, folder / MOMENTS)
    state = {"model_id": key.model_id, "incarnation": key.incarnation, "step": key.step, "attempt": key.attempt}
    (folder / STATE).write_bytes(orjson.dumps(state, option=orjson.OPT_INDENT_2))


def load_state(folder: Path, key: StateKey, parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put a state back in place.

    Raises:
        SnapshotError: it is not the state of `key`, or not of this model.
    """
    found = orjson.loads((folder / STATE).read_bytes())
    expected = {"model_id": key.model_id, "incarnation": key.incarnation, "step": key.step, "attempt": key.attempt}
    if found != expected:
        raise SnapshotError(f"the snapshot in {folder} is of {found}, needed is {expected}")
    tensors, moments = load_file(folder / PARAMETERS), load_file(folder / MOMENTS)
    if tensors.keys() != parameters.keys():
        odd = sorted(tensors.keys() ^ parameters.keys())
        raise SnapshotError(f"the snapshot in {folder} has other parameters than the model: {', '.join(odd[:3])}")
    optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in parameters.items():
            if tensors[name].shape != parameter.shape:
                raise SnapshotError(f"{name} has shape {list(tensors[name].shape)} in {folder}, the model has {list(parameter.shape)}")
            parameter.copy_(tensors[name])
    for full, value in moments.items():
        name, _, part = full.rpartition("/")
        # Adam's step counter stays on the CPU, as torch keeps it.
        optimizer.state[parameters[name]][part] = value if part == "step" else value.to(parameters[name].device)
