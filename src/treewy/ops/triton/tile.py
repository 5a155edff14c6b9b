"""What the kernels share: products in fp32 quality, rounding, gates.

Inside kernels `b_x` is a block of values, `p_x` a pointer or a block of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels on the CPU; its bf16 arithmetic is wrong, so operands are widened first."""

LOWEST_DECAY = tl.constexpr(-1e3)
"""exp of it is 0; a log decay of -inf would turn differences into NaN."""


@triton.jit
def dot(a, b):
    """a @ b, accumulated in fp32, with nothing lost that the operands hold.

    Two 16-bit operands of one dtype go to the matrix unit as they are: their products are exact in fp32. A bf16 with an
    fp16 fits TF32 without rounding. An fp32 operand is split into two TF32 parts, three products, error 2^-21.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.float32 or b.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    elif a.dtype == b.dtype:
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """An fp32 block in another dtype, rounded to nearest even; the interpreter alone would cut bf16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); the argument of exp is never positive."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def silu(x):
    """x sigmoid(x). Below -88 exp(-x) is infinite and the quotient 0, as it should be."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where exp(x) is below the resolution of 1."""
    e = tl.exp(-tl.abs(x))
    one = 1.0 + e
    rounded = one - 1.0
    log1p = tl.where(rounded == 0, e, tl.log(one) * (e / tl.where(rounded == 0, 1.0, rounded)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def path_decays(related, below, decay):
    """What decays along the paths of some rows, from the log decay of each row alone.

    The log of a ratio is the sum over the rows of t's path below i: a product of two masked squares. No difference of
    two large sums is ever formed, so fp32 is enough however strong the decays above are.

    Args:
        related: [i, t] bool, i is an ancestor of t, or t; no row is related to padding.
        below: [i, m] bool, m is an ancestor of i, or i: `related` transposed.
        decay: log decays, 0 in padding.

    Returns:
        Decay from i to t, [i, t], 0 for all who are not related, and of the whole path to t, t included.
    """
    on_path = tl.where(related, decay[:, None], 0.0)
    ratio = tl.exp(dot(tl.where(below, 0.0, 1.0), on_path))
    return tl.where(related, ratio, 0.0), tl.exp(tl.sum(on_path, axis=0))


@triton.jit
def inverse_of(L, rows, BLOCK: tl.constexpr):
    """(I + L)^-1 for L[i, t] of `rows` rows, nonzero only for i < t.

    Blocks double: two neighbouring blocks on the diagonal of I + L with their inverses A and C, and B between them in
    L, give -A B C between the inverses. Every block is one of the true inverse: no power of L is ever formed, which
    for equal keys and weak decays would grow like binomials and cancel.
    """
    i = tl.arange(0, BLOCK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    size = 1
    while size < rows:
        between = ((i[:, None] // size) ^ (i[None, :] // size)) == 1
        inverse -= dot(dot(inverse, tl.where(between, L, 0.0)), inverse)
        size *= 2
    return inverse


@triton.jit
def pending_rows(
    p_state, p_keys, p_values, p_gates, rows, end, ring, eps, key_head, head, H: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Solves the pending rows of one head; `p_state` is its state, the ring's pointers are those of the request.

    Returns:
        Pseudo-values [DV, BLOCK_P], each with the decay of the rows after it, zero in padding; decay of all rows.
    """
    i = tl.arange(0, BLOCK_P)
    dv = tl.arange(0, DV)
    used = i < rows
    at = (end + ring - rows + i) % ring
    p_key = p_keys + (at * H + key_head) * DK
    decay = tl.load(p_gates + (at * HV + head) * 2, mask=used, other=0.0)
    beta = tl.load(p_gates + (at * HV + head) * 2 + 1, mask=used, other=0.0)

    squares = tl.zeros([BLOCK_P], dtype=tl.float32)
    products = tl.zeros([BLOCK_P, BLOCK_P], dtype=tl.float32)
    read = tl.zeros([DV, BLOCK_P], dtype=tl.float32)
    for first in range(0, DK, BLOCK_K):
        dk = first + tl.arange(0, BLOCK_K)
        b_state = tl.load(p_state + dv[:, None] * DK + dk[None, :])
        b_k = tl.load(p_key[:, None] + dk[None, :], mask=used[:, None], other=0.0)
        squares += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1)
        products += dot(b_k, tl.trans(b_k))
        read += dot(b_state, tl.trans(b_k))
    scale = tl.rsqrt(squares + eps)
    strength = beta * scale

    before = i[:, None] <= i[None, :]
    ratio, from_state = path_decays(
        before & used[:, None] & used[None, :], (i[:, None] >= i[None, :]) & used[:, None] & used[None, :], decay
    )
    inverse = inverse_of(ratio * products * (strength * scale)[None, :], rows, BLOCK_P)
    b_v = tl.load(p_values + ((at * HV + head) * DV)[None, :] + dv[:, None], mask=used[None, :], other=0.0)
    w = dot(strength[None, :] * (b_v.to(tl.float32) - (from_state * scale)[None, :] * read), inverse)
    after = tl.sum(tl.where(before, 0.0, decay[:, None]), axis=0)
    return w * tl.exp(after)[None, :], tl.exp(tl.sum(decay, axis=0))


@triton.jit
def fold_state(
    p_state, p_keys, p_pending, w, decay, rows, end, ring, key_head, H: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes decay S + w k^T over the pending rows in the place of S, and that none is pending any more."""
    i = tl.arange(0, BLOCK_P)
    dv = tl.arange(0, DV)
    at = (end + ring - rows + i) % ring
    p_key = p_keys + (at * H + key_head) * DK
    for first in range(0, DK, BLOCK_K):
        dk = first + tl.arange(0, BLOCK_K)
        p_tile = p_state + dv[:, None] * DK + dk[None, :]
        b_state = tl.load(p_tile)
        b_k = tl.load(p_key[:, None] + dk[None, :], mask=(i < rows)[:, None], other=0.0)
        new_state = decay * b_state.to(tl.float32) + dot(w, b_k)
        tl.debug_barrier()  # a thread may write what another one reads
        tl.store(p_tile, narrow(new_state, b_state.dtype))
    tl.debug_barrier()
    tl.store(p_pending, 0)
