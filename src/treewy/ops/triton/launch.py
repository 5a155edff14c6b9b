"""The kernels as functions: what is checked on the host, how a launch is cut, and nothing that waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from treewy.ops.api import GatedNorm, GDNDims, GDNParams, LayerState
from treewy.ops.support import unsupported_reason
from treewy.ops.triton.kernel_commit import commit_kernel, fold_kernel
from treewy.ops.triton.kernel_convolution import convolution_kernel
from treewy.ops.triton.kernel_verify import verify_kernel
from treewy.ops.triton.window import DeviceWindow


class Cut(NamedTuple):
    """How `verify` is cut into programs. It follows from shapes alone, so a captured graph keeps it."""

    block_t: int
    """Rows of a window, padded."""
    block_p: int
    """Rows of a history, padded."""
    block_v: int
    """dv rows of a state that one program takes."""
    fold_v: int
    """dv rows of a state that it folds at a time."""
    warps: int
    registers: int | None = None
    """Most registers of a thread; None leaves it to the compiler."""


def cut(dims: GDNDims, rows: int, history: int, state_dtype: torch.dtype, *, whole_head: bool) -> Cut:
    """The cut for windows of `rows` rows: a tile of the state is at most 32 KiB, unless a norm needs the whole head."""
    block_t = max(16, triton.next_power_of_2(rows))
    block_v = min(dims.head_v_dim, max(16, 32768 // (dims.head_k_dim * state_dtype.itemsize)))
    if whole_head:
        block_v = dims.head_v_dim
    warps = 8 if block_v * dims.head_k_dim * state_dtype.itemsize > 16384 or block_t > 16 else 4
    fold_v = min(block_v, max(16, 4096 // dims.head_k_dim))
    return Cut(block_t, max(16, triton.next_power_of_2(history)), block_v, fold_v, warps)


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
) -> Tensor:
    """Runs a window through a layer. Arguments, result and errors as `treewy.ops.verify`; two launches."""
    mixed = convolve(state, window, x, params)
    return verify_mixed(state, window, mixed, a, b, params, fold_always=fold_always, norm=norm)


def convolve(state: LayerState, window: DeviceWindow, x: Tensor, params: GDNParams) -> Tensor:
    """The tree convolution alone: [B, T, C] of x's dtype, zero in padding; the inputs go into the stash."""
    dims = params.dims
    _check_inputs("x", x, window, dims.conv_dim)
    _check_layer(state, window, params, x)
    mixed = torch.empty(window.batch, window.rows, dims.conv_dim, dtype=x.dtype, device=x.device)
    block_r = triton.next_power_of_2(min(window.rows, 16))
    block_c = max(64, 2048 // block_r)
    grid = (triton.cdiv(dims.conv_dim, block_c), window.batch, triton.cdiv(window.rows, block_r))
    convolution_kernel[grid](
        x, mixed, state.conv, state.window_inputs, params.taps, params.conv_bias, window.slots, window.requests,
        window.tree_rows, window.conv_ancestors, window.rows, state.window_inputs.shape[1], x.stride(0), x.stride(1),
        state.conv.stride(0), C=dims.conv_dim, WIDTH=dims.conv_width, BIAS=params.conv_bias is not None,
        BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return mixed


def verify_mixed(
    state: LayerState,
    window: DeviceWindow,
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    *,
    fold_always: bool,
    norm: GatedNorm | None = None,
    shape: Cut | None = None,
) -> Tensor:
    """All that follows the convolution, in one launch.

    mixed is [B, T, C] from `convolve`; `shape` replaces the cut that `cut` chooses; the rest is as in `verify`.
    """
    dims = params.dims
    _check_inputs("mixed", mixed, window, dims.conv_dim)
    _check_inputs("a", a, window, dims.num_v_heads)
    _check_inputs("b", b, window, dims.num_v_heads)
    _check_layer(state, window, params, mixed)
    out = torch.empty(
        window.batch, window.rows, dims.num_v_heads, dims.head_v_dim, dtype=mixed.dtype, device=mixed.device
    )
    z = mixed
    if norm is not None:
        z = norm.z
        if z.shape != out.shape or z.stride(-1) != 1 or z.stride(-2) != dims.head_v_dim:
            raise ValueError(
                f"z is {tuple(z.shape)} with strides {z.stride()}; it is {tuple(out.shape)}, heads adjacent"
            )
    capacity = state.history_keys.shape[1]
    shape = shape or cut(dims, window.rows, capacity, state.checkpoint.dtype, whole_head=norm is not None)
    if norm is not None and shape.block_v != dims.head_v_dim:
        raise ValueError(f"a gated norm needs whole heads of {dims.head_v_dim}; the cut takes {shape.block_v} rows")
    grid = (dims.num_v_heads * (dims.head_v_dim // shape.block_v), window.batch)
    verify_kernel[grid](
        mixed, a, b, z, norm.weight if norm else mixed, out, state.checkpoint, state.window_keys, state.window_values,
        state.window_decays, state.window_rows, state.history_keys, state.history_values, state.history_decays,
        state.pending, window.slots, window.requests, window.tree_rows, window.ancestors, window.longest, params.neg_A,
        params.dt_bias, window.rows, state.window_inputs.shape[1], capacity, mixed.stride(0), mixed.stride(1),
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), z.stride(0), z.stride(1), state.checkpoint.stride(0),
        float(params.beta_scale), float(params.eps), float(norm.eps if norm else 0.0), H=dims.num_k_heads,
        HV=dims.num_v_heads, DK=dims.head_k_dim, DV=dims.head_v_dim, BLOCK_T=shape.block_t, BLOCK_P=shape.block_p,
        BLOCK_V=shape.block_v, FOLD_V=shape.fold_v, FOLD_ALWAYS=fold_always, NORM=norm is not None,
        num_warps=shape.warps, maxnreg=shape.registers,
    )  # fmt: skip
    return out


def commit(state: LayerState, window: DeviceWindow, path: Tensor, accepted: Tensor) -> None:
    """Accepts paths in all layers, in one launch. Arguments as `treewy.ops.commit`.

    What is wrong with a path is seen on the device: that request is left as it was, and `DeviceWindow.check` raises.
    """
    if state.checkpoint.dim() == 4:
        commit(LayerState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    if path.dim() != 2 or path.shape[0] != window.batch or accepted.shape != (window.batch,):
        raise ValueError(
            f"path {tuple(path.shape)} and accepted {tuple(accepted.shape)} do not fit a round of {window.batch} "
            f"requests: [{window.batch}, P] and [{window.batch}]"
        )
    if path.is_floating_point() or accepted.is_floating_point():
        raise ValueError(f"path is {path.dtype} and accepted {accepted.dtype}; both are integers")
    layers, num_requests, capacity = state.history_decays.shape[:3]
    keys, values = (t.shape[3] * t.shape[4] for t in (state.history_keys, state.history_values))
    kept, channels = state.conv.shape[2:]
    block_s = triton.next_power_of_2(path.shape[1])
    block = max(64, 4096 // block_s)
    grid = (sum(triton.cdiv(columns, block) for columns in (keys, values, channels)), window.batch, layers)
    commit_kernel[grid](
        state.conv, state.window_inputs, state.window_keys, state.window_values, state.window_decays,
        state.window_rows, state.history_keys, state.history_values, state.history_decays, state.pending, window.slots,
        window.requests, window.tree_rows, window.parents, path.contiguous(), accepted.contiguous(), window.errors,
        window.rows, path.shape[1], state.window_inputs.shape[2], capacity, path.shape[1], num_requests,
        state.conv.stride(0), state.conv.stride(1), C=channels, KEPT=kept, KEYS=keys, VALUES=values,
        HV=state.history_decays.shape[3], BLOCK_S=block_s,
        BLOCK_H=triton.next_power_of_2(state.history_decays.shape[3]), BLOCK=block, num_warps=4,
    )  # fmt: skip


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints. Arguments as `treewy.ops.fold`."""
    heads, dv, dk = state.checkpoint.shape[1:]
    dims = GDNDims(state.history_keys.shape[2], heads, dk, dv, state.conv.shape[1] + 1)
    shape = cut(dims, 1, state.history_keys.shape[1], state.checkpoint.dtype, whole_head=False)
    grid = (heads * (dv // shape.fold_v), slots.numel())
    if not slots.numel():
        return
    fold_kernel[grid](
        state.checkpoint, state.history_keys, state.history_values, state.history_decays, state.pending,
        slots.contiguous(), requests.contiguous(), state.history_keys.shape[1], state.checkpoint.stride(0),
        H=dims.num_k_heads, HV=heads, DK=dk, DV=dv, BLOCK_P=shape.block_p, BLOCK_V=shape.fold_v, num_warps=4,
    )  # fmt: skip


def _check_inputs(name: str, tensor: Tensor, window: DeviceWindow, columns: int) -> None:
    if tensor.shape != (window.batch, window.rows, columns):
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; a plan for {window.batch} windows of {window.rows} rows takes "
            f"[{window.batch}, {window.rows}, {columns}]"
        )
    if tensor.stride(2) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(2)} in its last dimension; it must be contiguous there")


def _check_layer(state: LayerState, window: DeviceWindow, params: GDNParams, x: Tensor) -> None:
    max_rows = state.window_inputs.shape[1]
    if window.rows > max_rows:
        raise ValueError(
            f"a window of {window.rows} rows does not fit a stash of {max_rows}: truncate the trees or allocate more"
        )
    if x.dtype != state.conv.dtype:
        raise ValueError(
            f"x is {x.dtype} and the state keeps inputs in {state.conv.dtype}: convert x, or allocate in its dtype"
        )
    reason = unsupported_reason(params.dims, state, window.rows)
    if reason is not None:
        raise ValueError(f"the triton implementation does not take this layer: {reason}")
