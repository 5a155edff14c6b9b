"""The tree convolution: a row meets itself, its nearest ancestors and the committed inputs, then SiLU.

Queries go into a buffer, keys and values into the ring, inputs as they are into the stash, from which `commit` takes
those of the accepted path.

One program takes BLOCK_C channels of ROWS rows that follow each other in [B * T], whatever request they belong to. What
differs between rows is scalar, so every load is a vector along the channels, and all are under way before the first is
stored. Inputs that several rows meet come from memory once and from cache afterwards.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples grow in loops that are unrolled.

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import narrow, silu


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
    p_pending,  # [R, HV]
    p_places,  # [B, 2]
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
    HV: tl.constexpr,
    HEADS: tl.constexpr,
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
    inputs, outputs, valids = (), (), ()
    first_rows, requests, places, counts, ends, stash_rows, ring_rows = (), (), (), (), (), (), ()
    place = (first // T).to(tl.int64)
    t = first % T
    for _ in tl.static_range(ROWS):
        in_batch = place < batch
        token = place * T + t
        slot = tl.load(p_slots + place, mask=in_batch, other=-1).to(tl.int64)
        request = tl.load(p_requests + place, mask=in_batch, other=0).to(tl.int64)
        rows = tl.load(p_rows + place, mask=in_batch, other=0)
        valid = (slot >= 0) & (t < rows)
        end = tl.load(p_end + request, mask=valid, other=0)
        there = in_layer & valid
        p_request = p_x + place * x_stride
        p_committed = p_conv + slot * slot_stride
        b_x = tl.load(p_request + t * x_row + c, mask=there, other=0.0)
        # Padding is loaded as zeros and gives zeros, so that nothing unwritten is handed on.
        total = b_x.to(tl.float32) * taps[0]
        if BIAS:
            total += tl.where(valid, bias, 0.0)
        for step in tl.static_range(KEPT):
            code = tl.load(p_conv_ancestors + token * KEPT + step, mask=in_batch, other=-1)
            p_met = tl.where(code >= 0, p_request + code * x_row, p_committed + (code + KEPT) * C)
            b_met = tl.load(p_met + c, mask=there, other=0.0)
            total += b_met.to(tl.float32) * taps[step + 1]
        inputs += (b_x,)
        outputs += (narrow(silu(total), b_x.dtype),)
        valids += (valid,)
        first_rows += (valid & (t == 0),)
        requests += (request,)
        places += (place,)
        counts += (rows,)
        ends += (end,)
        stash_rows += (request * max_rows + t,)
        at = end + t
        ring_rows += (request * ring + tl.where(at < ring, at, at - ring),)
        t += 1
        place = tl.where(t < T, place, place + 1)
        t = tl.where(t < T, t, 0)

    for i in tl.static_range(ROWS):
        token = first.to(tl.int64) + i
        there = in_layer & valids[i]
        tl.store(p_queries + token * KEY + c, outputs[i], mask=(c < KEY) & (token < batch * T))
        tl.store(p_keys + ring_rows[i] * KEY + (c - KEY), outputs[i], mask=there & (c >= KEY) & (c < 2 * KEY))
        tl.store(p_values + ring_rows[i] * VALUE + (c - 2 * KEY), outputs[i], mask=there & (c >= 2 * KEY))
        tl.store(p_window_inputs + stash_rows[i] * C + c, inputs[i], mask=there)
        if (tl.program_id(0) == 0) & first_rows[i]:
            h = tl.arange(0, HEADS)
            pending = tl.load(p_pending + requests[i] * HV + h, mask=h < HV, other=0)
            tl.store(p_places + places[i] * 2, ends[i])
            tl.store(p_places + places[i] * 2 + 1, tl.max(pending, axis=0))
            tl.store(p_window_rows + requests[i], counts[i])
