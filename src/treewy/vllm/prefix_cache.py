"""Prefix caching: a full block of the engine becomes an entry of its cache, so it must hold a plain state then.

With prefix caching a request moves to a new block every `block_size` tokens and leaves the old one to the cache, as the
state after exactly that many tokens. A window may run across the end of a block. vLLM puts the request into the later
block before such a step. After it the earlier block gets the state at its end, and the rows after the end stay pending
on top of that same state in the later block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from treewy import ops
from treewy.ops import LayerState
from treewy.vllm.metadata import Round


class Full(NamedTuple):
    """Requests whose accepted rows reach the end of a block, of one round; n requests."""

    slots: Tensor
    """[n] block that holds the request; -1 for requests that reach no end, where they are kept in."""
    requests: Tensor
    """[n] request slot."""
    target: Tensor
    """[n] the block that is full now; -1 likewise, and where it is the block that holds the request."""
    first: Tensor
    """[n] accepted rows up to the end of it."""
    rest: Tensor
    """[n] accepted rows after it."""

    def only(self) -> Full | None:
        """Without the requests that reach no end, None where there is no other; waits for the device."""
        chosen = (self.slots >= 0).nonzero().flatten()
        return Full(*(field[chosen] for field in self)) if chosen.numel() else None


def full_blocks(round: Round, accepted: Tensor) -> Full | None:
    """Which requests fill a block this round; None where certainly none does.

    Args:
        round: of the step.
        accepted: [B] rows.
    """
    if not round.may_fill:
        return None
    end = (round.committed + accepted) // round.block_size * round.block_size
    fills = (round.slots >= 0) & (end > round.committed)
    end = torch.where(fills, end, round.committed + accepted)  # of padding too something small
    column = (end // round.block_size - 1).clamp(min=0, max=round.block_table.shape[1] - 1)
    target = round.block_table.gather(1, column.long()[:, None])[:, 0].long()
    return Full(
        slots=torch.where(fills, round.slots, -1),
        requests=round.requests,
        target=torch.where(fills & (target != round.slots), target, -1),
        first=torch.where(fills, end - round.committed, 0),
        rest=torch.where(fills, round.committed + accepted - end, 0),
    )


@contextmanager
def up_to_the_end(state: LayerState, full: Full) -> Iterator[None]:
    """Hides rows after the end of a block from a fold; they are pending again afterwards, and in the ring all the time.

    Args:
        state: of one layer, or of all with a leading dimension; committed.
        full: from `full_blocks`.
    """
    ring = state.keys.shape[-3]
    # Summed up by request: padding is request -1 several times, of no rows.
    rest = torch.zeros(state.end.shape[-1], dtype=state.end.dtype, device=state.end.device)
    rest.index_add_(0, full.requests.clamp(min=0), full.rest.to(rest.dtype))
    state.end.sub_(rest).remainder_(ring)
    state.pending.sub_(rest[:, None])
    yield
    state.end.add_(rest).remainder_(ring)
    state.pending.add_(rest[:, None])


def inputs_at_end(state: LayerState, full: Full) -> Tensor:
    """Convolution inputs at the end of the full block, [n, width - 1, C]: before the commit moves them on.

    Args:
        state: of a layer, a chain verified and not yet committed.
        full: from `Full.only`.
    """
    kept = state.conv.shape[1]
    inputs = torch.cat([state.conv[full.slots], state.window_inputs[full.requests]], dim=1)
    last = full.first[:, None] + torch.arange(kept, device=inputs.device)
    return inputs[torch.arange(len(last), device=inputs.device)[:, None], last.long()]


def publish(state: LayerState, full: Full, inputs: Tensor) -> None:
    """Writes the state at the end of the full block into it: after the commit.

    Args:
        state: of a layer, committed.
        full: from `Full.only`.
        inputs: from `inputs_at_end`.
    """
    with up_to_the_end(state, full):
        ops.fold(state, full.slots, full.requests)
    moved = full.target >= 0
    state.checkpoint[full.target[moved]] = state.checkpoint[full.slots[moved]]
    state.conv[full.target[moved]] = inputs[moved]
