"""The tree convolution: a row meets itself, its nearest ancestors and the committed inputs, then SiLU.

Queries go into a buffer, keys and values into the ring, inputs as they are into the stash, from which `commit` takes
those of the accepted path.

One program takes BLOCK_C channels of ROWS rows that follow each other in [B * T], whatever request they belong to. What
differs between rows is scalar, so every load is a vector along the channels, and all are under way before the first is
stored. Inputs that several rows meet come from memory once and from cache afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import narrow, sigmoid


@triton.jit(do_not_specialize=["batch", "T", "max_rows", "ring"])
def convolution_kernel(
    p_x,  # [B, T, C]
    p_queries,  # [B, T, KEY], contiguous
    p_keys,  # [R, ring, KEY]
    p_values,  # [R, ring, C - 2 KEY]
    p_conv,  # [slots, WIDTH - 1, C]
    p_window_inputs,  # [R, max_rows, C]
    p_window_rows,  # [R]
    p_end,  # [R]
    p_taps,  # [WIDTH, C]
    p_bias,  # [C], read if BIAS
    p_slots,  # [B]
    p_requests,  # [B]
    p_rows,  # [B]
    p_conv_ancestors,  # [B, T, WIDTH - 1]
    batch,
    T,
    max_rows,
    ring,
    x_stride,
    x_row,
    slot_stride,
    C: tl.constexpr,
    KEY: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: tiles of channels; tiles of rows."""
    KEPT: tl.constexpr = WIDTH - 1
    VALUE: tl.constexpr = C - 2 * KEY
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_layer = c < C
    first = tl.program_id(1) * ROWS

    taps = ()
    for step in tl.static_range(WIDTH):
        taps += (tl.load(p_taps + step * C + c, mask=in_layer, other=0.0),)
    if BIAS:
        bias = tl.load(p_bias + c, mask=in_layer, other=0.0)
    inputs, outputs, valids, stash_rows, ring_rows = (), (), (), (), ()
    for i in tl.static_range(ROWS):
        token = (first + i).to(tl.int64)
        place = token // T
        t = (token % T).to(tl.int32)
        in_batch = place < batch
        slot = tl.load(p_slots + place, mask=in_batch, other=-1).to(tl.int64)
        request = tl.load(p_requests + place, mask=in_batch, other=0).to(tl.int64)
        rows = tl.load(p_rows + place, mask=in_batch, other=0)
        valid = (slot >= 0) & (t < rows)
        end = tl.load(p_end + request, mask=valid, other=0)
        if (tl.program_id(0) == 0) & valid & (t == 0):
            tl.store(p_window_rows + request, rows)

        there = in_layer & valid
        p_request = p_x + place * x_stride
        p_committed = p_conv + slot * slot_stride
        b_x = tl.load(p_request + t * x_row + c, mask=there, other=0.0)
        total = b_x.to(tl.float32) * taps[0]
        for step in tl.static_range(KEPT):
            code = tl.load(p_conv_ancestors + token * KEPT + step, mask=in_batch, other=-1)
            p_met = tl.where(code >= 0, p_request + code * x_row, p_committed + (code + KEPT) * C)
            b_met = tl.load(p_met + c, mask=there, other=0.0)
            total += b_met.to(tl.float32) * taps[step + 1]
        if BIAS:
            total += bias
        inputs += (b_x,)
        # Padding gives zeros, so that nothing unwritten is handed on.
        outputs += (narrow(tl.where(there, total * sigmoid(total), 0.0), b_x.dtype),)
        valids += (valid,)
        stash_rows += (request * max_rows + t,)
        ring_rows += (request * ring + (end + t) % ring,)

    for i in tl.static_range(ROWS):
        token = (first + i).to(tl.int64)
        there = in_layer & valids[i]
        tl.store(p_queries + token * KEY + c, outputs[i], mask=(c < KEY) & (token < batch * T))
        tl.store(p_keys + ring_rows[i] * KEY + (c - KEY), outputs[i], mask=there & (c >= KEY) & (c < 2 * KEY))
        tl.store(p_values + ring_rows[i] * VALUE + (c - 2 * KEY), outputs[i], mask=there & (c >= 2 * KEY))
        tl.store(p_window_inputs + stash_rows[i] * C + c, inputs[i], mask=there)
