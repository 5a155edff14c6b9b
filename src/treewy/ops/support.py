"""What the Triton implementation takes, as text: asked without importing it."""

from __future__ import annotations

import importlib.util
import os

import torch

from treewy.ops.api import GDNDims, LayerState

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(dims: GDNDims, state: LayerState, rows: int) -> str | None:
    """Why the Triton implementation refuses windows of `rows` rows of such a layer; None where it takes them."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if state.checkpoint.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the state is on {state.checkpoint.device}; kernels run on a CUDA device"
    for name, size in (("head_k_dim", dims.head_k_dim), ("head_v_dim", dims.head_v_dim)):
        if size & (size - 1) or not 16 <= size <= 256:
            return f"{name} is {size}; kernels take powers of two from 16 to 256"
    if state.checkpoint.dtype not in _FLOATS or state.conv.dtype not in _FLOATS:
        return f"the state is {state.checkpoint.dtype} and inputs {state.conv.dtype}; kernels take bf16, fp16 and fp32"
    capacity = state.history_keys.shape[-3]
    if not 1 <= capacity <= 64:
        return f"the history holds {capacity} rows; kernels take 1 to 64"
    if not 1 <= rows <= 64:
        return f"the window has {rows} rows; kernels take 1 to 64"
    for name, tensor in zip(state._fields, state, strict=True):
        inner = 1 if name == "checkpoint" or name == "conv" else 0
        if not tensor[(0,) * inner].is_contiguous():
            return f"{name} is not contiguous below its {'slots' if inner else 'first dimension'}"
    return None
