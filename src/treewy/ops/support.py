"""What the kernels take, as text: asked without importing them."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Literal

import torch

from treewy.ops.api import GDNDims, LayerState

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(
    dims: GDNDims, state: LayerState, rows: int, impl: Literal["triton", "cuda"] = "triton"
) -> str | None:
    """Why these kernels refuse windows of `rows` rows of such a layer; None where they take them."""
    if not _installed("triton"):
        return "the package triton is not installed"
    if impl == "cuda" and not _installed("cuda"):
        return "the package cuda-bindings is not installed"
    device = state.checkpoint.device
    if device.type != "cuda" and (impl == "cuda" or os.environ.get("TRITON_INTERPRET") != "1"):
        return f"the state is on {device}; kernels run on a CUDA device"
    if not 1 <= rows <= 64:
        return f"the window has {rows} rows; kernels take 1 to 64"
    reason = _not_for_triton(dims, state) if impl == "triton" else _not_for_cuda(dims, state, rows)
    if reason is not None:
        return reason
    return _layout_reason(dims, state)


def _layout_reason(dims: GDNDims, state: LayerState) -> str | None:
    heads, ring, inputs = dims.num_v_heads, state.keys.shape[1], state.conv.dtype
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "checkpoint": ((heads, dims.head_v_dim, dims.head_k_dim), state.checkpoint.dtype),
        "conv": ((dims.conv_width - 1, dims.conv_dim), inputs),
        "window_inputs": ((state.window_inputs.shape[1], dims.conv_dim), inputs),
        "window_rows": ((), torch.int32),
        "keys": ((ring, dims.num_k_heads, dims.head_k_dim), inputs),
        "values": ((ring, heads, dims.head_v_dim), inputs),
        "gates": ((ring, heads, 2), torch.float32),
        "end": ((), torch.int32),
        "pending": ((heads,), torch.int32),
    }
    for name, (shape, dtype) in expected.items():
        tensor: torch.Tensor = getattr(state, name)
        if tensor.shape[1:] != shape or tensor.dtype != dtype:
            return f"{name} is {list(tensor.shape)} of {tensor.dtype}; this layer's is {['_', *shape]} of {dtype}"
        pool = name in ("checkpoint", "conv")  # whose blocks may be any distance apart
        stride = 1
        for dim in range(tensor.dim() - 1, pool - 1, -1):
            if tensor.stride(dim) != stride and tensor.shape[dim] > 1:
                return f"{name} is not contiguous below its {'slots' if pool else 'first dimension'}"
            stride *= tensor.shape[dim]
    return None


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _not_for_triton(dims: GDNDims, state: LayerState) -> str | None:
    for name, size in (("head_k_dim", dims.head_k_dim), ("head_v_dim", dims.head_v_dim)):
        if size & (size - 1) or not 16 <= size <= 256:
            return f"{name} is {size}; kernels take powers of two from 16 to 256"
    if state.checkpoint.dtype not in _FLOATS or state.conv.dtype not in _FLOATS:
        return f"the state is {state.checkpoint.dtype} and inputs {state.conv.dtype}; kernels take bf16, fp16 and fp32"
    if not 1 <= state.capacity <= 64:
        return f"the history holds {state.capacity} rows; kernels take 1 to 64"
    return None


def _not_for_cuda(dims: GDNDims, state: LayerState, rows: int) -> str | None:
    capability = torch.cuda.get_device_capability(state.checkpoint.device)
    if capability < (9, 0):
        return f"the device has compute capability {capability[0]}.{capability[1]}; these kernels need 9.0"
    for name, size in (("head_k_dim", dims.head_k_dim), ("head_v_dim", dims.head_v_dim)):
        if size not in (64, 128, 256):
            return f"{name} is {size}; these kernels take 64, 128 and 256"
    inputs = state.conv.dtype
    if inputs not in (torch.bfloat16, torch.float16) or state.checkpoint.dtype not in (inputs, torch.float32):
        return (
            f"the state is {state.checkpoint.dtype} and inputs {inputs}; these kernels take inputs in bf16 or fp16, "
            "and a state in their dtype or fp32"
        )
    if state.capacity + rows > 96:
        return f"{state.capacity} rows of history and {rows} of a window are too many; these kernels take 96 together"
    pool = state.checkpoint
    needed = _shared_bytes(dims, pool.dtype, rows, state.capacity + rows)
    available = torch.cuda.get_device_properties(pool.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if needed > available:
        return (
            f"a state of {dims.head_v_dim} x {dims.head_k_dim} in {pool.dtype} with {state.capacity + rows} rows takes "
            f"{needed} bytes of shared memory; a block has {available}"
        )
    for name in ("checkpoint", "conv", "window_inputs", "keys", "values", "gates"):
        if getattr(state, name).data_ptr() % 16:
            return f"{name} begins at address {getattr(state, name).data_ptr()}; these kernels need a multiple of 16"
    for name, pool in (("checkpoint", state.checkpoint), ("conv", state.conv)):
        if pool.shape[0] > 1 and pool.stride(0) * pool.itemsize % 16:
            return (
                f"blocks of {name} are {pool.stride(0) * pool.itemsize} bytes apart; these kernels need multiples of 16"
            )
    return None


def _shared_bytes(dims: GDNDims, state_dtype: torch.dtype, rows: int, joint: int) -> int:
    """At most what cuda/verify.cu lays out there, 16 bytes for the rounding of each piece included."""
    dk, dv, wide = dims.head_k_dim, dims.head_v_dim, state_dtype == torch.float32
    kept = dims.conv_width - 1 - wide if rows else 0
    padded, padded_rows = -(-joint // 8) * 8, max(8, -(-rows // 8) * 8)
    square = padded if padded % 16 else padded + 8
    tiles = padded // 8
    pad = 0 if (wide if rows <= 8 else tiles <= 4) else 16
    key = 2 * dk + pad
    others = max(rows * key + joint * (2 * dv + pad), rows * (dv + 4) * 4)
    triangle = tiles * (tiles + 2) // 2 * 64 * 4
    known = max(triangle + rows * square * 4 + padded * 24 + rows * 8, kept * (2 * dk + dv) * 2)
    known = max(known + padded * 8 + rows * 8 + max(2, dk // 64) * rows * 4, triangle + padded_rows * square * 4)
    return dk * dv * state_dtype.itemsize + max(joint * key + others + known, (joint + padded_rows) * key) + 192
