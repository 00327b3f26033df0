"""Attention over packed rows: a token sees its own segment up to itself and the segments above it, nothing else.

On a CPU a row becomes a list of attention calls: each takes a run of neighbouring segments as queries and gathers the keys that they may
see, so a shared prefix is read by its branches and never computed twice. Small segments join one call, where the cells that the
mask then throws away cost less than another call would. On a GPU the same visibility is a FlexAttention block mask. Both go in through
transformers' attention interface, under the name `ATTENTION`, with the layout as a keyword of the model's forward.

Guarantees: equal to one dense mask over the row (`dense_mask`, the reference of the tests), sliding windows included; positions decide
nothing, the tree does. Limitations: attention with soft caps, sinks or position biases (`NotImplementedError`: such a model trains with one
sequence a row). Shapes: T tokens of a row, G segments, H query heads, D head width, q queries and k keys of one call.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.trainer.rows import PackedRow

ATTENTION = "headrace_tree"
LAYOUT = "headrace_layout"
"""Keyword of the model's forward that carries a `RowAttention`."""

# One more call costs as much as so many cells (a query and a key) times H x D: 0.2 ms with its backward, against 120 ns for a cell of 9
# heads of 64, measured on one core.
_CALL_COST = 1_000_000

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One attention call: the run of segments `first` to `last` (excluded), and the segments that it gathers from above."""

    first: int
    last: int
    above: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class RowAttention:
    """Who sees whom in one row, ready for a device.

    Example: `RowAttention.of(row, torch.device("cpu"), width=576)`.
    """

    lengths_G: list[int]
    starts_G: Ints
    segments_T: Ints
    """Segment of each token."""
    ancestors_GG: Bools
    """Whether the column is the row itself or stands above it."""
    positions_T: Ints
    calls: tuple[_Call, ...]
    device: torch.device
    masks: dict[tuple[int, int | None], Any] = field(default_factory=dict)
    """By call and window (a block mask: call -1), made when first asked for and used by all layers."""

    @classmethod
    def of(cls, row: PackedRow, device: torch.device, width: int) -> "RowAttention":
        """The layout of a row.

        Args:
            row: The row.
            device: Where it runs.
            width: H x D: how much a cell of a call costs.
        """
        starts_G, parents_G = row.starts_G.astype(np.int64), row.parents_G.astype(np.int64)
        lengths_G = np.diff(np.append(starts_G, len(row)))
        return cls(
            lengths_G=[int(length) for length in lengths_G],
            starts_G=starts_G,
            segments_T=np.repeat(np.arange(len(lengths_G)), lengths_G),
            ancestors_GG=_ancestors(parents_G),
            positions_T=row.position_ids_T.astype(np.int64),
            calls=_plan_calls(lengths_G, parents_G, max(1, _CALL_COST // width)),
            device=device,
        )

    def mask(self, call: _Call, window: int | None) -> torch.Tensor | None:
        """Mask [q, k] of a call; None where it is plainly causal over its own tokens."""
        key = (call.first, window)
        if key not in self.masks:
            mask = self._mask(call, window)
            self.masks[key] = None if mask is None else torch.from_numpy(mask).to(self.device)
        found: torch.Tensor | None = self.masks[key]
        return found

    def _mask(self, call: _Call, window: int | None) -> Bools | None:
        own = np.arange(call.first, call.last)
        keys_k = self._columns([*call.above, *own])
        queries_q = self._columns(own)
        far = window is not None and int(self.positions_T[queries_q].max(initial=0)) >= window
        if not call.above and len(own) == 1 and not far:
            return None
        visible = _visible(self.segments_T, self.ancestors_GG, queries_q, keys_k)
        if window is not None and far:
            visible &= self.positions_T[queries_q][:, None] - self.positions_T[keys_k][None, :] < window
        return visible

    def _columns(self, segments: Any) -> Ints:  # noqa: ANN401 - a list or an array of ints
        return np.concatenate([np.arange(self.starts_G[s], self.starts_G[s] + self.lengths_G[s]) for s in segments])

    def block_mask(self, window: int | None) -> Any:  # noqa: ANN401 - torch's BlockMask
        """The same visibility for FlexAttention."""
        if (-1, window) not in self.masks:
            self.masks[-1, window] = self._block_mask(window)
        return self.masks[-1, window]

    def _block_mask(self, window: int | None) -> Any:  # noqa: ANN401 - torch's BlockMask
        from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 - a GPU's way

        segments_T = torch.from_numpy(self.segments_T).to(self.device)
        positions_T = torch.from_numpy(self.positions_T).to(self.device)
        ancestors_GG = torch.from_numpy(self.ancestors_GG).to(self.device)

        def visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:  # noqa: ANN401 - traced tensors
            seen = ancestors_GG[segments_T[query], segments_T[key]] & (key <= query)
            return seen if window is None else seen & (positions_T[query] - positions_T[key] < window)

        total = len(self.positions_T)
        return create_block_mask(visible, None, None, total, total, device=str(self.device))


def dense_mask(row: PackedRow) -> torch.Tensor:
    """bool[T, T]: query (row) sees key (column). The definition that everything else here must equal."""
    columns = np.arange(len(row))
    lengths_G = np.diff(np.append(row.starts_G, len(row)))
    segments_T = np.repeat(np.arange(len(lengths_G)), lengths_G)
    return torch.from_numpy(_visible(segments_T, _ancestors(row.parents_G.astype(np.int64)), columns, columns))


def register() -> None:
    """Make `ATTENTION` known to transformers; once is enough, more do no harm."""
    from transformers import AttentionInterface  # noqa: PLC0415 - takes seconds

    AttentionInterface.register(ATTENTION, _attend)


def _attend(  # noqa: PLR0917 - transformers' signature
    module: Any,  # noqa: ANN401 - a transformers attention layer
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401 - whatever an architecture passes
) -> tuple[torch.Tensor, None]:
    layout: RowAttention | None = options.get(LAYOUT)
    if layout is None:
        raise NotImplementedError("this architecture does not hand the row's layout to its attention")
    odd = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if odd or attention_mask is not None or query.shape[0] != 1 or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"attention with {', '.join(odd) or 'a mask, several rows, or without causality'} over packed rows")
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    run = attend_by_blocks if layout.device.type == "cuda" else attend_by_calls
    return run(layout, query, key, value, scaling, sliding_window).transpose(1, 2).contiguous(), None


def attend_by_calls(  # noqa: PLR0917 - the arguments of an attention
    layout: RowAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attention of one row, call by call: [1, H, T, D] from three of that shape."""
    # Split once: the backward of a split is one concatenation, that of many slices would fill as many rows of zeros.
    keys_G, values_G = (torch.split_with_sizes(tensor, layout.lengths_G, dim=2) for tensor in (key, value))
    queries = torch.split_with_sizes(query, [sum(layout.lengths_G[call.first : call.last]) for call in layout.calls], dim=2)
    outputs = []
    for call, part in zip(layout.calls, queries, strict=True):
        mask = layout.mask(call, window)
        seen = [*call.above, *range(call.first, call.last)]
        outputs.append(
            scaled_dot_product_attention(
                part,
                torch.cat([keys_G[s] for s in seen], dim=2) if len(seen) > 1 else keys_G[seen[0]],
                torch.cat([values_G[s] for s in seen], dim=2) if len(seen) > 1 else values_G[seen[0]],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
        )
    return torch.cat(outputs, dim=2)


_compiled: Any = None


def attend_by_blocks(  # noqa: PLR0917 - the arguments of an attention
    layout: RowAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    *,
    compiled: bool = True,
) -> torch.Tensor:
    """Attention of one row by FlexAttention: [1, H, T, D] from three of that shape. It has a backward on GPUs only."""
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - a GPU's way

    global _compiled  # noqa: PLW0603 - compiled once a process
    if compiled and _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=True)
    attention = _compiled if compiled else flex_attention
    return attention(query, key, value, block_mask=layout.block_mask(window), scale=scaling)  # type: ignore[no-any-return]  # untyped


