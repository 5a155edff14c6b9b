"""What the kernels share: products in fp32 quality, gates, and the pending rows of a request as one tile.

Inside kernels `b_x` is a block of values, `p_x` a pointer or a block of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels on the CPU; its bf16 arithmetic is wrong, so operands are widened first."""

LOWEST_DECAY = tl.constexpr(-1e4)
"""exp of it is 0; a log decay of -inf would turn differences into NaN."""

ARRIVAL = tl.constexpr(1 << 16)
"""Counters of a request (`pending`, `window_rows`) hold a count below 2^16. During a launch that changes one, its upper
half counts the programs that have read it and are done; the last of them writes the new count."""


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
def softplus(x):
    """log(1 + exp(x)), also where exp(x) is below the resolution of 1."""
    e = tl.exp(-tl.abs(x))
    one = 1.0 + e
    rounded = one - 1.0
    log1p = tl.where(rounded == 0, e, tl.log(one) * (e / tl.where(rounded == 0, 1.0, rounded)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def pending_rows(
    p_keys, p_values, p_decays, count, key_head, head, first, H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Solved rows that wait in the history of one request; rows past `count` are not read and come as zeros.

    Returns:
        keys [BLOCK_P, DK] in their dtype; values [BLOCK_V, BLOCK_P] fp32, each with the decay of the rows after it;
        log decay of all rows together.
    """
    i = tl.arange(0, BLOCK_P)
    kept = i < count
    dk = tl.arange(0, DK)
    dv = first + tl.arange(0, BLOCK_V)
    b_keys = tl.load(p_keys + (i * H + key_head)[:, None] * DK + dk[None, :], mask=kept[:, None], other=0.0)
    b_values = tl.load(p_values + (i * HV + head)[None, :] * DV + dv[:, None], mask=kept[None, :], other=0.0)
    b_decays = tl.load(p_decays + i * HV + head, mask=kept, other=0.0)
    b_after = tl.sum(tl.where(i[:, None] > i[None, :], b_decays[:, None], 0.0), axis=0)
    return b_keys, b_values * tl.exp(b_after)[None, :], tl.sum(b_decays, axis=0)


@triton.jit
def fold_tile(
    p_state, p_keys, p_values, p_decays, count, key_head, head, first, H: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes g S + sum of u_i k_i^T over the pending rows in the place of S, for dv rows from `first` on.

    `p_state` is the first element of the head's state. BLOCK_V is small: an fp32 tile of the state beside the product
    that is added to it would not fit the registers otherwise. What is read here was read before and comes from the L2.
    """
    dv = first + tl.arange(0, BLOCK_V)
    p_tile = p_state + dv[:, None] * DK + tl.arange(0, DK)[None, :]
    b_state = tl.load(p_tile)
    b_keys, b_values, log_decay = pending_rows(
        p_keys, p_values, p_decays, count, key_head, head, first, H, HV, DK, DV, BLOCK_P, BLOCK_V
    )
    new_state = b_state.to(tl.float32) * tl.exp(log_decay) + dot(b_values, b_keys)
    tl.store(p_tile, narrow(new_state, b_state.dtype))


@triton.jit
def arrive(p_counter, programs, new_count):
    """Counts this program as done with a counter; the last one of `programs` sets it to `new_count`."""
    tl.debug_barrier()  # a warp that lags behind has not read the counter yet
    before = tl.atomic_add(p_counter, ARRIVAL)
    if before // ARRIVAL == programs - 1:
        tl.store(p_counter, new_count)
