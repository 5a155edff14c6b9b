"""What running requests hold besides their block: window, pending rows, counters; for all layers in one allocation.

Sized by `max_num_seqs`, indexed by the model runner's request slot, never by block. It is allocated while the model
loads, so that vLLM's memory profile counts it with the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treewy.ops import GDNDims, LayerState
from treewy.state import StateSpec
from treewy.vllm.options import Options, window_rows

IN_BLOCK = ("checkpoint", "conv")
"""Pieces of a request's state that are in the engine's block; all others are here."""


def state_spec(vllm_config: Any, options: Options) -> StateSpec:
    """Layout of the recurrent state on one tensor-parallel rank.

    Raises:
        ValueError: sizes that do not fit, see `StateSpec`, or heads that tensor parallelism cannot split.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_text_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if getattr(config, name) % ranks:
            raise ValueError(f"treewy: {name} = {getattr(config, name)} cannot be split over {ranks} ranks")
    input_dtype, state_dtype = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    rows = window_rows(vllm_config)
    return StateSpec(
        layers=GDNDims(
            config.linear_num_key_heads // ranks,
            config.linear_num_value_heads // ranks,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        ),
        num_layers=config.layer_types.count("linear_attention"),
        mode=options.mamba_state_commit,
        max_rows=rows,
        max_depth=rows - 1,
        state_dtype=state_dtype,
        input_dtype=input_dtype,
        history_rows=options.history_rows,
    )


class RunningState:
    """The pieces of `StateSpec` that are not in a block, [layers, max_num_seqs, …]; one a worker.

    Args:
        spec: layout.
        num_requests: `max_num_seqs`.
        device: of the model.
    """

    def __init__(self, spec: StateSpec, num_requests: int, device: torch.device | str) -> None:
        self.spec = spec
        self.num_requests = num_requests
        self.pieces = {
            name: torch.zeros(spec.num_layers, num_requests, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in spec.pieces().items()
            if name not in IN_BLOCK
        }
        self.requests = torch.full((num_requests,), -1, dtype=torch.int64, device=device)
        """Request slot of each row of the running step's batch; -1 where there is no request."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for layers."""
        return sum(piece.nbytes for piece in self.pieces.values())

    def layer(self, index: int, checkpoint: Tensor, conv: Tensor) -> LayerState:
        """State of one layer: its pieces here, and the blocks it shares with the engine."""
        return LayerState(checkpoint=checkpoint, conv=conv, **{name: p[index] for name, p in self.pieces.items()})

    def reset(self, request: int) -> None:
        """A new request takes this slot: nothing is pending, whatever the last one left behind."""
        for name in ("pending", "window_rows", "end"):
            self.pieces[name][:, request] = 0

    def stage(self, requests: Tensor) -> None:
        """Notes the request slots of a batch, in the order of its rows."""
        count = requests.numel()
        self.requests[:count].copy_(requests)
        self.requests[count:].fill_(-1)
