"""The policy that KL is measured against, computed with the resident model.

Guarantees: inside `as_reference` the model computes the reference's log-probabilities, afterwards it is the learner again, bit for bit.
For LoRA the base model is the model with its adapter off, and another step or adapter is a swap of the adapter's few tensors: there is
never a second model. For full training the weights are swapped with those of the reference, one copy of which is held meanwhile. Gives up:
reference adapters of another rank, scale or other target modules than the model's; they are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import load_file

from headrace.core.errors import HeadraceError
from headrace.trainer.plan import BaseSource, KlReference
from headrace.trainer.shards import Tensors, Trainable
from headrace.trainer.training_state import check_fits, from_rank_0
from headrace.trainer.weights_out import ADAPTER, WHOLE, WeightsFormat

CONFIG = "adapter_config.json"
# What peft multiplies an adapter's product by depends on these: its tensors alone do not tell.
_SCALE: dict[str, object] = {"r": None, "lora_alpha": None, "use_rslora": False, "alpha_pattern": {}, "rank_pattern": {}}


class KlReferenceError(HeadraceError):
    """A reference policy that can't be used; says which and why."""


@contextmanager
def as_reference(
    reference: KlReference,
    base: BaseSource,
    trainable: Trainable,
    model: Any,  # noqa: ANN401 - a transformers model, untyped
    adaptation: WeightsFormat,
) -> Iterator[None]:
    """Compute with the reference's weights while inside. Called by all ranks; folders are rank 0's.

    Raises:
        HeadraceError: the folder holds no weights of this shape.
    """
    if reference.kind == "base" and adaptation == "lora":
        with model.disable_adapter():
            yield
        return
    tensors: Tensors = from_rank_0(lambda: _read(reference, base, trainable, model, adaptation))
    with trainable.instead(tensors):
        del tensors
        yield


def _read(
    reference: KlReference,
    base: BaseSource,
    trainable: Trainable,
    model: Any,  # noqa: ANN401 - as above
    adaptation: WeightsFormat,
) -> Tensors:
    if reference.kind == "base":
        from headrace.trainer.model import load_base  # noqa: PLC0415 - loading imports transformers

        original = load_base(base)
        return {name: parameter.detach() for name, parameter in original.named_parameters() if name in trainable.parameters}
    if reference.folder is None:
        raise KlReferenceError("the KL reference is a set of weights, but no folder of them was given")
    path = Path(reference.folder, ADAPTER if adaptation == "lora" else WHOLE)
    if not path.is_file():
        raise KlReferenceError(f"the KL reference has no {path.name}: a model trained as {adaptation} needs one")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise KlReferenceError(f"the KL reference {path.name} can't be read, it may be truncated: {error}") from error
    if adaptation == "lora":
        _check_scale(path.with_name(CONFIG), model)
        # peft's files leave the adapter's name out of the parameters' names.
        tensors = {name.removesuffix(".weight") + ".default.weight": tensor for name, tensor in tensors.items()}
    found = {name: tensors[name] for name in trainable.parameters if name in tensors}
    check_fits(found if len(found) == len(tensors) else tensors, trainable.parameters, f"the KL reference {path.name}")
    return found


def _check_scale(path: Path, model: Any) -> None:  # noqa: ANN401 - as above
    """The reference is computed with the model's own scale, so the adapter must have been trained with it."""
    try:
        config = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise KlReferenceError(f"the KL reference has no readable {path.name}: {error}") from error
    own = model.peft_config["default"]
    for name, default in _SCALE.items():
        found, needed = config.get(name, default) or default, getattr(own, name) or default
        if found != needed:
            raise KlReferenceError(f"{name} is {found} in the KL reference {path.name}, the model's is {needed}: they must agree")
