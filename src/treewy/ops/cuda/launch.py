"""Launches: arguments as `treewy.ops`, checked, to the kernel's parameters."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from treewy.ops.api import KEY_EPS, GatedNorm, GDNDims, GDNParams, LayerState
from treewy.ops.cuda.build import kernel, tensor_map
from treewy.ops.device_window import DeviceWindow
from treewy.ops.support import unsupported_reason
from treewy.ops.triton import check_fit, convolve, outputs

FUSED_ROWS = 8
"""Wider windows are convolved by a launch of their own: in this one, value heads that share keys each convolve them."""


class _Arguments(ctypes.Structure):
    """`Arguments` of verify.cu."""

    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in (
                "x", "conv", "window_inputs", "window_rows", "taps", "bias", "conv_ancestors", "queries", "places",
                "keys", "values", "gates", "a", "b", "z", "weight", "out", "end", "pending", "slots", "requests",
                "rows", "ancestors", "longest", "neg_A", "dt_bias",
            )
        ]
        + [
            (name, ctypes.c_int64)
            for name in (
                "x_stride", "x_row", "conv_stride", "a_stride", "a_row", "b_stride", "b_row", "z_stride", "z_row",
            )
        ]
        + [
            (name, ctypes.c_int)
            for name in ("max_rows", "ring", "capacity", "H", "HV", "fold_always")
        ]
        + [(name, ctypes.c_float) for name in ("beta_scale", "eps", "norm_eps")]
    )  # fmt: skip


def verify(
    state: LayerState,
    window: DeviceWindow,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    *,
    fold_always: bool,
    norm: GatedNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A window through a layer. Arguments, result and errors as `treewy.ops.verify`.

    One launch; or two, of more than `FUSED_ROWS` rows. Rows of x and of z, whose heads are adjacent, are 16 bytes
    aligned; a and b are in the dtype of x, or fp32.
    """
    if window.rows > FUSED_ROWS:
        _check(state, window, x, a, b, params, norm)  # before anything is written
        out = outputs(out, x, window, params.dims)
        queries = convolve(state, window, x, params)
        arguments = _after_convolution(window, queries)
        return _verify(state, window, queries, a, b, params, arguments, fold_always, norm, out, conv_width=0)
    dims = params.dims
    _expect("x", x, (window.batch, window.rows, dims.conv_dim), state.conv.dtype, state)
    _expect_aligned("x", x)
    check_fit(state, window, params)
    _check(state, window, x, a, b, params, norm)
    arguments = _Arguments(
        x=x.data_ptr(),
        conv=state.conv.data_ptr(),
        window_inputs=state.window_inputs.data_ptr(),
        window_rows=state.window_rows.data_ptr(),
        taps=params.taps.data_ptr(),
        bias=0 if params.conv_bias is None else params.conv_bias.data_ptr(),
        conv_ancestors=window.conv_ancestors.data_ptr(),
    )
    arguments.x_stride, arguments.x_row = x.stride()[:2]
    arguments.conv_stride, arguments.max_rows = state.conv.stride(0), state.window_inputs.shape[1]
    return _verify(state, window, x, a, b, params, arguments, fold_always, norm, out, conv_width=dims.conv_width)


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
    out: Tensor | None = None,
) -> Tensor:
    """What follows the convolution, alone: beside other kernels that leave it out.

    Args:
        state: its ring holds the window's keys and values already.
        window: plan.
        queries: [B, T, H, dk] contiguous, after the convolution.
        a: [B, T, HV] in the dtype of the queries or fp32, as b.
        b: [B, T, HV].
        params: of this layer.
        fold_always: as in `treewy.ops.verify`.
        norm: as there.
        out: as there.

    Returns:
        [B, T, HV, dv] in the dtype of the queries.
    """
    dims = params.dims
    shape = (window.batch, window.rows, dims.num_k_heads, dims.head_k_dim)
    _expect("queries", queries, shape, state.keys.dtype, state)
    if not queries.is_contiguous():
        raise ValueError(f"queries have strides {queries.stride()}; they must be contiguous")
    _check(state, window, queries, a, b, params, norm)
    arguments = _after_convolution(window, queries)
    return _verify(state, window, queries, a, b, params, arguments, fold_always, norm, out, conv_width=0)


def _after_convolution(window: DeviceWindow, queries: Tensor) -> _Arguments:
    return _Arguments(queries=queries.data_ptr(), places=window.places.data_ptr())


