"""The policy that KL is measured against, computed with the resident model.

Guarantees: inside `as_reference` the model computes the reference's log-probabilities, afterwards it is the learner again, bit for bit.
For LoRA the base model is the model with its adapter off, and another step or adapter is a swap of the adapter's few tensors: there is
never a second model. For full training the weights are swapped with those of the reference, one copy of which is held meanwhile.
Limitations: reference adapters of another rank, scale or other target modules than the model's; they are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.trainer.plan import BaseSource, KlReference
from headrace.trainer.shards import Tensors, Trainable
from headrace.trainer.training_state import from_rank_0
from headrace.trainer.weights_in import StoredWeightsError, read_weights
from headrace.trainer.weights_out import WeightsFormat


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
        raise StoredWeightsError("the KL reference is a set of weights, but no folder of them was given")
    return read_weights(Path(reference.folder), trainable, model, adaptation, what="the KL reference")
