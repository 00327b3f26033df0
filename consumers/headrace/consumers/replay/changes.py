"""The changes of a fork (`--set learning_rate=1e-4 --set optimizer.beta1=0.8`), and how far its weights are from the original's.

Guarantees: an unknown field, a value outside its range and two options that contradict each other are rejected before anything runs, with
the field's name. Distances are Euclidean, tensor by tensor and over all, as float64 sums: `relative = ||ours - theirs|| / ||theirs||`.
Limitations: only training options can change; the ledger decides which groups a step has. An adapter is compared factor by factor, not as
the product of both.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from headrace.core.errors import HeadraceError
from headrace.schemas.training import ModelSettings, OptimizerSettings, TrainConfig, row_length_problem

M = TypeVar("M", bound=BaseModel)

_OPTIMIZER = "optimizer."
_NULLABLE = {"epsilon_high", "optimizer.schedule_updates"}


class ChangeError(HeadraceError):
    """A change that can't be made; says which field and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChanges:
    """Changes to the training of a model."""

    config: TrainConfig | None = None
    """Merged over each record's own."""
    optimizer: dict[str, Any] | None = None
    """Fields of the model's optimizer settings."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "OptionChanges":
        """From `name=value` each; a value is JSON, or else a text.

        Raises:
            ChangeError: no such field, an invalid value, or a field twice.
        """
        given: dict[str, Any] = {}
        known = [*TrainConfig.model_fields, *(f"{_OPTIMIZER}{field}" for field in OptimizerSettings.model_fields)]
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            if not value:
                raise ChangeError(f"--set {text!r}: write it as learning_rate=1e-4")
            if name in given:
                raise ChangeError(f"--set {name}: it is set twice")
            if name not in known:
                raise ChangeError(f"--set {name}: there is no such option; there are {', '.join(sorted(known))}")
            given[name] = _value(name, value)
        config = {name: value for name, value in given.items() if not name.startswith(_OPTIMIZER)}
        optimizer = {name.removeprefix(_OPTIMIZER): value for name, value in given.items() if name.startswith(_OPTIMIZER)}
        return cls(config=_validated(TrainConfig, config) if config else None, optimizer=optimizer or None)

    def settings(self, model: ModelSettings) -> ModelSettings:
        """The model's settings with the changed optimizer; its `train` is left alone, since each step brings its own config.

        Raises:
            ChangeError: the changes are not valid for this model.
        """
        # Merging contradicts nothing else: what the changes name by one of several names replaces what the config names by another.
        if self.config is not None and (problem := row_length_problem(self.config, model.max_sequence_tokens)) is not None:
            raise ChangeError(f"--set does not fit the model: {problem}")
        if self.optimizer is None:
            return model
        optimizer = _validated(OptimizerSettings, {**model.optimizer.model_dump(), **self.optimizer}, _OPTIMIZER)
        return model.model_copy(update={"optimizer": optimizer})


def _value(name: str, text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = text
    # A null hides nothing of the config below it, so it would be a change that changes nothing.
    if value is None and name not in _NULLABLE:
        raise ChangeError(f"--set {name}=null: null stands for what the step's own config says; give the value itself")
    return value


def _validated(schema: type[M], fields: dict[str, Any], prefix: str = "") -> M:
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        # Two fields that contradict each other have no place: the message names both.
        where = prefix + ".".join(str(part) for part in fault["loc"])
        what = str(fault["msg"]).removeprefix("Value error, ")
        raise ChangeError(f"--set {where.rstrip('.')}: {what}".replace("--set : ", "--set ")) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Between two tensors, or between all of two models."""

    name: str
    distance: float
    """||ours - theirs||."""
    norm: float
    """||theirs||."""

    @property
    def relative(self) -> float:
        """Distance by norm; infinite where only the norm is 0."""
        return self.distance / self.norm if self.norm else (math.inf if self.distance else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDistance:
    """Between two folders of weights."""

    total: Distance
    tensors: tuple[Distance, ...]
    """The farthest first, by relative distance."""


def weights_distance(ours: Path, theirs: Path) -> WeightsDistance:
    """Compare two folders as `WeightsWriter` writes them: of the fork, and of the original. Blocks, and imports torch.

    Raises:
        HeadraceError: they do not have the same tensors, of the same shapes.
    """
    from safetensors import safe_open  # noqa: PLC0415 - reads into torch, which takes seconds

    names = sorted(path.name for path in theirs.glob("*.safetensors"))
    if names != sorted(path.name for path in ours.glob("*.safetensors")):
        raise HeadraceError(f"the weights in {ours} and {theirs} are not in files of the same names: they can't be compared")
    found: list[Distance] = []
    for name in names:
        with safe_open(ours / name, "pt") as a, safe_open(theirs / name, "pt") as b:
            if set(a.keys()) != set(b.keys()):
                raise HeadraceError(f"{name} has other tensors than the original's: they can't be compared")
            for key in a.keys():  # noqa: SIM118 - safe_open is no mapping
                left, right = a.get_tensor(key).double(), b.get_tensor(key).double()
                if left.shape != right.shape:
                    raise HeadraceError(f"{key} has shape {list(left.shape)}, the original's {list(right.shape)}: they can't be compared")
                found.append(Distance(name=key, distance=float((left - right).norm()), norm=float(right.norm())))
    total = Distance(name="all", distance=math.hypot(*(each.distance for each in found)), norm=math.hypot(*(each.norm for each in found)))
    return WeightsDistance(total=total, tensors=tuple(sorted(found, key=lambda each: (-each.relative, each.name))))
