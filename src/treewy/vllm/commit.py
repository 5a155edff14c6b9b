"""After sampling: accepted rows are committed, in all layers of a KV-cache group at once; full blocks are published."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy import ops
from treewy.ops import LayerState
from treewy.vllm.layer import GatedDeltaNetLayer
from treewy.vllm.metadata import Round
from treewy.vllm.prefix_cache import Full, full_blocks, inputs_at_end, publish, up_to_the_end


class Group:
    """The GDN layers of one KV-cache group: what they keep of running requests lies side by side.

    Args:
        layers: that share block tables; their blocks are allocated.
        first: number of layers in the groups before this one.
    """

    def __init__(self, layers: Sequence[GatedDeltaNetLayer], first: int) -> None:
        self.layers = layers
        for index, layer in enumerate(layers, first):
            layer.move(index)
        running, self.impl = layers[0].running, layers[0].impl
        assert running is not None
        states = [layer.state for layer in layers]
        self._pieces = {name: piece[first : first + len(layers)] for name, piece in running.pieces.items()}
        # Addresses of blocks, taken once: vLLM allocates blocks before `initialize_kv_cache`, which builds groups anew.
        device = states[0].conv.device
        self._conv = torch.tensor([state.conv.data_ptr() for state in states], device=device)
        self._checkpoints = torch.tensor([state.checkpoint.data_ptr() for state in states], device=device)
        self._paths: dict[int, Tensor] = {}

    @property
    def _state(self) -> LayerState:
        """Of all layers, but for blocks: those of the first layer."""
        first = self.layers[0].state
        return LayerState(checkpoint=first.checkpoint[None], conv=first.conv[None], **self._pieces)

    def commit(self, round: Round, accepted: Tensor) -> None:
        """Accepts the first `accepted` [B] rows of each window."""
        path = self._path(round.most, accepted)
        full = full_blocks(round, accepted)
        if self.impl == "torch":
            self._by_layer(round, path, accepted, None if full is None else full.only())
        else:
            self._at_once(round, path, accepted, full)

    def _path(self, rows: int, accepted: Tensor) -> Tensor:
        """[B, rows] the path of a chain."""
        if rows not in self._paths:
            requests = self._pieces["end"].shape[1]
            self._paths[rows] = torch.arange(rows, device=accepted.device).expand(requests, rows).contiguous()
        return self._paths[rows][: accepted.shape[0]]

    def _by_layer(self, round: Round, path: Tensor, accepted: Tensor, full: Full | None) -> None:
        for layer in self.layers:
            state = layer.state
            inputs = None if full is None else inputs_at_end(state, full)
            ops.commit(state, round.window, path, accepted)
            if full is not None and inputs is not None:
                publish(state, full, inputs)

    def _at_once(self, round: Round, path: Tensor, accepted: Tensor, full: Full | None) -> None:
        """The same; nothing waits for the device, and a request that fills no block is padding."""
        from treewy.ops.triton import commit
        from treewy.ops.triton.paged import copy_blocks

        assert isinstance(round.window, ops.DeviceWindow)
        ends, state = None if full is None else (full.first, full.target), self._state
        commit(state, round.window, path, accepted, pools=self._conv, full=ends)
        if full is None:
            return
        with up_to_the_end(state, full):
            for layer in self.layers:
                ops.fold(layer.state, full.slots, full.requests, impl=self.impl)
        source = torch.where(full.target >= 0, full.slots, -1)
        copy_blocks(self._checkpoints, state.checkpoint[0], source, full.target)
