"""The tree convolution: a row meets itself, its nearest ancestors and the committed inputs, then SiLU.

One program takes BLOCK_C channels of BLOCK_R rows of one request. Inputs are read width times, once from memory and
then from cache, and written twice: mixed, and as they are into the stash, from which `commit` takes those of the
accepted path.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import narrow, sigmoid


@triton.jit(do_not_specialize=["T", "max_rows"])
def convolution_kernel(
    p_x,  # [B, T, C]
    p_mixed,  # [B, T, C], contiguous
    p_conv,  # [slots, WIDTH - 1, C]
    p_window_inputs,  # [R, max_rows, C]
    p_taps,  # [WIDTH, C]
    p_bias,  # [C], read if BIAS
    p_slots,  # [B]
    p_requests,  # [B]
    p_rows,  # [B]
    p_conv_ancestors,  # [B, T, WIDTH - 1]
    T,
    max_rows,
    x_stride,
    x_row,
    slot_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: tiles of channels; B; tiles of rows."""
    KEPT: tl.constexpr = WIDTH - 1
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.program_id(1).to(tl.int64)
    t = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_layer = (c < C)[None, :]
    slot = tl.load(p_slots + place).to(tl.int64)
    rows = tl.load(p_rows + place)
    # Rows that are padding give what a padding request gives, zeros, so that nothing unwritten is handed on.
    valid = (t < rows) & (slot >= 0)
    request = tl.load(p_requests + place).to(tl.int64)
    p_x += place * x_stride
    p_conv += slot * slot_stride
    there = valid[:, None] & in_layer
    b_x = tl.load(p_x + t[:, None] * x_row + c[None, :], mask=there, other=0.0)
    total = b_x.to(tl.float32) * tl.load(p_taps + c, mask=c < C, other=0.0)[None, :]
    for step in tl.static_range(KEPT):
        code = tl.load(p_conv_ancestors + (place * T + t) * KEPT + step, mask=valid, other=0)
        met = tl.load(p_x + code[:, None] * x_row + c[None, :], mask=there & (code >= 0)[:, None], other=0.0)
        committed = tl.load(
            p_conv + (code + KEPT)[:, None] * C + c[None, :], mask=there & (code < 0)[:, None], other=0.0
        )
        tap = tl.load(p_taps + (step + 1) * C + c, mask=c < C, other=0.0)
        total += (met.to(tl.float32) + committed.to(tl.float32)) * tap[None, :]
    if BIAS:
        total += tl.load(p_bias + c, mask=c < C, other=0.0)[None, :]
    mixed = tl.where(there, total * sigmoid(total), 0.0)
    p_row = p_mixed + (place * T + t)[:, None] * C + c[None, :]
    tl.store(p_row, narrow(mixed, p_mixed.dtype.element_ty), mask=(t < T)[:, None] & in_layer)
    tl.store(p_window_inputs + (request * max_rows + t)[:, None] * C + c[None, :], b_x, mask=there)
