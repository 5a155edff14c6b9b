"""What the kernels share: products in fp32 quality, rounding, gates.

Inside kernels `b_x` is a block of values, `p_x` a pointer or a block of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels on the CPU; its bf16 arithmetic is wrong, so operands are widened first."""

LOWEST_DECAY = tl.constexpr(-1e4)
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
def softplus(x):
    """log(1 + exp(x)), also where exp(x) is below the resolution of 1."""
    e = tl.exp(-tl.abs(x))
    one = 1.0 + e
    rounded = one - 1.0
    log1p = tl.where(rounded == 0, e, tl.log(one) * (e / tl.where(rounded == 0, 1.0, rounded)))
    return tl.maximum(x, 0.0) + log1p
