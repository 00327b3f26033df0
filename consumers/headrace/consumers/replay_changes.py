"""What a fork does otherwise, as people write it: `learning_rate=1e-4`, `optimizer.beta1=0.8`.

Guarantees: a field that there is not, a value outside its range and two options that contradict each other are refused before anything
runs, with the field's name. Gives up: what is not an option of training: which groups a step has is the ledger's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from headrace.core.errors import HeadraceError
from headrace.schemas.state import StepRecord
from headrace.schemas.training import ModelSettings, OptimizerSettings, TrainConfig, row_length_problem
from headrace.trainer.options import merged_config

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
            ChangeError: the optimizer's fields are not valid, or contradict those of the model.
        """
        if self.optimizer is None:
            return model
        optimizer = _validated(OptimizerSettings, {**model.optimizer.model_dump(), **self.optimizer}, _OPTIMIZER)
        return model.model_copy(update={"optimizer": optimizer})

    def check(self, records: Iterable[StepRecord], model: ModelSettings) -> None:
        """See that the changes fit each step's own config.

        Raises:
            ChangeError: names the step and the fields that contradict each other.
        """
        if self.config is None:
            return
        checked: set[str] = set()
        for record in records:
            if record.config_digest in checked:
                continue
            checked.add(record.config_digest)
            try:
                merged = merged_config(record.config, self.config)
            except ValidationError as error:
                raise ChangeError(f"--set does not fit the config of step {record.step}: {_first(error)}") from None
            if (problem := row_length_problem(merged, model.max_sequence_tokens)) is not None:
                raise ChangeError(f"--set does not fit the model: {problem}")


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
        raise ChangeError(f"--set {prefix}{_first(error)}") from None


def _first(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg']}" if where else str(fault["msg"])
