"""Log-probabilities of sequences as a file: what a forward-only step writes, and a KL term may name as its reference.

One safetensors file. Sequence s has the tokens `sequence_tokens[s]` to `sequence_tokens[s + 1]`:

    sequences S  sequence_groups         int32[S]      index in `groups` of the metadata
                 sequence_trajectories   int32[S]      index in the group as it was sent
                 sequence_parts          int32[S]      which of the trajectory's sequences
                 sequence_tokens         int64[S + 1]  cumulative lengths
    tokens T     token_ids               int32[T]      each sequence whole, context included
                 trainable               bool[T]       a policy sampled the token
                 logprobs                float32[T]    of the model that computed them; NaN where not trainable

The metadata has `layout` (`headrace.logprobs.v1`), `model_id`, `incarnation`, `step` and `attempt` of the state that the step made (its
weights are those of the state before), and `groups`, a JSON list of ids.

Guarantees: a sequence is found by its content, the token ids and which of them were sampled: a log-probability depends on nothing else, so
the groups may have other ids in the job that reads them. Limitations: sequences that were cut to another length; they are others.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from headrace.core.errors import HeadraceError
from headrace.trainer.groups import TokenizedGroup, TokenSequence
from headrace.trainer.placed import PlacedRow, sequence_blocks
from headrace.trainer.plan import StateKey

LAYOUT = "headrace.logprobs.v1"
LOGPROBS_FILE = "logprobs.safetensors"

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
_TENSORS = ("sequence_tokens", "token_ids", "trainable", "logprobs")


class LogprobsFileError(HeadraceError):
    """A file that holds no log-probabilities; says what is wrong with it."""


def write_logprobs(folder: Path, key: StateKey, groups: Sequence[TokenizedGroup], placed: Iterable[PlacedRow]) -> None:
    """Write what was computed into a new folder.

    Args:
        folder: Is made.
        key: The state that the step made.
        groups: Of the step.
        placed: Their rows.
    """
    found: dict[tuple[int, int, int], npt.NDArray[np.float64]] = {}
    for row in placed:
        for block in sequence_blocks(row.row):
            owner = row.owners[int(row.row.branches_N[block.start])]
            found[owner.group, owner.trajectory, owner.sequence] = row.stats.new_N[block]
    kept = [(g, groups[g].indices[t], s, groups[g].trajectories[t].sequences[s], found[g, t, s]) for g, t, s in sorted(found)]
    lengths = np.fromiter((len(sequence) for *_, sequence, _ in kept), np.int64)
    tensors = {
        "sequence_groups": np.fromiter((g for g, *_ in kept), np.int32),
        "sequence_trajectories": np.fromiter((t for _, t, *_ in kept), np.int32),
        "sequence_parts": np.fromiter((s for _, _, s, *_ in kept), np.int32),
        "sequence_tokens": np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        "token_ids": _joined([sequence.token_ids for *_, sequence, _ in kept], np.int32),
        "trainable": _joined([sequence.trainable for *_, sequence, _ in kept], np.bool_),
        "logprobs": _joined([_spread(sequence, values) for *_, sequence, values in kept], np.float32),
    }
    metadata = {
        "layout": LAYOUT,
        "model_id": key.model_id,
        "incarnation": key.incarnation,
        "step": str(key.step),
        "attempt": str(key.attempt),
        "groups": orjson.dumps([group.group_id for group in groups]).decode(),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / LOGPROBS_FILE, metadata)


def read_logprobs(content: bytes) -> dict[bytes, Floats]:
    """By the content of each sequence, the log-probabilities of its sampled tokens.

    Raises:
        LogprobsFileError: it is no such file.
    """
    try:
        tensors = load(content)
        bounds, token_ids, trainable, logprobs = (tensors[name] for name in _TENSORS)
    except (SafetensorError, KeyError) as error:
        raise LogprobsFileError(f"it is no file of log-probabilities ({LAYOUT}): {error}") from error
    spans = [slice(start, stop) for start, stop in pairwise(bounds.tolist())]
    if {len(token_ids), len(trainable), len(logprobs)} != {int(bounds[-1])}:
        raise LogprobsFileError(f"its arrays do not have the {int(bounds[-1])} tokens that its sequences have")
    return {_digest(token_ids[span], trainable[span]): logprobs[span][trainable[span]] for span in spans}


def matched(groups: Sequence[TokenizedGroup], known: Mapping[bytes, Floats]) -> tuple[tuple[Floats, ...], list[str]]:
    """The log-probabilities of the sampled tokens of each sequence, in the order of the groups; NaN where they are not known.

    Returns them, and where the unknown ones are: `group g3, trajectory 1`.
    """
    values: list[Floats] = []
    missing: list[str] = []
    for group, index, _, sequence in _sequences(groups):
        value = known.get(_digest(sequence.token_ids, sequence.trainable))
        if value is None:
            missing.append(f"group {group.group_id}, trajectory {index}")
            value = np.full(sequence.trainable_tokens, np.nan, np.float32)
        values.append(value)
    return tuple(values), missing


def by_owner(groups: Sequence[TokenizedGroup], values: Sequence[Floats]) -> dict[tuple[int, int, int], Floats]:
    """What `matched` gave, by the indices of group, trajectory and sequence."""
    owners = (
        (g, t, s)
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group.trajectories)
        for s in range(len(trajectory.sequences))
    )
    return dict(zip(owners, values, strict=True))


def _sequences(groups: Sequence[TokenizedGroup]) -> Iterator[tuple[TokenizedGroup, int, int, TokenSequence]]:
    return (
        (group, index, s, sequence)
        for group in groups
        for index, trajectory in zip(group.indices, group.trajectories, strict=True)
        for s, sequence in enumerate(trajectory.sequences)
    )


def _digest(token_ids: Ints, trainable: npt.NDArray[np.bool_]) -> bytes:
    sha = hashlib.sha256(np.ascontiguousarray(token_ids, np.int32).tobytes())
    sha.update(np.ascontiguousarray(trainable, np.bool_).tobytes())
    return sha.digest()


def _spread(sequence: TokenSequence, values: npt.NDArray[np.float64]) -> Floats:
    spread_T = np.full(len(sequence), np.nan, np.float32)
    spread_T[sequence.trainable] = values
    return spread_T


def _joined(arrays: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
