"""The verify kernel: pending rows and a window through one layer, up to the (normalised) outputs.

One program takes one value head of one request. In the order of the source:

1. Pending rows are solved anew, from the ring; the state is read BLOCK_K columns at a time.
2. Gates of the window, which also go into the ring.
3. In a second pass over dk, products of the window's rows with each other, with the pending rows and with the state,
   which comes from cache now, and the norms.
4. Pending rows are ancestors of the whole window:
   S_P k = g_P S k + sum over pending i of (g_P / g_i) (k_i . k) w_i.
5. The window is solved: pseudo-values, outputs, gated RMS norm.
6. Where a fold is due, the pending rows go into the state, which is written back. The outputs are those of the state
   before the fold.

Everything stands transposed: dv is the long side of every product and the matrix unit's M, rows are columns. A square
has the row that is read at [i, .] and the row that reads at [., t].

Keys and queries enter products as the convolution gave them, in the model's dtype; their inverse norms are fp32 scales
of rows and columns of the results. That of a key is part of its pseudo-value: w = beta / |k| (v - ...).

The fold kernel is 1 and 6 alone, for a reader that knows nothing of pending rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import (
    LOWEST_DECAY,
    dot,
    fold_state,
    inverse_of,
    narrow,
    path_decays,
    pending_rows,
    sigmoid,
    silu,
    softplus,
)


@triton.jit(do_not_specialize=["T", "ring", "capacity", "a_stride", "a_row", "b_stride", "b_row"])
def verify_kernel(
    p_queries,  # [B, T, H, DK], contiguous
    p_a,  # [B, T, HV]
    p_b,  # [B, T, HV]
    p_z,  # [B, T, HV, DV], read if NORM
    p_norm_weight,  # [DV], read if NORM
    p_out,  # [B, T, HV, DV], contiguous
    p_checkpoint,  # [slots, HV, DV, DK]
    p_keys,  # [R, ring, H, DK]
    p_values,  # [R, ring, HV, DV]
    p_gates,  # [R, ring, HV, 2]
    p_end,  # [R]
    p_pending,  # [R, HV]
    p_slots,  # [B]
    p_requests,  # [B]
    p_rows,  # [B]
    p_ancestors,  # [B, T]
    p_longest,  # [B]
    p_neg_A,  # [HV]
    p_dt_bias,  # [HV]
    T,
    ring,
    capacity,
    a_stride,
    a_row,
    b_stride,
    b_row,
    z_stride,
    z_row,
    slot_stride,
    beta_scale,
    eps,
    norm_eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FOLD_ALWAYS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid: value heads; B."""
    head = tl.program_id(0)
    key_head = head // (HV // H)
    place = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    dv = tl.arange(0, DV)
    p_out += (place * T * HV + head) * DV
    out_offsets = dv[:, None] + t[None, :] * (HV * DV)
    in_batch = (t < T)[None, :]

    slot = tl.load(p_slots + place).to(tl.int64)
    if slot < 0:
        zeros = tl.zeros([DV, BLOCK_T], dtype=p_out.dtype.element_ty)
        tl.store(p_out + out_offsets, zeros, mask=in_batch)
        return
    request = tl.load(p_requests + place).to(tl.int64)
    p_keys += request * ring * (H * DK)
    p_values += request * ring * (HV * DV)
    p_gates += request * ring * (HV * 2)
    p_state = p_checkpoint + slot * slot_stride + head * DV * DK
    p_pending += request * HV + head
    end = tl.load(p_end + request)
    waiting = tl.load(p_pending)

    # 1. Pending rows
    h_values = tl.zeros([DV, BLOCK_P], dtype=tl.float32)
    h_decay = 1.0
    if waiting > 0:
        h_values, h_decay = pending_rows(
            p_state, p_keys, p_values, p_gates, waiting, end, ring, eps, key_head, head, H, HV, DK, DV, BLOCK_P, BLOCK_K
        )

    # 2. Gates
    rows = tl.load(p_rows + place)
    longest = tl.load(p_longest + place)
    valid = t < rows
    at = (end + t) % ring
    b_a = tl.load(p_a + place * a_stride + t * a_row + head, mask=valid, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + place * b_stride + t * b_row + head, mask=valid, other=0.0).to(tl.float32)
    decay = tl.load(p_neg_A + head) * softplus(b_a + tl.load(p_dt_bias + head))
    decay = tl.where(valid, tl.maximum(decay, LOWEST_DECAY), 0.0)
    beta = tl.where(valid, beta_scale * sigmoid(b_b), 0.0)
    tl.store(p_gates + (at * HV + head) * 2, decay, mask=valid)
    tl.store(p_gates + (at * HV + head) * 2 + 1, beta, mask=valid)

    # 3. Products over dk
    i = tl.arange(0, BLOCK_P)
    p_pending_key = p_keys + (((end + ring - waiting + i) % ring) * H + key_head) * DK
    p_key = p_keys + (at * H + key_head) * DK
    p_query = p_queries + ((place * T + t) * H + key_head) * DK
    k_square = tl.zeros([BLOCK_T], dtype=tl.float32)
    q_square = tl.zeros([BLOCK_T], dtype=tl.float32)
    k_by_k = tl.zeros([BLOCK_T, BLOCK_T], dtype=tl.float32)
    k_by_q = tl.zeros([BLOCK_T, BLOCK_T], dtype=tl.float32)
    h_by_k = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    h_by_q = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    k_read = tl.zeros([DV, BLOCK_T], dtype=tl.float32)
    q_read = tl.zeros([DV, BLOCK_T], dtype=tl.float32)
    for first in range(0, DK, BLOCK_K):
        dk = first + tl.arange(0, BLOCK_K)
        b_state = tl.load(p_state + dv[:, None] * DK + dk[None, :])
        b_h = tl.load(p_pending_key[:, None] + dk[None, :], mask=(i < waiting)[:, None], other=0.0)
        b_k = tl.load(p_key[:, None] + dk[None, :], mask=valid[:, None], other=0.0)
        b_q = tl.load(p_query[:, None] + dk[None, :], mask=valid[:, None], other=0.0)
        k_square += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1)
        q_square += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), axis=1)
        k_columns = tl.trans(b_k)
        q_columns = tl.trans(b_q)
        k_by_k += dot(b_k, k_columns)
        k_by_q += dot(b_k, q_columns)
        h_by_k += dot(b_h, k_columns)
        h_by_q += dot(b_h, q_columns)
        k_read += dot(b_state, k_columns)
        q_read += dot(b_state, q_columns)
    k_scale = tl.rsqrt(k_square + eps)
    q_scale = tl.rsqrt(q_square + eps) * (DK**-0.5)
    strength = beta * k_scale

    # 4. The state behind the pending rows
    if waiting > 0:
        k_read = h_decay * k_read + dot(h_values, h_by_k)
        q_read = h_decay * q_read + dot(h_values, h_by_q)

    # 5. The window
    masks = tl.load(p_ancestors + place * T + t, mask=valid, other=0)
    bit = t.to(tl.int64)
    related = ((masks[None, :] >> bit[:, None]) & 1) != 0  # [i, t]: i is an ancestor of t, or t
    below = ((masks[:, None] >> bit[None, :]) & 1) != 0  # [i, m]: m is an ancestor of i, or i
    ratio, from_state = path_decays(related, below, decay)
    inverse = inverse_of(
        tl.where(t[:, None] < t[None, :], ratio * k_by_k, 0.0) * (strength * k_scale)[None, :], rows, BLOCK_T
    )
    p_value = p_values + (at * HV + head) * DV
    b_v = tl.load(p_value[None, :] + dv[:, None], mask=valid[None, :], other=0.0).to(tl.float32)
    w = dot(strength[None, :] * (b_v - (from_state * k_scale)[None, :] * k_read), inverse)
    out = (from_state[None, :] * q_read + dot(w, ratio * k_by_q)) * q_scale[None, :]
    if NORM:
        p_gate = p_z + place * z_stride + head * DV + dv[:, None] + t[None, :] * z_row
        gate = tl.load(p_gate, mask=valid[None, :], other=0.0).to(tl.float32)
        weight = tl.load(p_norm_weight + dv).to(tl.float32)
        out *= tl.rsqrt(tl.sum(out * out, axis=0) / DV + norm_eps)[None, :] * weight[:, None] * silu(gate)
    # Padding gives zeros, also where the state is not finite.
    out = narrow(tl.where(valid[None, :], out, 0.0), p_out.dtype.element_ty)
    tl.store(p_out + out_offsets, out, mask=in_batch)

    # 6. Fold
    if (waiting > 0) & (FOLD_ALWAYS | (waiting + longest > capacity)):
        fold_state(
            p_state, p_keys, p_pending, h_values, h_decay, waiting, end, ring, key_head, H, DK, DV, BLOCK_P, BLOCK_K
        )


