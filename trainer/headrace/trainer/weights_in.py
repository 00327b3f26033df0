"""Stored weights as tensors of the resident model: a peft adapter for LoRA, a whole model for full training.

Guarantees: they fit, by name and shape, and an adapter was trained with the model's own rank and scale, which its tensors alone do not
tell; else the error names what differs. Limitations: adapters of another rank, scale or other target modules.
"""

from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file

from headrace.core.errors import HeadraceError
from headrace.trainer.shards import Tensors, Trainable
from headrace.trainer.training_state import check_fits
from headrace.trainer.weights_out import ADAPTER, WHOLE, WeightsFormat

CONFIG = "adapter_config.json"
# What peft multiplies an adapter's product by depends on these.
_SCALE: dict[str, object] = {"r": None, "lora_alpha": None, "use_rslora": False, "alpha_pattern": {}, "rank_pattern": {}}


class StoredWeightsError(HeadraceError):
    """Weights that can't be used; says which and why."""


def read_weights(
    folder: Path,
    trainable: Trainable,
    model: Any,  # noqa: ANN401 - a transformers model, untyped
    adaptation: WeightsFormat,
    *,
    what: str,
) -> Tensors:
    """The parameters that a folder has, by the model's own names. Rank 0's to call.

    Args:
        folder: As `WeightsWriter` writes it.
        trainable: What trains of the model.
        model: The model.
        adaptation: How it trains.
        what: What the weights are to be, for messages, as `the KL reference`.

    Raises:
        HeadraceError: the folder holds no weights of this shape, or an adapter of another scale.
    """
    path = folder / (ADAPTER if adaptation == "lora" else WHOLE)
    if not path.is_file():
        raise StoredWeightsError(f"{what} has no {path.name}: a model trained as {adaptation} needs one")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise StoredWeightsError(f"{what} {path.name} can't be read, it may be truncated: {error}") from error
    if adaptation == "lora":
        _check_scale(path.with_name(CONFIG), model, what)
        # peft's files leave the adapter's name out of the parameters' names.
        tensors = {name.removesuffix(".weight") + ".default.weight": tensor for name, tensor in tensors.items()}
    found = {name: tensors[name] for name in trainable.parameters if name in tensors}
    check_fits(found if len(found) == len(tensors) else tensors, trainable.parameters, f"{what} {path.name}")
    return found


def _check_scale(path: Path, model: Any, what: str) -> None:  # noqa: ANN401 - as above
    try:
        config = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoredWeightsError(f"{what} has no readable {path.name}: {error}") from error
    own = model.peft_config["default"]
    for name, default in _SCALE.items():
        found, needed = config.get(name, default) or default, getattr(own, name) or default
        if found != needed:
            raise StoredWeightsError(f"{name} is {found} in {what} {path.name}, the model's is {needed}: they must agree")
