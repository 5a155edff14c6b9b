"""Prefix caching: a full block of the engine becomes an entry of its cache, so it must hold a plain state then.

With prefix caching a request moves to a new block every `block_size` tokens and leaves the old one to the cache, as the
state after exactly that many tokens. A window may run across the end of a block. vLLM puts the request into the later
block before such a step. After it the earlier block gets the state at its end, and the rows after the end stay pending
on top of that same state in the later block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treewy import ops
from treewy.ops import Impl, LayerState
from treewy.vllm.metadata import NULL_BLOCK, Round


class Full(NamedTuple):
    """Requests whose accepted rows reach the end of a block, of one round; n requests."""

    slots: Tensor
    """[n] block that holds the request; -1 for requests that reach no end, where they are kept in."""
    requests: Tensor
    """[n] request slot."""
    target: Tensor
    """[n] the block that is full now."""
    first: Tensor
    """[n] accepted rows up to the end of it."""
    rest: Tensor
    """[n] accepted rows after it."""


def full_blocks(round: Round, accepted: Tensor, *, impl: Impl) -> Full | None:
    """Which requests fill a block this round; None where none does.

    On a CPU only those are returned. A GPU is not waited for: all requests are, those that fill none with slot -1.

    Args:
        round: of the step.
        accepted: [B] rows.
        impl: what runs.
    """
    if not round.may_fill:
        return None
    end = (round.committed + accepted) // round.block_size * round.block_size
    first = end - round.committed
    fills = (round.slots >= 0) & (first > 0)
    column = (end // round.block_size - 1).clamp(min=0)
    target = round.block_table.gather(1, column.long()[:, None])[:, 0].long()
    rest = torch.where(fills, accepted - first, 0)
    full = Full(torch.where(fills, round.slots, -1), round.requests, target, first.clamp(min=0), rest)
    if impl != "torch":
        return full
    chosen = fills.nonzero().flatten()
    return Full(*(field[chosen] for field in full)) if chosen.numel() else None


def inputs_at_end(state: LayerState, full: Full, path: Tensor) -> Tensor:
    """Convolution inputs at the end of the full block, [n, width - 1, C]: before the commit moves them on.

    Args:
        state: of a layer, verified and not yet committed.
        full: from `full_blocks`.
        path: [P] accepted rows, the same for all.
    """
    kept = state.conv.shape[1]
    inputs = torch.cat([state.conv[full.slots.clamp(min=0)], state.window_inputs[full.requests][:, path]], dim=1)
    last = full.first[:, None] + torch.arange(kept, device=inputs.device)
    return inputs[torch.arange(len(last), device=inputs.device)[:, None], last.long()]


def publish(state: LayerState, full: Full, inputs: Tensor, *, impl: Impl) -> None:
    """Writes the state at the end of the full block into it: after the commit.

    Args:
        state: of a layer, committed.
        full: from `full_blocks`.
        inputs: from `inputs_at_end`.
        impl: what runs.
    """
    ring = state.keys.shape[-3]
    # Rows after the end of the block are hidden from the fold, then pending again: they are in the ring all the time.
    # Summed up by request: padding is request -1 several times, of no rows.
    rest = torch.zeros_like(state.end).index_add_(0, full.requests.clamp(min=0), full.rest.to(state.end.dtype))
    state.end.sub_(rest).remainder_(ring)
    state.pending.sub_(rest[:, None])
    ops.fold(state, full.slots, full.requests, impl=impl)
    state.end.add_(rest).remainder_(ring)
    state.pending.add_(rest[:, None])
    fills = full.slots >= 0
    source = torch.where(fills, full.slots, NULL_BLOCK)
    target = torch.where(fills, full.target, NULL_BLOCK)
    state.checkpoint[target] = state.checkpoint[source]
    state.conv[target] = torch.where(fills[:, None, None], inputs, state.conv[NULL_BLOCK])
