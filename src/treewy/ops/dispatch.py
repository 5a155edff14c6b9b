"""The operations with a choice of implementation: made once a round, at `plan`, and never changed silently.

A `Window` belongs to the torch implementation and a `DeviceWindow` to the kernels; `verify` and `commit` run what the
plan was made for. Kernels are imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args, overload

from torch import Tensor

from treewy.ops import api, torch_impl
from treewy.ops.api import GatedNorm, GDNParams, LayerState, Window
from treewy.ops.device_window import DeviceWindow
from treewy.tree import TreeBatch

Impl = Literal["torch", "triton", "cuda"]
"""`torch`: any device and dtype. `triton`, `cuda`: a CUDA device; `unsupported_reason` says what they do not take."""


@overload
def plan(
    trees: TreeBatch,
    slots: Tensor,
    requests: Tensor,
    *,
    num_slots: int,
    num_requests: int,
    impl: Literal["torch"] = "torch",
) -> Window: ...
@overload
def plan(
    trees: TreeBatch,
    slots: Tensor,
    requests: Tensor,
    *,
    num_slots: int,
    num_requests: int,
    impl: Literal["triton", "cuda"],
) -> DeviceWindow: ...
@overload
def plan(
    trees: TreeBatch, slots: Tensor, requests: Tensor, *, num_slots: int, num_requests: int, impl: Impl
) -> Window | DeviceWindow: ...
def plan(
    trees: TreeBatch, slots: Tensor, requests: Tensor, *, num_slots: int, num_requests: int, impl: Impl = "torch"
) -> Window | DeviceWindow:
    """Plans a round: once a round, for all layers.

    Args:
        trees: one tree a request, on the device of the state.
        slots: [B] integer, block of each request in the pool; negative for padding, whose outputs are zero and which
            touches nothing.
        requests: [B] integer, index of each running request; ignored for padding.
        num_slots: blocks in the pool.
        num_requests: R.
        impl: what `verify` and `commit` of this round run; "cuda" has Triton's commit. A CUDA graph
            needs a `DeviceWindow` that stays, filled anew by its `update`; what is made here is for one round.

    Raises:
        ValueError: an unknown implementation, shapes that differ, or a slot or running request that appears twice.
        IndexError: a slot or index past its end.
    """
    check_impl(impl)
    window = api.plan(trees, slots, requests, num_slots=num_slots, num_requests=num_requests)
    if impl == "torch":
        return window
    batch, rows = trees.parents.shape
    fixed = DeviceWindow.empty(
        batch,
        rows,
        num_slots=num_slots,
        num_requests=num_requests,
        device=trees.parents.device,
        conv_width=trees.conv_ancestors.shape[2] + 1,
        impl=impl,
    )
    fixed.update(trees, slots, requests)
    return fixed


def verify(
    state: LayerState,
    window: Window | DeviceWindow,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    *,
    fold_always: bool,
    norm: GatedNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Runs a window through a layer: outputs of every row, and what `commit` needs of each.

    One triangular system gives the pseudo-values of pending rows and window rows together. The checkpoint is written
    only where pending rows are folded into it: when the longest path of this window would not fit besides them, or
    always (`fold_always`, the mode `reconstruct`). The outputs are those of the unfolded state in any case.

    Another window may take this one's place: what counts is the last one before `commit`. Running the same window again
    gives the same result, up to the rounding of the checkpoint where the first run folded.

    Args:
        state: of this layer; rows of the window are written, the checkpoint changes in a fold.
        window: from `plan`.
        x: [B, T, C] inputs of the convolution (q, k, v side by side), in the dtype of `state.conv`.
        a: [B, T, HV] decay gate before softplus.
        b: [B, T, HV] write gate before the sigmoid.
        params: of this layer.
        fold_always: fold whatever is pending.
        norm: the gated norm that follows, if it is to be applied to the outputs before they are rounded.
        out: where the outputs are to be written, contiguous; a new tensor if None.

    Returns:
        [B, T, HV, dv] in the dtype of x; zero in padding requests and padding rows.

    Raises:
        ValueError: shapes or dtypes that do not fit, more rows than the state has room for, a tree deeper than the
            capacity (with kernels: said by the check of the commit), or a layer that the implementation does not take.
            Nothing is written then.
    """
    if isinstance(window, Window):
        made = torch_impl.verify(state, window, x, a, b, params, fold_always=fold_always, norm=norm)
        return made if out is None else out.copy_(made)
    run: Callable[..., Tensor] = _kernels(window.impl).verify
    return run(state, window, x, a, b, params, fold_always=fold_always, norm=norm, out=out)


def commit(state: LayerState, window: Window | DeviceWindow, path: Tensor, accepted: Tensor) -> None:
    """Accepts a path: its rows become pending, its inputs the convolution's committed ones. A chain moves no row.

    Args:
        state: of one layer, or of all layers with a leading dimension on every tensor.
        window: the plan that `verify` ran last for these requests, in every layer.
        path: [B, P] integer, accepted rows, root first; entries past `accepted` are ignored.
        accepted: [B] integer, length of each path, at least 1: the root is always accepted.

    Raises:
        ValueError: a length outside 1 .. P, a path that does not start at the root and go from parent to child, a
            window that was not verified or is committed already, or a history without room. Nothing is written then.
            A `DeviceWindow` does not wait for the device: its `check` raises this.
    """
    if isinstance(window, Window):
        torch_impl.commit(state, window, path, accepted)
    else:
        _kernels("triton").commit(state, window, path, accepted)


def fold(state: LayerState, slots: Tensor, requests: Tensor, *, impl: Impl = "torch") -> None:
    """Folds all pending rows of these requests into their checkpoints: before anything else reads the block.

    Args:
        state: of one layer.
        slots: [n] integer blocks of the requests.
        requests: [n] integer indices of the running requests.
        impl: what runs.

    Raises:
        ValueError: an unknown implementation.
    """
    check_impl(impl)
    if impl == "torch":
        torch_impl.fold(state, slots, requests)
    else:
        _kernels(impl).fold(state, slots, requests)


def check_impl(impl: str) -> None:
    """Refuses an implementation that there is not.

    Raises:
        ValueError: as said.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl is {impl!r}; it is one of {', '.join(get_args(Impl))}")


def _kernels(impl: Literal["triton", "cuda"]) -> Any:
    return import_module(f"treewy.ops.{impl}")