@triton.jit(do_not_specialize=["ring"])
def fold_kernel(
    p_checkpoint,  # [slots, HV, DV, DK]
    p_keys,  # [R, ring, H, DK]
    p_values,  # [R, ring, HV, DV]
    p_gates,  # [R, ring, HV, 2]
    p_end,  # [R]
    p_pending,  # [R, HV]
    p_slots,  # [n]
    p_requests,  # [n]
    ring,
    slot_stride,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: value heads; n."""
    head = tl.program_id(0)
    key_head = head // (HV // H)
    place = tl.program_id(1)
    slot = tl.load(p_slots + place).to(tl.int64)
    if slot < 0:
        return
    request = tl.load(p_requests + place).to(tl.int64)
    p_pending += request * HV + head
    waiting = tl.load(p_pending)
    if waiting == 0:
        return
    p_state = p_checkpoint + slot * slot_stride + head * DV * DK
    p_keys += request * ring * (H * DK)
    end = tl.load(p_end + request)
    values, decay = pending_rows(
        p_state, p_keys, p_values + request * ring * (HV * DV), p_gates + request * ring * (HV * 2), waiting, end, ring,
        eps, key_head, head, H, HV, DK, DV, BLOCK_P, BLOCK_K,
    )  # fmt: skip
    fold_state(p_state, p_keys, p_pending, values, decay, waiting, end, ring, key_head, H, DK, DV, BLOCK_P, BLOCK_K)
