"""Bytes that must move through the GPU's memory, per layer; over the bandwidth of a copy, the floor of a time.

Counted once each: the state, the pending rows, the window's rows in and out, what is stashed. What one launch leaves
for the next in the cache is not counted, nor are addresses, masks and weights. Inputs have 2 bytes an element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from treewy.ops import GDNDims
from treewy.tree import DraftTree

INPUT = 2
"""Bytes of an input, an output, or a gate before its activation."""
GATES = 8
"""Bytes of log decay and beta of one row and head, fp32 each."""


def state_bytes(dims: GDNDims, state_dtype: torch.dtype) -> int:
    """One state."""
    return dims.num_v_heads * dims.head_v_dim * dims.head_k_dim * state_dtype.itemsize


def ring_row_bytes(dims: GDNDims) -> int:
    """Key and value of one row, without its gates."""
    return INPUT * (dims.key_dim + dims.value_dim)


def verify_bytes(
    dims: GDNDims,
    rows: int,
    pending: Sequence[int],
    folds: int,
    state_dtype: torch.dtype,
    *,
    with_conv: bool = False,
) -> int:
    """A launch of `verify` with its gated norm, or with the convolution before it.

    Args:
        dims: of the layer.
        rows: T of every window.
        pending: pending rows of each request.
        folds: requests whose state is written back.
        state_dtype: of the checkpoint.
        with_conv: the inputs of the convolution come in, and what it makes goes to the ring on the way.
    """
    batch, heads = len(pending), dims.num_v_heads
    states = (batch + folds) * state_bytes(dims, state_dtype)
    history = sum(pending) * (ring_row_bytes(dims) + heads * GATES)
    gates = heads * (2 * INPUT + GATES)
    norm_and_output = 2 * INPUT * dims.value_dim
    if with_conv:
        inputs = 2 * INPUT * dims.conv_dim + ring_row_bytes(dims)  # in, stashed; key and value to the ring
        committed = (dims.conv_width - 1) * INPUT * dims.conv_dim
    else:
        inputs = ring_row_bytes(dims) + INPUT * dims.key_dim
        committed = 0
    return states + history + batch * (rows * (inputs + gates + norm_and_output) + committed)


def commit_bytes(dims: GDNDims, tree: DraftTree, path: Sequence[int], batch: int) -> int:
    """A commit in one layer: convolution inputs, and the rows of the path that are not where they belong."""
    moved = sum(row != place for place, row in enumerate(path))
    row = ring_row_bytes(dims) + dims.num_v_heads * GATES
    return batch * 2 * ((dims.conv_width - 1) * INPUT * dims.conv_dim + moved * row)


def store_all_bytes(
    dims: GDNDims, rows: int, batch: int, state_dtype: torch.dtype, *, with_norm: bool, with_conv: bool = False
) -> int:
    """A verify that writes a state for every row of the window."""
    row = INPUT * (dims.conv_dim + dims.value_dim + 2 * dims.num_v_heads)
    if with_norm:
        row += INPUT * dims.value_dim
    if with_conv:
        row += INPUT * dims.conv_dim
    committed = (dims.conv_width - 1) * INPUT * dims.conv_dim if with_conv else 0
    return batch * ((1 + rows) * state_bytes(dims, state_dtype) + rows * row + committed)


def fill_cycle(accepted: int, longest: int, capacity: int) -> list[int]:
    """Pending rows before each verify once a request is in its stride, where every round accepts `accepted` rows.

    A verify folds where the pending rows and the longest path (`longest` rows) exceed the capacity: the last of these.
    """
    fills = [accepted]
    while fills[-1] + longest <= capacity:
        fills.append(fills[-1] + accepted)
    return fills
