"""The verify kernel: a window through one layer, from the convolution's outputs to the (normalised) outputs.

One program takes one value head of one request, or a tile of BLOCK_V of its dv rows. In the order of the source:

1. Keys, queries, gates, and the products of the rows with each other, whose operands need many registers.
2. The tile of the state is asked for here and used in 5, so that it travels while 3 and 4 run.
3. D[t, i] = sum of log decays over the rows of t's path below i: a product of two masked squares. No difference of two
   large sums is ever formed, so fp32 is enough however strong the decays above are.
4. (I + L)^-1 by A <- I - L A, depth times, with L[t, i] = beta_t exp(D) (k_t . k_i) over strict ancestors. After m
   steps all rows of depth <= m are final: this is forward substitution, level by level, with its stability. It depends
   on keys and gates alone, not on the tile of the state.
5. Products of the rows with the state and with the pending rows, which are ancestors of all of them:
   S_P k = g_P S_0 k + sum of (g_P / g_i) (k_i . k) u_i. The state read is S_0 also where a fold is due.
6. U = A R, outputs, gated RMS norm.
7. Where a fold is due: the pending rows go into the tile of the state, which is written back.

Everything stands transposed: dv is the long side of every product and the matrix unit's M, rows of the window are
columns, so that no row has to be padded to that unit's 64. A square has the row that is read at [i, .] and the row that
reads at [., t].

Keys and queries enter products as the convolution gave them, in the model's dtype; their inverse norms are fp32 scales
of rows and columns of the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treewy.ops.triton.tile import LOWEST_DECAY, arrive, dot, fold_tile, narrow, pending_rows, sigmoid, softplus


@triton.jit(do_not_specialize=["T", "max_rows", "capacity", "a_stride", "b_stride", "a_row", "b_row"])
def verify_kernel(
    p_mixed,  # [B, T, C]
    p_a,  # [B, T, HV]
    p_b,  # [B, T, HV]
    p_z,  # [B, T, HV, DV], read if NORM
    p_norm_weight,  # [DV], read if NORM
    p_out,  # [B, T, HV, DV], contiguous
    p_checkpoint,  # [slots, HV, DV, DK]
    p_window_keys,  # [R, max_rows, H, DK]
    p_window_values,  # [R, max_rows, HV, DV]
    p_window_decays,  # [R, max_rows, HV]
    p_window_rows,  # [R]
    p_history_keys,  # [R, capacity, H, DK]
    p_history_values,  # [R, capacity, HV, DV]
    p_history_decays,  # [R, capacity, HV]
    p_pending,  # [R]
    p_slots,  # [B]
    p_requests,  # [B]
    p_rows,  # [B]
    p_ancestors,  # [B, T]
    p_longest,  # [B]
    p_neg_A,  # [HV]
    p_dt_bias,  # [HV]
    T,
    max_rows,
    capacity,
    mixed_stride,
    mixed_row,
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
    BLOCK_V: tl.constexpr,
    FOLD_V: tl.constexpr,
    FOLD_ALWAYS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid: value heads times tiles of dv; B."""
    TILES: tl.constexpr = DV // BLOCK_V
    head = tl.program_id(0) // TILES
    first = (tl.program_id(0) % TILES) * BLOCK_V
    key_head = head // (HV // H)
    place = tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    dk = tl.arange(0, DK)
    dv = first + tl.arange(0, BLOCK_V)
    p_out += (place * T * HV + head) * DV
    out_offsets = dv[:, None] + t[None, :] * (HV * DV)
    in_batch = (t < T)[None, :]

    slot = tl.load(p_slots + place).to(tl.int64)
    if slot < 0:
        zeros = tl.zeros([BLOCK_V, BLOCK_T], dtype=p_out.dtype.element_ty)
        tl.store(p_out + out_offsets, zeros, mask=in_batch)
        return
    request = tl.load(p_requests + place).to(tl.int64)
    p_history_keys += request * capacity * (H * DK)
    p_history_values += request * capacity * (HV * DV)
    p_history_decays += request * capacity * HV

    waiting = tl.load(p_pending + request) & 0xFFFF
    longest = tl.load(p_longest + place)

    # 1. Keys, queries and gates
    rows = tl.load(p_rows + place)
    valid = t < rows
    p_row = p_mixed + place * mixed_stride + t[:, None] * mixed_row
    b_q = tl.load(p_row + key_head * DK + dk[None, :], mask=valid[:, None], other=0.0)
    b_k = tl.load(p_row + (H + key_head) * DK + dk[None, :], mask=valid[:, None], other=0.0)
    q_scale = tl.rsqrt(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), axis=1) + eps)
    k_scale = tl.rsqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1) + eps)
    b_a = tl.load(p_a + place * a_stride + t * a_row + head, mask=valid, other=0.0).to(tl.float32)
    b_b = tl.load(p_b + place * b_stride + t * b_row + head, mask=valid, other=0.0).to(tl.float32)
    b_decay = tl.load(p_neg_A + head) * softplus(b_a + tl.load(p_dt_bias + head))
    b_decay = tl.where(valid, tl.maximum(b_decay, LOWEST_DECAY), 0.0)
    b_beta = tl.where(valid, beta_scale * sigmoid(b_b), 0.0)
    q_columns = tl.trans(b_q)
    k_columns = tl.trans(b_k)
    k_by_k = dot(b_k, k_columns)
    k_by_q = dot(b_k, q_columns)

    # 2. State
    p_head = p_checkpoint + slot * slot_stride + head * DV * DK
    b_state = tl.load(p_head + dv[:, None] * DK + dk[None, :])

    # 3. Decays
    masks = tl.load(p_ancestors + place * T + t, mask=valid, other=0)
    bit = t.to(tl.int64)
    related = ((masks[None, :] >> bit[:, None]) & 1) != 0  # [i, t]: i is an ancestor of t, or t
    above = ((masks[:, None] >> bit[None, :]) & 1) != 0  # [i, j]: j is an ancestor of i, or i
    on_path = tl.where(related, b_decay[:, None], 0.0)  # [j, t]
    from_state = tl.exp(tl.sum(on_path, axis=0))
    ratio = tl.where(related, tl.exp(dot(tl.where(above, 0.0, 1.0), on_path)), 0.0)

    # 4. Interaction of the rows
    diagonal = t[:, None] == t[None, :]
    unit = ratio * k_scale[:, None]
    L = tl.where(diagonal, 0.0, unit * k_by_k * (b_beta * k_scale)[None, :])
    reads = unit * k_by_q * q_scale[None, :]
    identity = tl.where(diagonal, 1.0, 0.0)
    inverse = identity
    level = 1
    while level < longest:
        inverse = identity - dot(inverse, L)
        level += 1

    # 5. What the rows read
    k_read = dot(b_state, k_columns)
    q_read = dot(b_state, q_columns)
    if waiting > 0:
        h_keys, h_values, h_decay = pending_rows(
            p_history_keys, p_history_values, p_history_decays, waiting, key_head, head, first, H, HV, DK, DV, BLOCK_P,
            BLOCK_V,
        )  # fmt: skip
        k_read = tl.exp(h_decay) * k_read + dot(h_values, dot(h_keys, k_columns))
        q_read = tl.exp(h_decay) * q_read + dot(h_values, dot(h_keys, q_columns))

    # 6. Pseudo-values and outputs
    p_v = p_mixed + place * mixed_stride + 2 * H * DK + head * DV
    b_v = tl.load(p_v + dv[:, None] + t[None, :] * mixed_row, mask=valid[None, :], other=0.0).to(tl.float32)
    u = dot(b_beta[None, :] * (b_v - (from_state * k_scale)[None, :] * k_read), inverse)
    out = ((from_state * q_scale)[None, :] * q_read + dot(u, reads)) * (DK**-0.5)
    if NORM:
        p_gate = p_z + place * z_stride + head * DV + dv[:, None] + t[None, :] * z_row
        gate = tl.load(p_gate, mask=valid[None, :], other=0.0).to(tl.float32)
        weight = tl.load(p_norm_weight + dv).to(tl.float32)
        out *= tl.rsqrt(tl.sum(out * out, axis=0) / DV + norm_eps)[None, :] * weight[:, None] * gate * sigmoid(gate)
    tl.store(p_out + out_offsets, narrow(out, p_out.dtype.element_ty), mask=in_batch)

    # Stash
    row = request * max_rows + t
    p_values = p_window_values + head * DV + dv[:, None] + row[None, :] * (HV * DV)
    tl.store(p_values, u * k_scale[None, :], mask=valid[None, :])
    if first == 0:
        tl.store(p_window_decays + row * HV + head, b_decay, mask=valid)
        if head % (HV // H) == 0:
            tl.store(p_window_keys + (row[:, None] * H + key_head) * DK + dk[None, :], b_k, mask=valid[:, None])
        if head == 0:
            tl.store(p_window_rows + request, rows)

    # 7. Fold
    if (waiting > 0) & (FOLD_ALWAYS | (waiting + longest > capacity)):
        for chunk in tl.static_range(BLOCK_V // FOLD_V):
            fold_tile(
                p_head, p_history_keys, p_history_values, p_history_decays, waiting, key_head, head,
                first + chunk * FOLD_V, H, HV, DK, DV, BLOCK_P, FOLD_V,
            )  # fmt: skip
        arrive(p_pending + request, HV * TILES, 0)
