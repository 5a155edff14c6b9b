"""The verify kernel: pending rows and a window through one layer, up to the (normalised) outputs.

One program takes one value head of one request. Pending rows are a chain, ancestors of the whole window, so both are
one small system of N rows: row i, pending or not, is at (end - pending + i) of the ring. In the order of the source:

1. Gates: of pending rows from the ring, of the window's from a and b; these go into the ring.
2. In one pass over dk, BLOCK_K columns at a time: products of the rows with each other and with the state, and norms.
3. D[i, t] = sum of log decays over the rows of t's path below i: a product of two masked squares. No difference of two
   large sums is ever formed, so fp32 is enough however strong the decays above are.
4. (I + L)^-1 by blocks that double: the inverses A and C of two neighbouring blocks on the diagonal, with B of L below
   them, give the inverse -C B A below. Every block is one of the true inverse, and no power of L is ever formed.
5. Pseudo-values, outputs, gated RMS norm.
6. Where a fold is due, a second pass over dk: the pending rows go into the state, which is written back. The outputs
   are those of the state before the fold.

Everything stands transposed: dv is the long side of every product and the matrix unit's M, rows are columns. A square
has the row that is read at [i, .] and the row that reads at [., t].

Keys and queries enter products as the convolution gave them, in the model's dtype. The inverse norm of a key is part of
its pseudo-value: w = beta / |k| (v - ...), and S + w k^T needs no normalised key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import LOWEST_DECAY, dot, narrow, sigmoid, softplus


@triton.jit
def descends(row, above, masks, pending, count):
    """Whether `row` is below `above`, or is it: in the chain of pending rows, or by the ancestor mask of a window's."""
    bit = tl.maximum(above - pending, 0).to(tl.int64)
    in_window = (above < pending) | (((masks >> bit) & 1) != 0)
    return (row < count) & tl.where(row < pending, above <= row, in_window)


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
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    FOLD_ALWAYS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid: value heads; B. Without WINDOW a window of no rows, which leaves the fold."""
    head = tl.program_id(0)
    key_head = head // (HV // H)
    place = tl.program_id(1).to(tl.int64)
    dv = tl.arange(0, DV)
    j = tl.arange(0, BLOCK_J)
    p_out += (place * T * HV + head) * DV

    slot = tl.load(p_slots + place).to(tl.int64)
    if slot < 0:
        if WINDOW:
            zeros = tl.zeros([DV, BLOCK_J], dtype=p_out.dtype.element_ty)
            tl.store(p_out + dv[:, None] + j[None, :] * (HV * DV), zeros, mask=(j < T)[None, :])
        return
    request = tl.load(p_requests + place).to(tl.int64)
    pending = tl.load(p_pending + request * HV + head)
    rows = 0
    longest = 0
    if WINDOW:
        rows = tl.load(p_rows + place)
        longest = tl.load(p_longest + place)
    count = pending + rows
    t = j - pending  # row of the window
    used = j < count
    in_window = used & (t >= 0)
    at = tl.load(p_end + request) + t
    at = tl.where(at < 0, at + ring, at)
    at = request * ring + tl.where(at >= ring, at - ring, at)  # row of the ring

    # 1. Gates
    p_gate = p_gates + (at * HV + head) * 2
    decay = tl.load(p_gate, mask=used & (t < 0), other=0.0)
    beta = tl.load(p_gate + 1, mask=used & (t < 0), other=0.0)
    if WINDOW:
        b_a = tl.load(p_a + place * a_stride + t * a_row + head, mask=in_window, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + place * b_stride + t * b_row + head, mask=in_window, other=0.0).to(tl.float32)
        new_decay = tl.load(p_neg_A + head) * softplus(b_a + tl.load(p_dt_bias + head))
        new_decay = tl.maximum(new_decay, LOWEST_DECAY)
        new_beta = beta_scale * sigmoid(b_b)
        tl.store(p_gate, new_decay, mask=in_window)
        tl.store(p_gate + 1, new_beta, mask=in_window)
        decay = tl.where(in_window, new_decay, decay)
        beta = tl.where(in_window, new_beta, beta)

    # 2. Products over dk
    p_key = p_keys + (at * H + key_head) * DK
    p_query = p_queries + ((place * T + t) * H + key_head) * DK
    p_state = p_checkpoint + slot * slot_stride + head * DV * DK + dv[:, None] * DK
    k_square = tl.zeros([BLOCK_J], dtype=tl.float32)
    q_square = tl.zeros([BLOCK_J], dtype=tl.float32)
    k_by_k = tl.zeros([BLOCK_J, BLOCK_J], dtype=tl.float32)
    k_by_q = tl.zeros([BLOCK_J, BLOCK_J], dtype=tl.float32)
    k_read = tl.zeros([DV, BLOCK_J], dtype=tl.float32)
    q_read = tl.zeros([DV, BLOCK_J], dtype=tl.float32)
    for first in range(0, DK, BLOCK_K):
        dk = first + tl.arange(0, BLOCK_K)
        b_state = tl.load(p_state + dk[None, :])
        b_k = tl.load(p_key[:, None] + dk[None, :], mask=used[:, None], other=0.0)
        k_columns = tl.trans(b_k)
        k_square += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1)
        k_by_k += dot(b_k, k_columns)
        k_read += dot(b_state, k_columns)
        if WINDOW:
            b_q = tl.load(p_query[:, None] + dk[None, :], mask=in_window[:, None], other=0.0)
            q_columns = tl.trans(b_q)
            q_square += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), axis=1)
            k_by_q += dot(b_k, q_columns)
            q_read += dot(b_state, q_columns)
    k_scale = tl.rsqrt(k_square + eps)

    # 3. Decays
    masks = tl.zeros([BLOCK_J], dtype=tl.int64)
    if WINDOW:
        masks = tl.load(p_ancestors + place * T + t, mask=in_window, other=0)
    related = descends(j[None, :], j[:, None], masks[None, :], pending, count)  # [i, t]: t is below i, or is i
    below = descends(j[:, None], j[None, :], masks[:, None], pending, count)  # [i, m]: i is below m, or is m
    on_path = tl.where(related, decay[:, None], 0.0)  # [m, t]
    from_state = tl.exp(tl.sum(on_path, axis=0))
    ratio = tl.where(related, tl.exp(dot(tl.where(below, 0.0, 1.0), on_path)), 0.0)

    # 4. Inverse
    strength = tl.where(used, beta * k_scale, 0.0)
    L = ratio * k_by_k * (strength * k_scale)[None, :]
    inverse = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    size = 1
    while size < count:
        neighbours = ((j[:, None] // size) ^ (j[None, :] // size)) == 1
        inverse -= dot(dot(inverse, tl.where(neighbours, L, 0.0)), inverse)
        size *= 2

    # 5. Pseudo-values and outputs
    p_value = p_values + (at * HV + head) * DV
    b_v = tl.load(p_value[None, :] + dv[:, None], mask=used[None, :], other=0.0).to(tl.float32)
    w = dot(strength[None, :] * (b_v - (from_state * k_scale)[None, :] * k_read), inverse)
    if WINDOW:
        q_scale = tl.rsqrt(q_square + eps) * (DK**-0.5)
        out = (from_state[None, :] * q_read + dot(w, ratio * k_by_q)) * q_scale[None, :]
        if NORM:
            p_gate = p_z + place * z_stride + head * DV + dv[:, None] + t[None, :] * z_row
            gate = tl.load(p_gate, mask=in_window[None, :], other=0.0).to(tl.float32)
            weight = tl.load(p_norm_weight + dv).to(tl.float32)
            out *= tl.rsqrt(tl.sum(out * out, axis=0) / DV + norm_eps)[None, :] * weight[:, None]
            out *= gate * sigmoid(gate)
        # Rows of padding give zeros, also where the state is not finite.
        out = narrow(tl.where(in_window[None, :], out, 0.0), p_out.dtype.element_ty)
        tl.store(p_out + dv[:, None] + t[None, :] * (HV * DV), out, mask=((t >= 0) & (t < T))[None, :])

    # 6. Fold
    if (pending > 0) & (FOLD_ALWAYS | (pending + longest > capacity)):
        folded = j < pending
        decay = tl.where(folded, decay, 0.0)
        after = tl.exp(tl.sum(tl.where(j[:, None] > j[None, :], decay[:, None], 0.0), axis=0))
        total = tl.exp(tl.sum(decay, axis=0))
        written = tl.where(folded[None, :], w * after[None, :], 0.0)
        for first in range(0, DK, BLOCK_K):
            dk = first + tl.arange(0, BLOCK_K)
            b_state = tl.load(p_state + dk[None, :])
            b_k = tl.load(p_key[:, None] + dk[None, :], mask=folded[:, None], other=0.0)
            new_state = total * b_state.to(tl.float32) + dot(written, b_k)
            tl.store(p_state + dk[None, :], narrow(new_state, b_state.dtype))
        tl.debug_barrier()  # a warp that lags behind has not read the counter yet
        tl.store(p_pending + request * HV + head, 0)
