"""The kept tokens of one trajectory, and where in them the turns of its conversation stand. Pure.

A turn that brought its token ids is found by them, where a stretch of trained tokens begins; turns without ids are matched in order, if
there are as many of them as stretches. Guarantees: a span is only given where the ids are equal, or the count leaves no doubt. Limitations:
turns that are told apart by neither; their tokens stand in the whole sequence all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.core.packed_rows import PackedRows
from headrace.gateway.dashboard.answers import Span, Tokens

_FLOATS = {
    "advantages": "advantages",
    "ratios": "ratios",
    "weights": "weights",
    "behaviour": "behaviour_logprobs",
    "old": "old_logprobs",
    "new": "new_logprobs",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence in the file."""

    sequence: int
    row: int
    update: int
    part: int


def places_of(rows: PackedRows, group_id: str, trajectory: int) -> list[Place]:
    """The kept sequences of a trajectory, by update and part."""
    arrays = rows.arrays
    named = np.array([name == group_id for name in rows.groups], np.bool_)
    if not named.any():
        return []
    at = np.flatnonzero(named[arrays["sequence_groups"]] & (arrays["sequence_trajectories"] == trajectory))
    owners = np.searchsorted(arrays["row_sequences"], at, side="right") - 1
    places = [
        Place(int(s), int(arrays["row_numbers"][row]), int(arrays["row_updates"][row]), int(arrays["sequence_parts"][s]))
        for s, row in zip(at.tolist(), owners.tolist(), strict=True)
    ]
    return sorted(places, key=lambda place: (place.update, place.part, place.row))


def tokens_at(rows: PackedRows, place: Place, texts: list[str] | None = None) -> Tokens:
    """A sequence's tokens in columns."""
    arrays = rows.arrays
    first, last = (int(end) for end in arrays["sequence_tokens"][place.sequence : place.sequence + 2])
    part = slice(first, last)
    return Tokens(
        update=place.update,
        row=place.row,
        part=place.part,
        ids=arrays["token_ids"][part].tolist(),
        texts=texts,
        trained=arrays["trainable"][part].tolist(),
        lags=[None if lag < 0 else lag for lag in arrays["lags"][part].tolist()],
        **{name: _nullable(arrays[column][part]) for name, column in _FLOATS.items()},
    )


def spans(sequences: Sequence[Tokens], turns: Sequence[Sequence[int] | None]) -> list[Span | None]:
    """Where each turn's tokens stand.

    Args:
        sequences: Of one update.
        turns: Token ids of each assistant turn, in the order of the conversation; None where it brought none.
    """
    if turns and all(turn is None for turn in turns):
        return _by_order(sequences, len(turns))
    found: list[Span | None] = []
    after = [0] * len(sequences)
    arrays = [(np.array(each.ids, np.int64), _stretches(each)) for each in sequences]
    for turn in turns:
        span = None
        for number, (ids, stretches) in enumerate(arrays):
            if turn and (start := _find(ids, stretches, turn, after[number])) is not None:
                span = Span(sequence=number, start=start, stop=start + len(turn))
                after[number] = span.stop
                break
        found.append(span)
    return found


def _by_order(sequences: Sequence[Tokens], turns: int) -> list[Span | None]:
    stretches = [(number, *stretch) for number, each in enumerate(sequences) for stretch in _stretches(each)]
    if len(stretches) != turns:
        return [None] * turns
    return [Span(sequence=number, start=start, stop=stop) for number, start, stop in stretches]


def _find(ids: npt.NDArray[np.int64], stretches: list[tuple[int, int]], turn: Sequence[int], after: int) -> int | None:
    wanted = np.array(turn, np.int64)
    # A turn may follow another without a token between; the first token of a sequence is never trained.
    starts = sorted({after, *(start for start, _ in stretches), *(start - 1 for start, _ in stretches)})
    return next((at for at in starts if at >= after and np.array_equal(ids[at : at + len(wanted)], wanted)), None)


def _stretches(tokens: Tokens) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.array([False, *tokens.trained, False], np.int8)))
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _nullable(values: npt.NDArray[np.float32]) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN's test
