"""Training state on disk: what trains and Adam's moments, in safetensors, with the identity of the state next to them.

Guarantees: `load_state` restores exactly what `save_state` wrote, bit for bit, whatever number of ranks or ZeRO stage wrote it; a file
that does not fit the model is refused with the name that does not fit, and weights that are not finite are never written: no version
could follow them. Rank 0 reads and writes; the others need no files. Limitations: writing from several ranks at once.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file, save_file

from headrace.core.errors import HeadraceError
from headrace.trainer.plan import DivergedError, StateKey
from headrace.trainer.shards import Tensors, Trainable

PARAMETERS = "parameters.safetensors"
MOMENTS = "moments.safetensors"
STATE = "state.json"


class SnapshotError(HeadraceError):
    """A snapshot that does not fit: another model's, another state's, or damaged."""


def save_state(folder: Path, key: StateKey, trainable: Trainable) -> None:
    """Write a state into an existing folder. Called by all ranks.

    Raises:
        DivergedError: a weight is infinite or NaN.
    """
    check_finite(trainable)
    parameters, moments = trainable.training_tensors()
    if torch.distributed.get_rank() == 0:
        write_state(folder, key, parameters, moments)


def write_state(folder: Path, key: StateKey, parameters: Tensors, moments: Tensors) -> None:
    """Write a state that `training_tensors` gave, and whose weights are finite, into an existing folder. At rank 0."""
    save_file(parameters, folder / PARAMETERS)
    save_file(moments, folder / MOMENTS)
    (folder / STATE).write_bytes(orjson.dumps(_identity(key), option=orjson.OPT_INDENT_2))


def check_finite(trainable: Trainable) -> None:
    """Refuse a state whose weights are not finite. Called by all ranks.

    Raises:
        DivergedError: a weight is infinite or NaN.
    """
    _check(trainable.whole_parameters())


def _check(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    # All of them, whatever is found: the other ranks take part in gathering each. The least and the largest show what is not finite, a
    # seventh of the time that `isfinite` takes, and are looked at once, since each look waits for the device.
    with torch.no_grad():
        extremes = {name: tensor.aminmax() for name, tensor in parameters if tensor.numel()}
        finite = torch.stack([bound for pair in extremes.values() for bound in pair]).isfinite() if extremes else torch.ones(0)
    if not bool(finite.all()):
        bad = [name for name, fine in zip(extremes, finite.view(-1, 2).all(dim=1).tolist(), strict=True) if not fine]
        raise DivergedError(f"the update made {bad[0]} infinite or NaN: lower the learning rate or the weight decay; the step is not taken")


def load_state(folder: Path, key: StateKey, trainable: Trainable) -> None:
    """Put a state back in place. Called by all ranks; the folder is rank 0's.

    Raises:
        SnapshotError: it is not the state of `key`, or not of this model.
    """

    def read() -> tuple[Tensors, Tensors]:
        found = orjson.loads((folder / STATE).read_bytes())
        if found != _identity(key):
            raise SnapshotError(f"the snapshot in {folder} is of {found}, needed is {_identity(key)}")
        parameters = load_file(folder / PARAMETERS)
        check_fits(parameters, trainable.parameters, f"the snapshot in {folder}")
        return parameters, load_file(folder / MOMENTS)

    parameters, moments = from_rank_0(read)
    trainable.restore(parameters, moments)


def check_fits(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, Any], what: str) -> None:
    """Refuse tensors that are not the model's, by name.

    Raises:
        SnapshotError: naming what does not fit.
    """
    if tensors.keys() != parameters.keys():
        odd = sorted(tensors.keys() ^ parameters.keys())
        raise SnapshotError(f"{what} has other parameters than the model: {', '.join(odd[:3])}")
    for name, parameter in parameters.items():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if list(tensors[name].shape) != shape:
            raise SnapshotError(f"{name} has shape {list(tensors[name].shape)} in {what}, the model has {shape}")


def from_rank_0(read: Any) -> Any:  # noqa: ANN401 - whatever rank 0 reads
    """Rank 0 reads, every rank gets what it read, or raises what it raised."""
    if torch.distributed.get_world_size() == 1:
        return read()
    answer: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = read()
        except Exception as error:  # noqa: BLE001 - the other ranks must not wait for what never comes
            answer[1] = error
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _identity(key: StateKey) -> dict[str, Any]:
    return {"model_id": key.model_id, "incarnation": key.incarnation, "step": key.step, "attempt": key.attempt}
