"""`experimental_config` of a job: every option that has no fitting value, every contradiction, and what has no effect.

Guarantees: null is as not said, but for `epsilon_high`; options of newer clients that this release has not are accepted, kept out of the
job, and named in a warning; a reference in the object store is one that the caller may name. Limitations: whether that exists; the step
finds out, and the job fails with it.

All that is wrong with a body, as far as one answer lists it.

Guarantees: each fault has the place of its field, one fault a place; values of the body are not repeated beyond what the schemas' own
messages say. Limitations: faults beyond `MOST`; the last item says that there are more.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from headrace.core.model_views import ModelView
from headrace.gateway.problems import FaultError, UnprocessableError
from headrace.gateway.reach import NotReachableError, Reach
from headrace.gateway.tables import Tables
from headrace.gateway.training_jobs.events import is_deleted, version_of
from headrace.schemas.merging import merged_config, without_effect
from headrace.schemas.parsing import load_json, shown
from headrace.schemas.reasons import CodecError
from headrace.schemas.training import TrainConfig, contradictions, row_length_problem

MOST = 100
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class Faults:
    """Collects faults: `faults.add(["body", "model_id"], "missing")`, then `faults.check()`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str | int, ...], FaultError] = {}

    @property
    def full(self) -> bool:
        """Whether more would not be listed: who looks for them may stop."""
        return len(self._found) > MOST

    def __len__(self) -> int:
        return len(self._found)

    def add(self, loc: Sequence[str | int], msg: str, kind: str = "value_error") -> None:
        """One more; the first of a place counts."""
        if not self.full:
            self._found.setdefault(tuple(loc), FaultError(loc, msg, kind))

    def add_codec(self, loc: Sequence[str | int], error: CodecError) -> None:
        """What the codec says of a group that stands at `loc`."""
        self.add([*loc, *parts_of(error.path)], error.detail, str(error.reason))

    def check(self) -> None:
        """Refuse the body if there are any.

        Raises:
            UnprocessableError: with all of them.
        """
        if not self._found:
            return
        found = list(self._found.values())
        if self.full:
            found[MOST:] = [
                FaultError(["body"], f"there are more faults than these {MOST}: mend them and send it again", "too_many_faults")
            ]
        raise UnprocessableError(found)


def parts_of(path: str) -> list[str | int]:
    """`trajectories[0].reward` as parts. A key that holds dots or brackets comes apart; it is for people."""
    return [int(index) if index else name for index, name in _PART.findall(path)]


_LOC = ["body", "experimental_config"]
_COMPACT_CLIENT = frozenset({"kl_ref_adapter_path", "loss_fn", "normalize_advantages", "plot_tensors", "truncated_importance_sampling"})
"""Options that `openpipe-art` 0.5.20 and later always send, null where the caller said nothing: no one writes them all by hand."""
_MOST_NAMED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What a job's step is to do."""

    config: TrainConfig | None
    warnings: tuple[str, ...] = ()
    compact: bool = False
    """The sender is a client that leaves out of trajectories and groups what has its default, such as a reward of 0."""


def read_config(text: bytes, reach: Reach, model: ModelView, faults: Faults) -> JobConfig:
    """Read a config.

    Args:
        text: Its JSON; empty: none.
        reach: What the caller may name; its tables say which versions were deleted.
        model: That the job trains.
        faults: Takes what is wrong.
    """
    if not text:
        return JobConfig(config=None)
    try:
        raw = load_json(text)
    except CodecError as error:
        faults.add_codec(_LOC, error)
        return JobConfig(config=None)
    if not isinstance(raw, dict):
        faults.add(_LOC, "Input should be an object or null", "dict_type")
        return JobConfig(config=None)
    known = {name: value for name, value in raw.items() if name in TrainConfig.model_fields}
    unknown = sorted(raw.keys() - known.keys())
    config = _validated(known, faults)
    if config is None:
        return JobConfig(config=None)
    for name, message in unreachable(config, reach):
        faults.add([*_LOC, name], message)
    _check_against(reach.tables, model, config, faults)
    warnings = [f"{shown(name)} is no option of this release: it has no effect" for name in unknown[:_MOST_NAMED]]
    if len(unknown) > _MOST_NAMED:
        warnings.append(f"{len(unknown) - _MOST_NAMED} more options are none of this release")
    warnings += without_effect(merged_config(model.settings.train, config))
    return JobConfig(config=config, warnings=tuple(warnings), compact=raw.keys() >= _COMPACT_CLIENT)


def unreachable(config: TrainConfig, reach: Reach) -> Iterator[tuple[str, str]]:
    """Fields of a config that name an object which the caller may not name, each with what is said of it."""
    for name in ("kl_ref_adapter_path", "kl_ref_logprobs"):
        uri: str | None = getattr(config, name)
        try:
            if uri is not None:
                reach.key(uri.rstrip("/"))  # as the step will read it
        except NotReachableError as error:
            yield name, str(error)


def _validated(known: dict[str, object], faults: Faults) -> TrainConfig | None:
    before = len(faults)
    config = None
    try:
        config = TrainConfig.model_validate(known)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            if fault["loc"]:  # what is wrong with several together is said below, of each
                faults.add([*_LOC, *fault["loc"][:1], *parts_of(".".join(map(str, fault["loc"][1:])))], fault["msg"], fault["type"])
    for names, message in contradictions(known):
        for name in names:
            if name in known:
                faults.add([*_LOC, name], message)
    return config if len(faults) == before else None


def _check_against(tables: Tables, model: ModelView, config: TrainConfig, faults: Faults) -> None:
    if (problem := row_length_problem(config, model.settings.max_sequence_tokens)) is not None:
        faults.add([*_LOC, "packed_sequence_length"], problem)
    step, version = config.kl_penalty_reference_step, version_of(model)
    if step is not None and step > version:
        faults.add([*_LOC, "kl_penalty_reference_step"], f"the model has no version {step}: its newest is {version}")
    elif step is not None and is_deleted(tables, model, step):
        faults.add([*_LOC, "kl_penalty_reference_step"], f"checkpoint {step} was deleted: name one that is listed")
