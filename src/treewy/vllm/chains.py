"""Windows that are chains, as tensors on the device: what vLLM's drafters propose."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from treewy.tree import DraftTree, TreeBatch


def chain_batch(rows: Tensor, most: int, conv_width: int) -> TreeBatch:
    """Chains of these lengths; nothing waits for the device.

    Args:
        rows: [B] integer, rows of each window; 0 for padding.
        most: T, at least the longest.
        conv_width: of the model.
    """
    chain = _chain(most, conv_width, rows.device)
    real = torch.arange(most, device=rows.device) < rows[:, None]
    return TreeBatch(
        rows=rows.to(torch.int32),
        parents=torch.where(real, chain.parents, -1),
        depths=torch.where(real, chain.depths, 0),
        ancestors=torch.where(real, chain.ancestors, 0),
        conv_ancestors=torch.where(real[..., None], chain.conv_ancestors, chain.conv_ancestors[:, :1]),
        max_depth=most - 1,
    )


@lru_cache(maxsize=64)
def _chain(rows: int, conv_width: int, device: torch.device) -> TreeBatch:
    return TreeBatch.of([DraftTree.chain(rows - 1)], conv_width=conv_width, device=device)
