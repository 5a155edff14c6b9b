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
    for name, tensor in state._asdict().items():
        inner = 1 if name in ("checkpoint", "conv") else 0
        if not tensor[(0,) * inner].is_contiguous():
            return f"{name} is not contiguous below its {'slots' if inner else 'first dimension'}"
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
    for name, pool in (("checkpoint", state.checkpoint), ("conv", state.conv)):
        if pool.data_ptr() % 16:
            return f"the pool of {name} begins at address {pool.data_ptr()}; these kernels need a multiple of 16"
        if pool.shape[0] > 1 and pool.stride(0) * pool.itemsize % 16:
            return (
                f"blocks of {name} are {pool.stride(0) * pool.itemsize} bytes apart; these kernels need multiples of 16"
            )
    return None


def _shared_bytes(dims: GDNDims, state_dtype: torch.dtype, rows: int, joint: int) -> int:
    """At most what cuda/verify.cu lays out there, 16 bytes for the rounding of each piece included."""
    dk, dv, kept = dims.head_k_dim, dims.head_v_dim, dims.conv_width - 1
    padded, padded_rows = -(-joint // 8) * 8, max(8, -(-rows // 8) * 8)
    square = padded if padded % 16 else padded + 8
    keys = joint * (2 * dk + 16)
    others = max(rows * (2 * dk + 16) + joint * (2 * dv + 16), rows * (dv + 4) * 4)
    return (
        dk * dv * state_dtype.itemsize
        + keys
        + others
        + max((padded + rows) * square * 4, kept * (2 * dk + dv) * 2)
        + padded * 32
        + padded_rows * 16
        + max(2, dk // 64) * rows * 4
        + 192
    )