def _plan_calls(lengths_G: Ints, parents_G: Ints, call_cells: int) -> tuple[_Call, ...]:
    """Runs of neighbouring segments, joined while the cells that this wastes cost less than a call of their own."""
    calls: list[_Call] = []
    first = 0
    above: set[int] = set()
    queries = cells = 0  # of the open run
    for g, length in enumerate(int(length) for length in lengths_G):
        path = _path(parents_G, g)
        alone = length * (length + sum(int(lengths_G[s]) for s in path))
        joined_above = above | {s for s in path if s < first}
        joined = (queries + length) * (queries + length + sum(int(lengths_G[s]) for s in joined_above))
        if g > first and joined <= cells + alone + call_cells:
            above, queries, cells = joined_above, queries + length, joined
            continue
        if g > first:
            calls.append(_Call(first=first, last=g, above=tuple(sorted(above))))
        first, above, queries, cells = g, set(path), length, alone
    calls.append(_Call(first=first, last=len(lengths_G), above=tuple(sorted(above))))
    return tuple(calls)


def _path(parents_G: Ints, segment: int) -> list[int]:
    """Ancestors of a segment, itself excluded."""
    path: list[int] = []
    parent = int(parents_G[segment])
    while parent >= 0:
        path.append(parent)
        parent = int(parents_G[parent])
    return path


def _ancestors(parents_G: Ints) -> Bools:
    """bool[G, G]: whether the column is the row itself or stands above it."""
    found = np.eye(len(parents_G), dtype=np.bool_)
    for g, parent in enumerate(parents_G):  # parents come first
        if parent >= 0:
            found[g] |= found[parent]
    return found


def _visible(segments_T: Ints, ancestors_GG: Bools, queries_q: Ints, keys_k: Ints) -> Bools:
    seen: Bools = ancestors_GG[segments_T[queries_q][:, None], segments_T[keys_k][None, :]] & (keys_k[None, :] <= queries_q[:, None])
    return seen
