"""Launches: arguments as `treewy.ops`, checked, to the kernel's parameters."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from treewy.ops.api import KEY_EPS, GatedNorm, GDNDims, GDNParams, LayerState
from treewy.ops.cuda.build import kernel, tensor_map
from treewy.ops.device_window import DeviceWindow
from treewy.ops.support import unsupported_reason


class _Arguments(ctypes.Structure):
    """`Arguments` of verify.cu."""

    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in (
                "queries", "keys", "values", "gates", "a", "b", "z", "weight", "out", "end", "pending", "places",
                "slots", "requests", "rows", "ancestors", "longest", "neg_A", "dt_bias",
            )
        ]
        + [
            (name, ctypes.c_int64)
            for name in ("a_stride", "a_row", "b_stride", "b_row", "z_stride", "z_row")
        ]
        + [
            (name, ctypes.c_int)
            for name in ("ring", "capacity", "H", "HV", "fold_always")
        ]
        + [(name, ctypes.c_float) for name in ("beta_scale", "eps", "norm_eps")]
    )  # fmt: skip


def verify_mixed(
    state: LayerState,
    window: DeviceWindow,
    queries: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    *,
    fold_always: bool,
    norm: GatedNorm | None = None,
) -> Tensor:
    """All that follows the convolution, in one launch.

    Args:
        state: its ring holds the window's keys and values already.
        window: plan.
        queries: [B, T, H, dk] contiguous, from `treewy.ops.triton.convolve`.
        a: [B, T, HV] in the dtype of the queries or fp32, as b.
        b: [B, T, HV].
        params: of this layer.
        fold_always: as in `treewy.ops.verify`.
        norm: the gated norm that follows, fused; z in the dtype of the queries, its heads adjacent.

    Returns:
        [B, T, HV, dv] in the dtype of the queries.
    """
    dims = params.dims
    batch, rows = window.batch, window.rows
    reason = unsupported_reason(dims, state, rows, impl="cuda")
    if reason is not None:
        raise ValueError(f"the cuda implementation does not take this layer: {reason}")
    _expect("queries", queries, (batch, rows, dims.num_k_heads, dims.head_k_dim), state.keys.dtype, state)
    if not queries.is_contiguous():
        raise ValueError(f"queries have strides {queries.stride()}; they must be contiguous")
    if params.neg_A.dtype != torch.float32:
        raise ValueError(f"parameters are {params.neg_A.dtype}; these kernels take float32")
    gates = queries.dtype if a.dtype == queries.dtype else torch.float32
    _expect("a", a, (batch, rows, dims.num_v_heads), gates, state)
    _expect("b", b, (batch, rows, dims.num_v_heads), gates, state)
    out = torch.empty(batch, rows, dims.num_v_heads, dims.head_v_dim, dtype=queries.dtype, device=queries.device)
    arguments = _arguments(state, params.dims.num_k_heads)
    arguments.queries, arguments.a, arguments.b, arguments.out = (t.data_ptr() for t in (queries, a, b, out))
    arguments.a_stride, arguments.a_row, arguments.b_stride, arguments.b_row = *a.stride()[:2], *b.stride()[:2]
    if norm is not None:
        _expect("z", norm.z, tuple(out.shape), queries.dtype, state)
        weights = queries.dtype if norm.weight.dtype == queries.dtype else torch.float32
        _expect("norm.weight", norm.weight, (dims.head_v_dim,), weights, state)
        if norm.weight.data_ptr() % 16:
            raise ValueError(f"norm.weight begins at address {norm.weight.data_ptr()}; it must be a multiple of 16")
        if (
            norm.z.stride(2) != dims.head_v_dim
            or norm.z.stride(0) % 8
            or norm.z.stride(1) % 8
            or norm.z.data_ptr() % 16
        ):
            raise ValueError(
                f"z has strides {norm.z.stride()}; its heads must be adjacent and its rows 16 bytes aligned"
            )
        arguments.z, arguments.weight = norm.z.data_ptr(), norm.weight.data_ptr()
        arguments.z_stride, arguments.z_row = norm.z.stride()[:2]
        arguments.norm_eps = norm.eps
    arguments.slots, arguments.requests = window.slots.data_ptr(), window.requests.data_ptr()
    arguments.rows, arguments.longest = window.tree_rows.data_ptr(), window.longest.data_ptr()
    arguments.ancestors, arguments.places = window.ancestors.data_ptr(), window.places.data_ptr()
    arguments.neg_A, arguments.dt_bias = params.neg_A.data_ptr(), params.dt_bias.data_ptr()
    arguments.fold_always = fold_always
    arguments.beta_scale, arguments.eps = params.beta_scale, params.eps
    _launch(state, rows, batch, arguments, gates, norm)
    return out


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints. Arguments as `treewy.ops.fold`.

    Raises:
        ValueError: a layer that these kernels do not take.
    """
    heads, dv, dk = state.checkpoint.shape[1:]
    reason = unsupported_reason(GDNDims(state.keys.shape[2], heads, dk, dv), state, 1, impl="cuda")
    if reason is not None:
        raise ValueError(f"the cuda implementation does not take this layer: {reason}")
    if not slots.numel():
        return
    slots, requests = slots.long().contiguous(), requests.long().contiguous()
    arguments = _arguments(state, state.keys.shape[2])
    arguments.slots, arguments.requests = slots.data_ptr(), requests.data_ptr()
    arguments.fold_always, arguments.eps = True, KEY_EPS
    _launch(state, 0, slots.numel(), arguments, torch.float32, None)


def _arguments(state: LayerState, key_heads: int) -> _Arguments:
    arguments = _Arguments(
        keys=state.keys.data_ptr(),
        values=state.values.data_ptr(),
        gates=state.gates.data_ptr(),
        end=state.end.data_ptr(),
        pending=state.pending.data_ptr(),
    )
    arguments.ring, arguments.capacity = state.keys.shape[1], state.capacity
    arguments.H, arguments.HV = key_heads, state.checkpoint.shape[1]
    return arguments


def _launch(
    state: LayerState, rows: int, batch: int, arguments: _Arguments, gates: torch.dtype, norm: GatedNorm | None
) -> None:
    heads, dv, dk = state.checkpoint.shape[1:]
    defines = {
        "DK": dk,
        "DV": dv,
        "WINDOW": rows,
        "ROWS": state.capacity + rows,
        "BF16": int(state.keys.dtype == torch.bfloat16),
        "STATE32": int(state.checkpoint.dtype == torch.float32),
        "NORM": int(norm is not None),
        "GATES32": int(gates == torch.float32),
        "WEIGHT32": int(norm is not None and norm.weight.dtype == torch.float32),
    }
    pool = state.checkpoint
    slot = pool.stride(0) if pool.shape[0] > 1 else heads * dv * dk  # the stride of a single block may be anything
    with torch.cuda.device(pool.device):
        states = tensor_map(pool.data_ptr(), pool.dtype, *pool.shape, slot * pool.itemsize)
        run = kernel("verify", tuple(defines.items()), pool.device.index)
        run((heads, batch), ctypes.addressof(arguments), states.getPtr())


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, state: LayerState) -> None:
    device = state.checkpoint.device
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; this plan takes {shape} of {dtype} "
            f"on {device}"
        )
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")
