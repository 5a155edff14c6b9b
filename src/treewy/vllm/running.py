"""What running requests hold besides their block: window, pending rows, counters; for all layers in one allocation.

Sized by `max_num_seqs`, indexed by the model runner's request slot, never by block. It is allocated while the model
loads, so that vLLM's memory profile counts it with the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from treewy.ops import GDNDims, LayerState
from treewy.state import StateSpec
from treewy.vllm.options import Options, unsplit_heads, window_rows

Slots = np.ndarray[Any, np.dtype[np.int64]]
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
    if reasons := unsplit_heads(vllm_config):
        raise ValueError("treewy: " + "; ".join(reasons))
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
        self.requests = torch.zeros(0, dtype=torch.int64, device=device)
        """[requests] request slot of each of the step's batch, without padding; vLLM's own tensor."""
        self.errors = torch.zeros(1, dtype=torch.int32, device=device)
        """What kernels refused, see `treewy.ops.DeviceWindow`; common to all plans."""
        self._names = np.zeros(0, dtype=np.int64)
        self._windowed = np.zeros(num_requests, dtype=bool)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for layers."""
        return sum(piece.nbytes for piece in self.pieces.values())

    def layer(self, index: int, checkpoint: Tensor, conv: Tensor) -> LayerState:
        """State of one layer: its pieces here, and the blocks it shares with the engine."""
        return LayerState(checkpoint=checkpoint, conv=conv, **{name: p[index] for name, p in self.pieces.items()})

    def reset(self, request: int) -> None:
        """A new request takes this slot: nothing is pending, whatever the last one left behind."""
        self._windowed[request] = False
        for name in ("pending", "window_rows", "end"):
            self.pieces[name][:, request] = 0

    def stage(self, requests: Tensor, names: Slots) -> None:
        """Notes the request slots of a batch, in the order of its requests: on the device, and on the host."""
        self.requests, self._names = requests, names

    def note_windows(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Notes on the host which requests of the batch are windows in this step."""
        self._windowed[self._names[mask[: len(self._names)]]] = True

    def may_be_pending(self, places: Slots) -> bool:
        """Whether any of these requests of the batch may have pending rows: whether it was a window since its start."""
        return bool(self._windowed[self._names[places]].any())
