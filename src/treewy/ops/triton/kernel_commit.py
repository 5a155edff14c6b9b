"""The commit kernel: the accepted paths of all requests, in all layers, in one launch.

Per layer and request it moves the solved rows of the path (keys, pseudo-values, decays) behind what is pending, moves
the convolution's committed inputs along the path, and advances the counters. One program takes BLOCK columns of one of
these three kinds. A path that is none of the tree's, or for which there is no room, changes nothing and sets a bit in
`errors`.

The fold kernel brings what is pending into the checkpoints, for a reader that knows nothing of histories.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import ARRIVAL, arrive, fold_tile

BAD_PATH = tl.constexpr(1)
NOT_VERIFIED = tl.constexpr(2)
NO_ROOM = tl.constexpr(4)


@triton.jit(do_not_specialize=["T", "P", "max_rows", "capacity"])
def commit_kernel(
    p_conv,  # [layers, slots, KEPT, C]
    p_window_inputs,  # [layers, R, max_rows, C]
    p_window_keys,  # [layers, R, max_rows, KEYS]
    p_window_values,  # [layers, R, max_rows, VALUES]
    p_window_decays,  # [layers, R, max_rows, HV]
    p_window_rows,  # [layers, R]
    p_history_keys,  # [layers, R, capacity, KEYS]
    p_history_values,  # [layers, R, capacity, VALUES]
    p_history_decays,  # [layers, R, capacity, HV]
    p_pending,  # [layers, R]
    p_slots,  # [B]
    p_requests,  # [B]
    p_rows,  # [B]
    p_parents,  # [B, T]
    p_path,  # [B, P]
    p_accepted,  # [B]
    p_errors,  # [1]
    T,
    P,
    max_rows,
    capacity,
    path_stride,
    num_requests,
    conv_layer,
    slot_stride,
    C: tl.constexpr,
    KEPT: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: column tiles of keys, values and inputs; B; layers."""
    KEY_TILES: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    VALUE_TILES: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    INPUT_TILES: tl.constexpr = (C + BLOCK - 1) // BLOCK
    tile = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(p_slots + place).to(tl.int64)
    if slot < 0:
        return
    request = layer * num_requests + tl.load(p_requests + place).to(tl.int64)
    rows = tl.load(p_rows + place)
    accepted = tl.load(p_accepted + place).to(tl.int32)
    pending = tl.load(p_pending + request)
    verified = tl.load(p_window_rows + request) & 0xFFFF

    s = tl.arange(0, BLOCK_S)
    taken = s < tl.minimum(accepted, P)
    path = tl.load(p_path + place * path_stride + s, mask=taken, other=0).to(tl.int32)
    before = tl.load(p_path + place * path_stride + s - 1, mask=taken & (s > 0), other=-1).to(tl.int32)
    in_tree = (path >= 0) & (path < rows)
    parent = tl.load(p_parents + place * T + path, mask=taken & in_tree, other=-2)
    follows = in_tree & (parent == before) & ((s > 0) | (path == 0))
    error = 0
    if (accepted < 1) | (accepted > P) | (tl.sum(tl.where(taken & (follows == 0), 1, 0), axis=0) > 0):
        error = BAD_PATH
    if verified != rows:
        error = error | NOT_VERIFIED
    if pending + accepted > capacity:
        error = error | NO_ROOM
    if error > 0:
        tl.atomic_or(p_errors, error)
        return

    source = request * max_rows + path
    target = request * capacity + pending + s
    if tile < KEY_TILES:
        c = tile * BLOCK + tl.arange(0, BLOCK)
        there = taken[:, None] & (c < KEYS)[None, :]
        b_keys = tl.load(p_window_keys + source[:, None] * KEYS + c[None, :], mask=there)
        tl.store(p_history_keys + target[:, None] * KEYS + c[None, :], b_keys, mask=there)
    elif tile < KEY_TILES + VALUE_TILES:
        c = (tile - KEY_TILES) * BLOCK + tl.arange(0, BLOCK)
        there = taken[:, None] & (c < VALUES)[None, :]
        b_values = tl.load(p_window_values + source[:, None] * VALUES + c[None, :], mask=there)
        tl.store(p_history_values + target[:, None] * VALUES + c[None, :], b_values, mask=there)
        if tile == KEY_TILES:
            h = tl.arange(0, BLOCK_H)
            there_h = taken[:, None] & (h < HV)[None, :]
            b_decays = tl.load(p_window_decays + source[:, None] * HV + h[None, :], mask=there_h)
            tl.store(p_history_decays + target[:, None] * HV + h[None, :], b_decays, mask=there_h)
    else:
        # Place i of the new committed inputs: input `accepted + i` of the old ones and the path's, one after the other.
        c = (tile - KEY_TILES - VALUE_TILES) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, triton.next_power_of_2(KEPT))
        kept = i < KEPT
        moved = i + accepted
        step = moved - KEPT
        row = tl.load(p_path + place * path_stride + step, mask=kept & (step >= 0), other=0).to(tl.int32)
        p_inputs = p_conv + layer * conv_layer + slot * slot_stride
        old = (kept & (step < 0))[:, None] & (c < C)[None, :]
        new = (kept & (step >= 0))[:, None] & (c < C)[None, :]
        b_old = tl.load(p_inputs + moved[:, None] * C + c[None, :], mask=old)
        b_new = tl.load(p_window_inputs + (request * max_rows + row)[:, None] * C + c[None, :], mask=new)
        tl.debug_barrier()  # threads write where others read
        tl.store(p_inputs + i[:, None] * C + c[None, :], b_old, mask=old)
        tl.store(p_inputs + i[:, None] * C + c[None, :], b_new, mask=new)
    programs = KEY_TILES + VALUE_TILES + INPUT_TILES
    tl.debug_barrier()  # a warp that lags behind has not read the counters yet
    seen = tl.atomic_add(p_window_rows + request, ARRIVAL)
    if seen // ARRIVAL == programs - 1:
        tl.store(p_pending + request, pending + accepted)
        tl.store(p_window_rows + request, 0)


@triton.jit(do_not_specialize=["capacity"])
def fold_kernel(
    p_checkpoint,  # [slots, HV, DV, DK]
    p_history_keys,  # [R, capacity, H, DK]
    p_history_values,  # [R, capacity, HV, DV]
    p_history_decays,  # [R, capacity, HV]
    p_pending,  # [R]
    p_slots,  # [n]
    p_requests,  # [n]
    capacity,
    slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: value heads times tiles of dv; n."""
    TILES: tl.constexpr = DV // BLOCK_V
    head = tl.program_id(0) // TILES
    first = (tl.program_id(0) % TILES) * BLOCK_V
    place = tl.program_id(1)
    slot = tl.load(p_slots + place).to(tl.int64)
    if slot < 0:
        return
    request = tl.load(p_requests + place).to(tl.int64)
    waiting = tl.load(p_pending + request) & 0xFFFF
    if waiting == 0:
        return
    fold_tile(
        p_checkpoint + slot * slot_stride + head * DV * DK, p_history_keys + request * capacity * (H * DK),
        p_history_values + request * capacity * (HV * DV), p_history_decays + request * capacity * HV, waiting,
        head // (HV // H), head, first, H, HV, DK, DV, BLOCK_P, BLOCK_V,
    )  # fmt: skip
    arrive(p_pending + request, HV * TILES, 0)
