"""The kernels as functions: what is checked on the host, how a launch is cut, and nothing that waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from treewy.ops.api import KEY_EPS, GatedNorm, GDNDims, GDNParams, LayerState, check_paths
from treewy.ops.device_window import DeviceWindow
from treewy.ops.support import unsupported_reason
from treewy.ops.triton.kernel_commit import commit_kernel
from treewy.ops.triton.kernel_convolution import convolution_kernel
from treewy.ops.triton.kernel_verify import fold_kernel, verify_kernel


class Cut(NamedTuple):
    """How a head of `verify` is cut. It follows from shapes alone, so a captured graph keeps it."""

    block_t: int
    """Rows of a window, padded."""
    block_p: int
    """Pending rows, padded."""
    block_k: int
    """dk columns of the state that are in registers at a time."""
    warps: int
    registers: int | None = None
    """Most registers of a thread; None leaves it to the compiler."""


def cut(dims: GDNDims, rows: int, capacity: int, state_dtype: torch.dtype) -> Cut:
    """The cut for windows of `rows` rows: about 16 KiB of the state at a time."""
    block_t, block_p = (max(16, triton.next_power_of_2(size)) for size in (rows, capacity))
    block_k = min(dims.head_k_dim, max(16, 16384 // (dims.head_v_dim * state_dtype.itemsize)))
    warps = 4 if dims.head_v_dim <= 128 and max(block_t, block_p) == 16 else 8
    return Cut(block_t, block_p, block_k, warps)


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
    """The convolution, then `verify_mixed`. Arguments, result and errors as `treewy.ops.verify`."""
    _check_mixed(window, a, b, params, norm)  # before anything is written
    out = outputs(out, x, window, params.dims)
    queries = convolve(state, window, x, params)
    return verify_mixed(state, window, queries, a, b, params, fold_always=fold_always, norm=norm, out=out)


def convolve(state: LayerState, window: DeviceWindow, x: Tensor, params: GDNParams) -> Tensor:
    """The tree convolution alone: keys and values go into the ring, inputs into the stash.

    Returns:
        The queries, [B, T, H, dk] of x's dtype, zero in padding.
    """
    dims = params.dims
    _check_inputs("x", x, window, dims.conv_dim)
    _check_layer(state, window, params, x)
    queries = x.new_empty(window.batch, window.rows, dims.num_k_heads, dims.head_k_dim)
    tokens = window.batch * window.rows
    # Few rows are spread over the device. Of many, a program takes two and a thread 16 channels, so that addresses and
    # taps serve more products.
    rows = 1 if tokens <= 128 else 2
    block_c = 512
    grid = (triton.cdiv(dims.conv_dim, block_c), triton.cdiv(tokens, rows))
    convolution_kernel[grid](
        x, queries, state.keys, state.values, state.conv, state.window_inputs, state.window_rows, state.end,
        state.pending, window.places, params.taps, params.conv_bias, window.slots, window.requests, window.tree_rows,
        window.conv_ancestors, window.batch, window.rows, state.window_inputs.shape[1], state.keys.shape[1],
        x.stride(0), x.stride(1), state.conv.stride(0), C=dims.conv_dim, KEY=dims.key_dim, HV=dims.num_v_heads,
        HEADS=triton.next_power_of_2(dims.num_v_heads), WIDTH=dims.conv_width, BIAS=params.conv_bias is not None,
        ROWS=rows, BLOCK_C=block_c, num_warps=2 // rows,
    )  # fmt: skip
    return queries


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
    shape: Cut | None = None,
) -> Tensor:
    """All that follows the convolution, in one launch.

    queries is [B, T, H, dk] from `convolve`, which has put keys and values into the ring; `shape` replaces the cut that
    `cut` chooses; the rest is as in `treewy.ops.verify`.
    """
    dims = params.dims
    _check_inputs("queries", queries.flatten(2), window, dims.key_dim)
    _check_mixed(window, a, b, params, norm)
    _check_layer(state, window, params, queries)
    out = outputs(out, queries, window, dims)
    z = out if norm is None else norm.z
    shape = shape or cut(dims, window.rows, state.capacity, state.checkpoint.dtype)
    verify_kernel[dims.num_v_heads, window.batch](
        queries.contiguous(), a, b, z, norm.weight if norm else out, out, state.checkpoint, state.keys, state.values,
        state.gates, state.end, state.pending, window.slots, window.requests, window.tree_rows, window.ancestors,
        window.longest, params.neg_A, params.dt_bias, window.rows, state.keys.shape[1], state.capacity, a.stride(0),
        a.stride(1), b.stride(0), b.stride(1), z.stride(0), z.stride(1), state.checkpoint.stride(0),
        float(params.beta_scale), KEY_EPS, float(norm.eps if norm else 0.0), H=dims.num_k_heads, HV=dims.num_v_heads,
        DK=dims.head_k_dim, DV=dims.head_v_dim, BLOCK_T=shape.block_t, BLOCK_P=shape.block_p, BLOCK_K=shape.block_k,
        FOLD_ALWAYS=fold_always, NORM=norm is not None, num_warps=shape.warps, maxnreg=shape.registers,
    )  # fmt: skip
    return out


def outputs(out: Tensor | None, like: Tensor, window: DeviceWindow, dims: GDNDims) -> Tensor:
    """A tensor for the outputs of a window in the dtype of `like`: the one that is given, if it fits."""
    shape = (window.batch, window.rows, dims.num_v_heads, dims.head_v_dim)
    if out is None:
        return like.new_empty(shape)
    there = (out.shape, out.dtype, out.device) == (shape, like.dtype, like.device)
    if not there or not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} on {out.device}, with strides {out.stride()} at address "
            f"{out.data_ptr()}; this plan takes {shape} of {like.dtype} on {like.device}, contiguous, at a multiple of "
            "16"
        )
    return out


def commit(
    state: LayerState,
    window: DeviceWindow,
    path: Tensor,
    accepted: Tensor,
    *,
    pools: Tensor | None = None,
    full: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Accepts paths in all layers, in one launch. Arguments as `treewy.ops.commit`.

    What is wrong with a path is seen on the device: that request is left as it was, and `DeviceWindow.check` raises.

    Args:
        state: of one layer, or of all layers with a leading dimension.
        window: plan.
        path: [B, P] integer.
        accepted: [B] integer.
        pools: [layers] int64 addresses of the layers' convolution inputs where they are tensors of their own, all like
            `state.conv[0]` and on 16 bytes; `state.conv` and `state.checkpoint` may be of one layer then.
        full: [B] rows of each path up to the end of a block of the prefix cache, and [B] that block, which takes the
            convolution inputs there; negative for none.
    """
    if state.checkpoint.dim() == 4:
        commit(LayerState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    check_paths(window.batch, path, accepted)
    layers, num_requests, ring, heads = state.gates.shape[:4]
    kept, channels = state.conv.shape[2:]
    block = 2048
    commit_kernel[triton.cdiv(channels, block), window.batch, layers](
        state.conv, window.errors if pools is None else pools, state.window_inputs, state.window_rows, state.keys,
        state.values, state.gates, state.end, state.pending, window.slots, window.requests, window.tree_rows,
        window.parents, path.contiguous(), accepted.contiguous(), window.errors,
        *(full or (window.errors, window.errors)), window.rows, path.shape[1],
        state.window_inputs.shape[2], ring, num_requests, state.conv.stride(0), state.conv.stride(1), C=channels,
        KEPT=kept, KEY=state.keys.shape[3] * state.keys.shape[4], HV=heads,
        BLOCK_S=triton.next_power_of_2(path.shape[1]), BLOCK_H=triton.next_power_of_2(heads), BLOCK=block,
        POOLS=pools is not None, FULL=full is not None, num_warps=4,
    )  # fmt: skip


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints. Arguments as `treewy.ops.fold`."""
    if not slots.numel():
        return
    heads, dv, dk = state.checkpoint.shape[1:]
    key_heads, kept = state.keys.shape[2], state.conv.shape[1]
    dims = GDNDims(key_heads, heads, dk, dv, kept + 1)
    shape = cut(dims, 1, state.capacity, state.checkpoint.dtype)
    fold_kernel[heads, slots.numel()](
        state.checkpoint, state.keys, state.values, state.gates, state.end, state.pending, slots.contiguous(),
        requests.contiguous(), state.keys.shape[1], state.checkpoint.stride(0), KEY_EPS, H=key_heads, HV=heads, DK=dk,
        DV=dv, BLOCK_P=shape.block_p, BLOCK_K=shape.block_k, num_warps=shape.warps,
    )  # fmt: skip


def _check_inputs(name: str, tensor: Tensor, window: DeviceWindow, columns: int) -> None:
    if tensor.shape != (window.batch, window.rows, columns):
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; a plan for {window.batch} windows of {window.rows} rows takes "
            f"[{window.batch}, {window.rows}, {columns}]"
        )
    if tensor.stride(2) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(2)} in its last dimension; it must be contiguous there")


def _check_mixed(window: DeviceWindow, a: Tensor, b: Tensor, params: GDNParams, norm: GatedNorm | None) -> None:
    dims = params.dims
    _check_inputs("a", a, window, dims.num_v_heads)
    _check_inputs("b", b, window, dims.num_v_heads)
    if norm is None:
        return
    z, shape = norm.z, (window.batch, window.rows, dims.num_v_heads, dims.head_v_dim)
    if z.shape != shape or z.stride(-1) != 1 or z.stride(-2) != dims.head_v_dim:
        raise ValueError(f"z is {tuple(z.shape)} with strides {z.stride()}; it is {shape}, heads adjacent")


def check_fit(state: LayerState, window: DeviceWindow, params: GDNParams) -> None:
    """The plan must be for the layer's convolution, and its windows fit the state.

    Raises:
        ValueError: as said.
    """
    max_rows = state.window_inputs.shape[1]
    if window.rows > max_rows:
        raise ValueError(
            f"a window of {window.rows} rows does not fit a stash of {max_rows}: truncate the trees or allocate more"
        )
    width = window.conv_ancestors.shape[2] + 1
    if width != params.dims.conv_width:
        raise ValueError(
            f"the plan is for a convolution of width {width}, the layer has {params.dims.conv_width}: plan with that"
        )


def _check_layer(state: LayerState, window: DeviceWindow, params: GDNParams, x: Tensor) -> None:
    check_fit(state, window, params)
    if x.dtype != state.conv.dtype:
        raise ValueError(
            f"x is {x.dtype} and the state keeps inputs in {state.conv.dtype}: convert x, or allocate in its dtype"
        )
    reason = unsupported_reason(params.dims, state, window.rows, window.impl)
    if reason is not None:
        raise ValueError(f"the {window.impl} implementation does not take this layer: {reason}")
