"""The plan of a round of chains, in one launch: what `DeviceWindow.update` does for any trees with twenty operations.

One program fills one place: it looks up which request of the engine's batch takes it, and writes what it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

OUTSIDE = tl.constexpr(8)
"""Bit of `errors`: a slot or running request past its end."""


@triton.jit(do_not_specialize=["batch", "named", "filler", "T", "num_slots", "num_requests"])
def chains_kernel(
    p_starts,  # [batch + 1]
    p_blocks,  # [batch], any stride
    p_names,  # [named]
    p_chosen,  # [places], read if CHOSEN
    p_slots,  # [places] and so on: the buffers of a DeviceWindow
    p_requests,
    p_rows,
    p_parents,  # [places, T]
    p_ancestors,  # [places, T]
    p_conv_ancestors,  # [places, T, KEPT]
    p_longest,
    p_errors,  # [1]
    batch,
    named,
    filler,
    T,
    num_slots,
    num_requests,
    block_stride,
    KEPT: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
):
    """Grid: places."""
    place = tl.program_id(0)
    origin = place
    if CHOSEN:
        origin = tl.load(p_chosen + place).to(tl.int32)
    there = origin < batch
    start = tl.load(p_starts + origin, mask=there, other=0)
    rows = (tl.load(p_starts + origin + 1, mask=there, other=0) - start).to(tl.int32)
    slot = tl.load(p_blocks + origin * block_stride, mask=there, other=filler).to(tl.int64)
    request = tl.load(p_names + origin, mask=there & (origin < named), other=-1).to(tl.int64)
    real = (rows > 0) & (slot != filler) & (request >= 0)
    inside = (slot >= 0) & (slot < num_slots) & (request < num_requests) & (rows <= T)
    if real & (inside == 0):
        tl.atomic_or(p_errors, OUTSIDE)
    real = real & inside
    rows = tl.where(real, rows, 0)
    tl.store(p_slots + place, tl.where(real, slot, -1))
    tl.store(p_requests + place, tl.where(real, request, -1))
    tl.store(p_rows + place, rows)
    tl.store(p_longest + place, tl.maximum(rows, 1))

    t = tl.arange(0, BLOCK_T)
    at = place.to(tl.int64) * T + t
    in_tree = t < rows
    all_before = tl.full([BLOCK_T], 2, tl.int64) << t  # bit t + 1
    tl.store(p_parents + at, tl.where(in_tree, t - 1, -1), mask=t < T)
    tl.store(p_ancestors + at, tl.where(in_tree, all_before - 1, 0), mask=t < T)
    step = tl.arange(0, BLOCK_KEPT)
    met = tl.where(in_tree, t, 0)[:, None] - 1 - step[None, :]
    tl.store(p_conv_ancestors + at[:, None] * KEPT + step[None, :], met, mask=(t < T)[:, None] & (step < KEPT)[None, :])
