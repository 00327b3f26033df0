"""One group of a body: from its JSON to the form in which it goes to the log, or to all that is wrong with it.

Guarantees: what passes is what the lane can read, with versions that were published; a group is decoded once where nothing is wrong, and
a second time, fault by fault, where something is. Limitations: what only the trainer can judge (tokens, lengths): the lane refuses it,
and the job continues. Computes: not for an event loop.
"""

import json
from collections.abc import Callable
from functools import partial

from pydantic import ValidationError

from headrace.core.hosted_entries import decode_hosted
from headrace.core.models import names_model
from headrace.gateway.training_jobs.config import Faults, parts_of
from headrace.schemas.base import non_finite_paths
from headrace.schemas.chat import Choice, Tool
from headrace.schemas.codec import SampledGroup, decode_group
from headrace.schemas.parsing import load_json, path_of
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.trajectory import NO_REWARD, TrajectoryGroup
from headrace.schemas.turns import lift, raw_choices

Loc = list[str | int]
ReadGroup = Callable[[memoryview, Loc, Faults], SampledGroup | None]
"""`read_group` with what it needs to know of the model."""


def read_group(
    text: memoryview, loc: Loc, faults: Faults, *, model_id: str, version: int | None, compact: bool = True
) -> SampledGroup | None:
    """Read a group.

    Args:
        text: Its JSON.
        loc: Where it stands in the body.
        faults: Takes what is wrong.
        model_id: Of the model: of a trajectory's captured exchanges those with it are read.
        version: The model's newest policy version; None: versions are not looked at.
        compact: What is left out has its default: an empty group, a reward of 0.

    Returns:
        The group; None if something is wrong with it.
    """
    try:
        group = decode_hosted(text) or decode_group(text, own=partial(names_model, model_id=model_id))
    except CodecError as error:
        if compact and (empty := _empty(text)) is not None:
            return empty
        _collect(text, loc, faults)
        faults.add_codec(loc, error)  # the place counts once: as a rule it is there by now
        return None
    before = len(faults)
    _check(group.group, loc, faults, version, compact=compact)
    if version is not None:
        _check_token_versions(group, loc, faults, version)
    return group if len(faults) == before else None


def _empty(text: memoryview) -> SampledGroup | None:
    """A group of which a compact client left out that it has no trajectories; None where that is not what is wrong."""
    try:
        raw = load_json(text)
        return (
            SampledGroup(group=TrajectoryGroup.model_validate({"trajectories": [], **raw}), turns=()) if "trajectories" not in raw else None
        )
    except (CodecError, ValidationError, TypeError):
        return None


def _collect(text: memoryview, loc: Loc, faults: Faults) -> None:
    """All that is wrong with a group that can't be decoded."""
    try:
        raw = load_json(text)
    except CodecError as error:
        if error.reason is not DeadLetterReason.NOT_FINITE:
            return
        for path in non_finite_paths(json.loads(bytes(text), parse_int=float)):
            faults.add([*loc, *parts_of(path)], error.detail, str(error.reason))
        return
    for choice, path in raw_choices(raw):
        try:
            lift(choice, path)
        except CodecError as error:
            faults.add_codec(loc, error)
    try:
        TrajectoryGroup.model_validate(raw)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_input=False, include_context=False):
            path = path_of(fault["loc"], raw, missing=fault["type"] == "missing")
            faults.add([*loc, *parts_of(path)], fault["msg"], fault["type"])


def _check(group: TrajectoryGroup, loc: Loc, faults: Faults, version: int | None, *, compact: bool) -> None:
    if group.purpose == "sft":
        faults.add([*loc, "purpose"], "examples train by POST /v1/preview/sft-training-jobs: leave purpose out", "wrong_purpose")
    for j in group.without_reward():
        if compact:
            group.trajectories[j].reward = 0.0
        else:
            faults.add([*loc, "trajectories", j, "reward"], NO_REWARD, "missing")
    for j, trajectory in enumerate(group.trajectories):
        here = [*loc, "trajectories", j]
        _check_tools(trajectory.tools, here, faults)
        for h, history in enumerate(trajectory.additional_histories):
            _check_tools(history.tools, [*here, "additional_histories", h], faults)
        initial, final = trajectory.initial_policy_version, trajectory.final_policy_version
        for name, said in (("initial_policy_version", initial), ("final_policy_version", final)):
            if version is not None and said is not None and said > version:
                faults.add(
                    [*here, name], f"version {said} was never published: the newest of this model is {version}", "unknown_policy_version"
                )
        if initial is not None and final is not None and final < initial:
            faults.add(
                [*here, "final_policy_version"], f"it ends at version {final}, before it began at {initial}", "unknown_policy_version"
            )


def _check_token_versions(group: SampledGroup, loc: Loc, faults: Faults, newest: int) -> None:
    """The versions that single tokens say: each turn names its first one that was never published."""
    if all(turn is None or turn.policy_versions is None for turn in group.turns):
        return
    turns = iter(group.turns)
    for j, trajectory in enumerate(group.group.trajectories):
        for h, (items, _tools) in enumerate(trajectory.histories()):
            inner: Loc = [] if h == 0 else ["additional_histories", h - 1]
            for i, item in enumerate(items):
                turn = next(turns) if isinstance(item, Choice) else None
                for at, said in enumerate(() if turn is None or turn.policy_versions is None else turn.policy_versions):
                    if said > newest:
                        here = [*loc, "trajectories", j, *inner, "messages_and_choices", i, "policy_versions", at]
                        detail = f"version {said} was never published: the newest of this model is {newest}"
                        faults.add(here, detail, "unknown_policy_version")
                        break


def _check_tools(tools: list[Tool] | None, loc: Loc, faults: Faults) -> None:
    for t, tool in enumerate(tools or []):
        if tool.type != "function":
            faults.add([*loc, "tools", t, "type"], "Input should be 'function'", "literal_error")
