"""Copies blocks of an engine's pools to other blocks, in all layers, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["words"])
def copy_kernel(
    p_any,  # int32, gives the type
    p_pools,  # [layers], addresses
    p_source,  # [B], negative where nothing is copied
    p_target,  # [B]
    words,
    block_stride,
    BLOCK: tl.constexpr,
):
    """Grid: tiles; B; layers. A block is so many 32-bit words, `block_stride` of them apart."""
    source = tl.load(p_source + tl.program_id(1)).to(tl.int64)
    if source < 0:
        return
    target = tl.load(p_target + tl.program_id(1)).to(tl.int64)
    p_pool = tl.multiple_of(tl.load(p_pools + tl.program_id(2)).to(p_any.dtype), 16)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < words
    tl.store(p_pool + target * block_stride + at, tl.load(p_pool + source * block_stride + at, mask=there), mask=there)