def _verify(
    state: LayerState,
    window: DeviceWindow,
    like: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    arguments: _Arguments,
    fold_always: bool,
    norm: GatedNorm | None,
    out: Tensor | None,
    *,
    conv_width: int,
) -> Tensor:
    out = outputs(out, like, window, params.dims)
    _fill(arguments, state)
    arguments.a, arguments.b, arguments.out = a.data_ptr(), b.data_ptr(), out.data_ptr()
    arguments.a_stride, arguments.a_row, arguments.b_stride, arguments.b_row = *a.stride()[:2], *b.stride()[:2]
    if norm is not None:
        arguments.z, arguments.weight = norm.z.data_ptr(), norm.weight.data_ptr()
        arguments.z_stride, arguments.z_row = norm.z.stride()[:2]
        arguments.norm_eps = norm.eps
    arguments.slots, arguments.requests = window.slots.data_ptr(), window.requests.data_ptr()
    arguments.rows, arguments.longest = window.tree_rows.data_ptr(), window.longest.data_ptr()
    arguments.ancestors = window.ancestors.data_ptr()
    arguments.neg_A, arguments.dt_bias = params.neg_A.data_ptr(), params.dt_bias.data_ptr()
    arguments.fold_always = fold_always
    arguments.beta_scale, arguments.eps = params.beta_scale, params.eps
    _launch(state, window.rows, window.batch, arguments, a.dtype, norm, conv_width)
    return out


def _check(
    state: LayerState,
    window: DeviceWindow,
    like: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    norm: GatedNorm | None,
) -> None:
    dims = params.dims
    reason = unsupported_reason(dims, state, window.rows, impl="cuda")
    if reason is not None:
        raise ValueError(f"the cuda implementation does not take this layer: {reason}")
    for name, multiple in (("taps", 16), ("conv_bias", 16), ("neg_A", 4), ("dt_bias", 4)):
        tensor = getattr(params, name)
        if tensor is not None and not (
            tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % multiple == 0
        ):
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()} at address {tensor.data_ptr()}; these "
                f"kernels take float32, contiguous, at a multiple of {multiple}: as GDNParams.of makes it"
            )
    gates = like.dtype if a.dtype == like.dtype else torch.float32
    _expect("a", a, (window.batch, window.rows, dims.num_v_heads), gates, state)
    _expect("b", b, (window.batch, window.rows, dims.num_v_heads), gates, state)
    if norm is None:
        return
    _expect("z", norm.z, (window.batch, window.rows, dims.num_v_heads, dims.head_v_dim), like.dtype, state)
    _expect_aligned("z", norm.z)
    if norm.z.stride(2) != dims.head_v_dim:
        raise ValueError(f"z has strides {norm.z.stride()}; its heads must be adjacent")
    weights = like.dtype if norm.weight.dtype == like.dtype else torch.float32
    _expect("norm.weight", norm.weight, (dims.head_v_dim,), weights, state)
    if norm.weight.data_ptr() % 16:
        raise ValueError(f"norm.weight begins at address {norm.weight.data_ptr()}; it must be a multiple of 16")


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints. Arguments as `treewy.ops.fold`.

    Raises:
        ValueError: a layer that these kernels do not take, or slots and requests that differ in length or device.
    """
    heads, dv, dk = state.checkpoint.shape[1:]
    dims = GDNDims(state.keys.shape[2], heads, dk, dv, state.conv.shape[1] + 1)
    reason = unsupported_reason(dims, state, 1, impl="cuda")
    if reason is not None:
        raise ValueError(f"the cuda implementation does not take this layer: {reason}")
    for name, tensor in (("slots", slots), ("requests", requests)):
        if tensor.shape != slots.shape or slots.dim() != 1 or tensor.device != state.checkpoint.device:
            raise ValueError(
                f"{name} are {list(tensor.shape)} on {tensor.device}; both are [n] on {state.checkpoint.device}"
            )
    if not slots.numel():
        return
    slots, requests = slots.long().contiguous(), requests.long().contiguous()
    arguments = _Arguments()
    _fill(arguments, state)
    arguments.slots, arguments.requests = slots.data_ptr(), requests.data_ptr()
    arguments.fold_always, arguments.eps = True, KEY_EPS
    _launch(state, 0, slots.numel(), arguments, torch.float32, None, 0)


def _fill(arguments: _Arguments, state: LayerState) -> None:
    for name in ("keys", "values", "gates", "end", "pending"):
        setattr(arguments, name, getattr(state, name).data_ptr())
    arguments.ring, arguments.H = state.keys.shape[1:3]
    arguments.capacity, arguments.HV = state.capacity, state.checkpoint.shape[1]


def _launch(
    state: LayerState,
    rows: int,
    batch: int,
    arguments: _Arguments,
    gates: torch.dtype,
    norm: GatedNorm | None,
    conv_width: int,
) -> None:
    heads, dv, dk = state.checkpoint.shape[1:]
    defines = {
        "DK": dk,
        "DV": dv,
        "WINDOW": rows,
        "ROWS": state.capacity + rows,
        "CONV": conv_width,
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
        run((heads // arguments.H, arguments.H, batch), ctypes.addressof(arguments), states.getPtr())


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, state: LayerState) -> None:
    device = state.checkpoint.device
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; this plan takes {shape} of {dtype} "
            f"on {device}"
        )
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")


def _expect_aligned(name: str, tensor: Tensor) -> None:
    """Requests and rows begin at multiples of 16 bytes."""
    if tensor.data_ptr() % 16 or any(stride * tensor.itemsize % 16 for stride in tensor.stride()[:2]):
        raise ValueError(
            f"{name} begins at address {tensor.data_ptr()}, with strides {tensor.stride()}; its rows must be 16 bytes "
            "aligned"
        )
