"""What a fork does otherwise, as people write it: `learning_rate=1e-4`, `optimizer.beta1=0.8`.

Guarantees: a field that there is not, a value outside its range and two options that contradict each other are refused before anything
runs, with the field's name. Limitations: what is not an option of training: which groups a step has is the ledger's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from headrace.core.errors import HeadraceError
from headrace.schemas.training import ModelSettings, OptimizerSettings, TrainConfig, row_length_problem

M = TypeVar("M", bound=BaseModel)

_OPTIMIZER = "optimizer."


class ChangeError(HeadraceError):
    """A change that can't be made; says which field and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Changes to the training of a model."""

    config: TrainConfig | None = None
    """Merged over each record's own."""
    optimizer: dict[str, Any] | None = None
    """Fields of the model's optimizer settings."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Asked":
        """From `name=value` each; a value is JSON, or a text as it stands.

        Raises:
            ChangeError: no such field, a value that it can't have, or a field twice.
        """
        said: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            name = name.strip()
            if not equals or not value.strip():
                raise ChangeError(f"--set {text!r}: write it as learning_rate=1e-4")
            if name in said:
                raise ChangeError(f"--set {name}: it is set twice")
            _check_name(name)
            said[name] = _value(name, value.strip())
        config = {name: value for name, value in said.items() if not name.startswith(_OPTIMIZER)}
        optimizer = {name.removeprefix(_OPTIMIZER): value for name, value in said.items() if name.startswith(_OPTIMIZER)}
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


def _check_name(name: str) -> None:
    known = [*TrainConfig.model_fields, *(f"{_OPTIMIZER}{field}" for field in OptimizerSettings.model_fields)]
    if name not in known:
        raise ChangeError(f"--set {name}: there is no such option; there are {', '.join(sorted(known))}")


def _value(name: str, text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = text
    # A null hides nothing of the config below it, so it would be a change that changes nothing.
    if value is None and name not in {"epsilon_high", "optimizer.schedule_updates"}:
        raise ChangeError(f"--set {name}=null: null stands for what the step's own config says; give the value itself")
    return value


def _validated(schema: type[M], fields: dict[str, Any], prefix: str = "") -> M:
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise ChangeError(f"--set {_first(error, prefix)}") from None


def _first(error: ValidationError, prefix: str = "") -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    what = str(fault["msg"]).removeprefix("Value error, ")
    # Two fields that contradict each other are no one field's fault: the message names both.
    return f"{prefix}{where}: {what}" if where else f"{prefix.rstrip('.')}: {what}".removeprefix(": ")
