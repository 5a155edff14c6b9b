"""The commit kernel: the accepted paths of all requests, in all layers, in one launch.

Per layer and request it moves the convolution's committed inputs along the path, moves the rows of the path together
in the ring, and advances the counters. One program takes BLOCK channels of the convolution: their inputs, and the keys
or values that they gave. The rows of a chain are where they belong, so of a chain only inputs move. A path that is none
of the tree's, or for which there is no room, changes nothing and sets a bit in `errors`. Where the path reaches the
end of a block of an engine's prefix cache, the inputs at that end go into the block too: later they are gone.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in loops that are unrolled.

from __future__ import annotations

import triton
import triton.language as tl

BAD_PATH = tl.constexpr(1)
NOT_VERIFIED = tl.constexpr(2)
NO_ROOM = tl.constexpr(4)

ARRIVAL = tl.constexpr(1 << 16)
"""All programs of a request read its counters, one has to change them. `window_rows` is below 2^16; during the launch
its upper half counts the programs that have read, and the last of them writes the counters."""


@triton.jit
def move_rows(p_rows, p_path, accepted, end, ring, c, there, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Moves row path[j] of the window to place j, in one request's ring, in columns `c` where `there`.

    Places fill in order and path[j] >= j, so what is still to be read is never overwritten: ROWS rows are under way at
    a time, and the same threads read and write a column.
    """
    j = 0
    while j < accepted:
        moved = ()
        for i in tl.static_range(ROWS):
            row = tl.load(p_path + j + i, mask=j + i < accepted, other=0).to(tl.int32)
            source = ((end + row) % ring).to(tl.int64)
            moves = there & (j + i < accepted) & (row != j + i)
            moved += (tl.load(p_rows + source * COLUMNS + c, mask=moves),)
        tl.debug_barrier()
        for i in tl.static_range(ROWS):
            row = tl.load(p_path + j + i, mask=j + i < accepted, other=0).to(tl.int32)
            target = ((end + j + i) % ring).to(tl.int64)
            moves = there & (j + i < accepted) & (row != j + i)
            tl.store(p_rows + target * COLUMNS + c, moved[i], mask=moves)
        tl.debug_barrier()
        j += ROWS


@triton.jit
def inputs_after(p_committed, p_stash, p_path, accepted, c, there, C: tl.constexpr, KEPT: tl.constexpr):
    """The last KEPT convolution inputs after `accepted` rows of the path: of the committed ones and the window's."""
    inputs = ()
    for i in tl.static_range(KEPT):
        step = accepted + i - KEPT
        row = tl.load(p_path + step, mask=step >= 0, other=0).to(tl.int64)
        p_source = tl.where(step >= 0, p_stash + row * C, p_committed + (step + KEPT) * C)
        inputs += (tl.load(p_source + c, mask=there),)
    return inputs


