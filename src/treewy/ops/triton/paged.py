"""Launches for engines with paged states: plans of chains, copies of blocks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from treewy.ops.device_window import DeviceWindow
from treewy.ops.triton.kernel_chains import chains_kernel
from treewy.ops.triton.kernel_copy import copy_kernel


def update_chains(
    window: DeviceWindow, starts: Tensor, slots: Tensor, requests: Tensor, chosen: Tensor | None, padding: int
) -> None:
    """Arguments as `DeviceWindow.update_chains`."""
    kept = window.conv_ancestors.shape[2]
    chains_kernel[(window.batch,)](
        starts, slots, requests, starts if chosen is None else chosen, window.slots, window.requests,
        window.tree_rows, window.parents, window.ancestors, window.conv_ancestors, window.longest, window.errors,
        slots.shape[0], requests.shape[0], padding, window.rows, window.num_slots, window.num_requests,
        slots.stride(0), KEPT=kept, CHOSEN=chosen is not None, BLOCK_T=triton.next_power_of_2(window.rows),
        BLOCK_KEPT=triton.next_power_of_2(kept), num_warps=1,
    )  # fmt: skip


def copy_blocks(pools: Tensor, like: Tensor, source: Tensor, target: Tensor) -> None:
    """Copies blocks to others, in all layers.

    Args:
        pools: [layers] int64, addresses of the layers' pools, on 16 bytes.
        like: [slots, …] one of them; the others have its shape, strides and dtype.
        source: [n] integer, negative where nothing is copied.
        target: [n] integer.
    """
    words, block = like[0].numel() * like.itemsize // 4, 4096
    copy_kernel[triton.cdiv(words, block), source.shape[0], pools.shape[0]](
        torch.empty(0, dtype=torch.int32, device=pools.device), pools, source, target, words,
        like.stride(0) * like.itemsize // 4, BLOCK=block, num_warps=4,
    )  # fmt: skip
