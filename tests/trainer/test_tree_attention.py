"""Attention over packed rows against one dense mask, for random forests of segments."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.tiny import blank_row
from torch.nn.functional import scaled_dot_product_attention

from headrace.trainer import tree_attention
from headrace.trainer.rows import PackedRow
from headrace.trainer.tree_attention import RowAttention, attend_by_blocks, attend_by_calls, dense_mask

CPU = torch.device("cpu")
ALWAYS_JOINED, AS_MEASURED, NEVER_JOINED = 1, 64, 10**12
"""Widths of attention: they decide how much a call costs next to the cells that joining wastes."""


def row_of(lengths: list[int], parents: list[int]) -> PackedRow:
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int32)
    positions = np.zeros(sum(lengths), np.int32)
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        offset = 0 if parent < 0 else positions[starts[parent] + lengths[parent] - 1] + 1
        positions[start : start + length] = offset + np.arange(length)
    bare = blank_row(sum(lengths), 0, sum(lengths), 1)
    return replace(bare, position_ids_T=positions, starts_G=starts, parents_G=np.array(parents, np.int32))


@st.composite
def forests(draw: st.DrawFn) -> PackedRow:
    count = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    parents = [draw(st.integers(-1, g - 1)) for g in range(count)]
    return row_of(lengths, parents)


def states(row: PackedRow, seed: int = 0, heads: int = 2, width: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, len(row), width, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


@settings(deadline=None, max_examples=60)
@given(row=forests(), width=st.sampled_from([ALWAYS_JOINED, AS_MEASURED, NEVER_JOINED]), window=st.sampled_from([None, 1, 3, 7, 100]))
def test_calls_equal_one_dense_mask_with_their_gradients(row: PackedRow, width: int, window: int | None):
    states_3 = states(row)
    mask = dense_mask(row)
    if window is not None:
        positions = torch.from_numpy(row.position_ids_T)
        mask &= positions[:, None] - positions[None, :] < window
    expected = scaled_dot_product_attention(*states_3, attn_mask=mask)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    gradients = torch.autograd.grad((expected * weights).sum(), states_3)
    found = attend_by_calls(RowAttention.of(row, CPU, width), *states_3, None, window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad((found * weights).sum(), states_3), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(row=forests())
def test_a_token_sees_its_own_segment_up_to_itself_and_all_of_its_ancestors(row: PackedRow):
    mask = dense_mask(row)
    ends = np.append(row.starts_G[1:], len(row))
    for g, (start, end) in enumerate(zip(row.starts_G, ends, strict=True)):
        above: set[int] = set()
        parent = int(row.parents_G[g])
        while parent >= 0:
            above |= set(range(row.starts_G[parent], ends[parent]))
            parent = int(row.parents_G[parent])
        for column in range(start, end):
            assert set(mask[column].nonzero()[:, 0].tolist()) == above | set(range(start, column + 1))
            # As many as it has positions before it: nothing of another branch, and nothing missing.
            assert int(mask[column].sum()) == row.position_ids_T[column] + 1


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_of_flex_attention_equal_one_dense_mask(window: int | None):
    """Forward only: FlexAttention has no backward on a CPU."""
    row = row_of([6, 3, 4, 2, 5], [-1, 0, 1, 0, -1])
    states_3 = [state.detach() for state in states(row)]
    layout = RowAttention.of(row, CPU, 8)
    found = attend_by_blocks(layout, *states_3, None, window, compiled=False)
    torch.testing.assert_close(found, attend_by_calls(layout, *states_3, None, window), rtol=0, atol=1e-12)


def test_many_small_segments_share_calls_and_large_branches_do_not():
    small = RowAttention.of(row_of([4] * 64, [-1] * 64), CPU, 32)
    assert len(small.calls) <= 8
    large = RowAttention.of(row_of([1024, *[128] * 8], [-1, *[0] * 8]), CPU, 576)
    assert [(call.first, call.last, call.above) for call in large.calls] == [(0, 1, ())] + [(g, g + 1, (0,)) for g in range(1, 9)]


def test_a_layer_without_a_layout_or_with_a_soft_cap_is_not_served_silently():
    states_3 = [state.detach() for state in states(row_of([3], [-1]))]
    with pytest.raises(NotImplementedError, match="layout"):
        tree_attention._attend(torch.nn.Module(), *states_3, None)
    layout = RowAttention.of(row_of([3], [-1]), CPU, 8)
    with pytest.raises(NotImplementedError, match="softcap"):
        tree_attention._attend(torch.nn.Module(), *states_3, None, softcap=30.0, headrace_layout=layout)