@triton.jit(do_not_specialize=["T", "P", "max_rows", "ring", "num_requests"])
def commit_kernel(
    p_conv,  # [layers, slots, KEPT, C]; of layer 0 where POOLS
    p_pools,  # [layers], address of every layer's [slots, KEPT, C]; read if POOLS
    p_window_inputs,  # [layers, R, max_rows, C]
    p_window_rows,  # [layers, R]
    p_keys,  # [layers, R, ring, KEY]
    p_values,  # [layers, R, ring, C - 2 KEY]
    p_gates,  # [layers, R, ring, HV, 2]
    p_end,  # [layers, R]
    p_pending,  # [layers, R, HV]
    p_slots,  # [B]
    p_requests,  # [B]
    p_rows,  # [B]
    p_parents,  # [B, T]
    p_path,  # [B, P]
    p_accepted,  # [B]
    p_errors,  # [1]
    p_reached,  # [B], read if FULL, as is
    p_full,  # [B]
    T,
    P,
    max_rows,
    ring,
    num_requests,
    conv_layer,
    slot_stride,
    C: tl.constexpr,
    KEPT: tl.constexpr,
    KEY: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    POOLS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Grid: tiles of channels; B; layers."""
    VALUE: tl.constexpr = C - 2 * KEY
    TILES: tl.constexpr = (C + BLOCK - 1) // BLOCK
    first = tl.program_id(0) * BLOCK
    place = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    # What needs nothing but the place is asked for together: three loads depend on each other, not more.
    slot = tl.load(p_slots + place).to(tl.int64)
    rows = tl.load(p_rows + place)
    accepted = tl.load(p_accepted + place).to(tl.int32)
    request = layer * num_requests + tl.load(p_requests + place).to(tl.int64)
    p_path += place * P
    s = tl.arange(0, BLOCK_S)
    taken = s < tl.minimum(accepted, P)
    path = tl.load(p_path + s, mask=taken, other=0).to(tl.int32)
    before = tl.load(p_path + s - 1, mask=taken & (s > 0), other=-1).to(tl.int32)
    if slot < 0:
        return
    in_tree = (path >= 0) & (path < rows)
    parent = tl.load(p_parents + place * T + path, mask=taken & in_tree, other=-2)
    verified = tl.load(p_window_rows + request) & (ARRIVAL - 1)
    end = tl.load(p_end + request)
    h = tl.arange(0, BLOCK_H)
    pending = tl.load(p_pending + request * HV + h, mask=h < HV, other=0)

    follows = in_tree & (parent == before) & ((s > 0) | (path == 0))
    error = 0
    if (accepted < 1) | (accepted > P) | (tl.sum(tl.where(taken & (follows == 0), 1, 0), axis=0) > 0):
        error = BAD_PATH
    if verified != rows:
        error = error | NOT_VERIFIED
    if tl.max(pending, axis=0) + accepted > ring - max_rows:
        error = error | NO_ROOM
    if error > 0:
        tl.atomic_or(p_errors, error)
        return

    # Place i of the new committed inputs: input `accepted + i` of the old ones and the path's, one after the other.
    c = first + tl.arange(0, BLOCK)
    in_layer = c < C
    p_layer = p_conv + layer * conv_layer
    if POOLS:
        p_layer = tl.multiple_of(tl.load(p_pools + layer).to(p_conv.dtype), 16)
    p_committed = p_layer + slot * slot_stride
    p_stash = p_window_inputs + request * max_rows * C
    inputs = inputs_after(p_committed, p_stash, p_path, accepted, c, in_layer, C, KEPT)
    if FULL:
        full = tl.load(p_full + place).to(tl.int64)
        there = in_layer & (full >= 0)
        reached = tl.load(p_reached + place).to(tl.int32)
        inputs_at_end = inputs_after(p_committed, p_stash, p_path, reached, c, there, C, KEPT)
        for i in tl.static_range(KEPT):
            tl.store(p_layer + full * slot_stride + i * C + c, inputs_at_end[i], mask=there)
    tl.debug_barrier()
    for i in tl.static_range(KEPT):
        tl.store(p_committed + i * C + c, inputs[i], mask=in_layer)

    if tl.sum(tl.where(taken & (path != s), 1, 0), axis=0) > 0:
        if (first < 2 * KEY) & (first + BLOCK > KEY):
            move_rows(
                p_keys + request * ring * KEY, p_path, accepted, end, ring, c - KEY,
                (c >= KEY) & (c < 2 * KEY), KEY, 4,
            )  # fmt: skip
        if first + BLOCK > 2 * KEY:
            move_rows(
                p_values + request * ring * VALUE, p_path, accepted, end, ring, c - 2 * KEY,
                in_layer & (c >= 2 * KEY), VALUE, 4,
            )  # fmt: skip
        if first == 0:
            g = tl.arange(0, 2 * BLOCK_H)
            move_rows(p_gates + request * ring * (2 * HV), p_path, accepted, end, ring, g, g < 2 * HV, 2 * HV, 4)

    tl.debug_barrier()  # a warp that lags behind has not read the counters yet
    seen = tl.atomic_add(p_window_rows + request, ARRIVAL)
    if seen // ARRIVAL == TILES - 1:
        tl.store(p_end + request, (end + accepted) % ring)
        tl.store(p_pending + request * HV + h, pending + accepted, mask=h < HV)
        tl.store(p_window_rows + request, 0)
