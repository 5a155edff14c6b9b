"""The GDN layer: draft windows go through `treewy.ops`, prompts through vLLM's own kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention, _encode_layer_name
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms import current_platform

from treewy import ops
from treewy.ops import GatedNorm, GDNDims, GDNParams, Impl, LayerState
from treewy.vllm.metadata import NULL_BLOCK, Prompts, Round, TreeWYBackend, TreeWYMetadata
from treewy.vllm.options import active
from treewy.vllm.running import RunningState, state_spec


class GatedDeltaNetLayer(QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """vLLM's layer with one block a request, whatever the window; vLLM's layer itself where TreeWY is not active."""

    running: RunningState | None = None
    """State of the running requests, shared by all layers; None where TreeWY is not active."""
    params: GDNParams | None = None
    _state: LayerState | None = None

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, prefix, *args, **kwargs)
        options = active(vllm_config)
        if options is None:
            return
        others = [
            layer
            for layer in vllm_config.compilation_config.static_forward_context.values()
            if isinstance(layer, GatedDeltaNetLayer) and layer is not self
        ]
        self.index = len(others)
        """Place among the layers of the pieces in `running`; `commit.Group` makes layers of a group neighbours."""
        self.running = (
            others[0].running
            if others
            else RunningState(
                state_spec(vllm_config, options),
                vllm_config.scheduler_config.max_num_seqs,
                current_platform.device_type,
            )
        )
        self.impl: Impl = options.impl or ("cuda" if current_platform.is_cuda() else "torch")
        self.fold_always = options.mamba_state_commit == "reconstruct"
        self.fused_norm = self.norm.activation == "silu" and not self.gqa_interleaved_layout
        if current_platform.is_cpu():
            self._forward_method = self.forward_cuda
        self.enable_fused_gdn_spec_decode = self.fused_norm

    @property
    def dims(self) -> GDNDims:
        """Dimensions on this rank."""
        assert self.running is not None
        return self.running.spec.layers

    # What vLLM asks before anything runs

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Convolution inputs and state of one block: no rows for a window."""
        if self.running is None:
            return super().get_state_shape()  # type: ignore[no-any-return]
        return MambaStateShapeCalculator.gated_delta_net_state_shape(  # type: ignore[no-any-return]
            self.tp_size,
            self.num_k_heads,
            self.num_v_heads,
            self.head_k_dim,
            self.head_v_dim,
            self.conv_kernel_size,
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's, without blocks for draft nodes."""
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if self.running is None or spec is None else replace(spec, num_speculative_blocks=0)

    def get_attn_backend(self) -> Any:
        """The backend whose metadata hold windows."""
        return super().get_attn_backend() if self.running is None else TreeWYBackend

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Brings the parameters into the form of `treewy.ops`; vLLM calls it after every (re)load of weights.

        Args:
            act_dtype: dtype of activations; not needed.
        """
        if self.running is None:
            return
        # On a CPU vLLM packs the weight for its own kernel and keeps the plain one beside it.
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", self.conv1d.weight)
        params = GDNParams.of(self.dims, weight, self.A_log, self.dt_bias, self.conv1d.bias)
        if self.params is None:
            self.params = params
            return
        # Captured graphs read the tensors that are there.
        for mine, new in zip(self.params, params, strict=True):
            if isinstance(mine, Tensor) and isinstance(new, Tensor):
                mine.copy_(new)

    @property
    def kv_cache(self) -> Any:
        """The layer's blocks. vLLM exchanges them after its memory profile and needs the memory of the first ones."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, blocks: Any) -> None:
        self._kv_cache, self._state = blocks, None

    @property
    def state(self) -> LayerState:
        """What the operations read and write: blocks of the engine's pool, and the running requests' rows."""
        if self._state is None:
            conv, checkpoint = self.kv_cache[:2]
            assert self.running is not None
            if current_platform.is_cpu():
                # vLLM's CPU kernels keep [dk, dv] where its shape says [dv, dk].
                slots, heads, dv, dk = checkpoint.shape
                checkpoint = checkpoint.view(slots, heads, dk, dv).transpose(-1, -2)
            self._state = self.running.layer(self.index, checkpoint, conv)
        return self._state

    def move(self, index: int) -> None:
        """Gives the layer another place in the pieces; before anything runs."""
        self.index, self._state = index, None

    # A step

    def forward_cuda(self, hidden_states: Tensor) -> Tensor:
        """As vLLM's; outputs are not zeroed first, as all are written."""
        if self.running is None or not self.enable_fused_gdn_spec_decode or hidden_states.dtype != torch.bfloat16:
            return super().forward_cuda(hidden_states)  # type: ignore[no-any-return]
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        out = mixed_qkvz.new_empty(hidden_states.shape[0], self.dims.num_v_heads, self.dims.head_v_dim)
        name = _encode_layer_name(self.prefix)
        torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed(mixed_qkvz, ba, out, layer_name=name)
        projected: Tensor = self.out_proj(out.flatten(-2))[0]
        return projected

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        metadata = self._metadata()
        if metadata is not None:
            self._step(metadata, mixed_qkv, b, a, None, core_attn_out)
        elif self.running is None or not current_platform.is_cpu():
            super()._forward_core(mixed_qkv, b, a, core_attn_out)  # vLLM's layer, or a run that warms its kernels up

    def _forward_core_fused_norm_packed(self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
        metadata = self._metadata()
        if metadata is not None:
            dims = self.dims
            mixed_qkv, z = mixed_qkvz.split([dims.conv_dim, dims.value_dim], dim=-1)
            b, a = self.split_ba(ba)
            z = z.unflatten(-1, (dims.num_v_heads, dims.head_v_dim))
            self._step(metadata, mixed_qkv, b, a, z, core_attn_out)
            core_attn_out[metadata.num_actual_tokens :].zero_()
            return
        if self.running is not None:
            core_attn_out.zero_()
        if self.running is None or not current_platform.is_cpu():
            super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)

    def _metadata(self) -> TreeWYMetadata | None:
        """Of the step; None where TreeWY is not active, and in runs without requests."""
        every = get_forward_context().attn_metadata
        found = every.get(self.prefix) if isinstance(every, dict) else None
        return found if isinstance(found, TreeWYMetadata) else None

    def _step(
        self, metadata: TreeWYMetadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor
    ) -> None:
        if metadata.prompts is not None:
            every = get_forward_context().attn_metadata
            every[self.prefix] = metadata.prompts.batch
            try:
                self._prompts(metadata.prompts, mixed_qkv, b, a, z, out)
            finally:
                every[self.prefix] = metadata
        if metadata.round is not None:
            self._windows(metadata.round, mixed_qkv, b, a, z, out)

    def _windows(self, round: Round, mixed_qkv: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor) -> None:
        assert self.params is not None
        in_order = round.tokens is None
        norm = None if z is None else GatedNorm(round.windows(z), self.norm.weight, self.norm.eps)
        rows = ops.verify(
            self.state,
            round.window,
            round.windows(mixed_qkv),
            round.windows(a),
            round.windows(b),
            self.params,
            fold_always=self.fold_always,
            norm=norm,
            out=round.windows(out) if in_order else None,
        )
        if not in_order:
            round.scatter(rows, out)

    def _prompts(
        self, prompts: Prompts, mixed_qkv: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor
    ) -> None:
        """Prompt rows: whatever is pending is folded, then vLLM's kernels take the block and leave a plain state."""
        if prompts.requests is not None:
            self._fold(prompts.slots, prompts.requests)
        tokens = prompts.tokens
        in_order = isinstance(tokens, slice)
        mixed_qkv, b, a = mixed_qkv[tokens], b[tokens].contiguous(), a[tokens].contiguous()
        rows = out[tokens] if in_order else torch.empty_like(out[: mixed_qkv.shape[0]])
        if current_platform.is_cpu():
            torch.ops.vllm.cpu_gdn_attention_core(mixed_qkv, b, a, rows, self.prefix)
        else:
            super()._forward_core(mixed_qkv, b, a, rows)
        if z is not None and current_platform.is_cpu():
            rows.copy_(self.norm(rows, z[tokens]))
        elif z is not None:
            self._rms_norm_gated_cuda(rows, z[tokens], rows)
        if not in_order:
            out[tokens] = rows

    def _fold(self, slots: Tensor, requests: Tensor) -> None:
        slots = torch.where(slots != NULL_BLOCK, slots.long(), -1)
        if self.impl == "torch":  # which takes no padding
            real = slots >= 0
            slots, requests = slots[real], requests[real]
        ops.fold(self.state, slots, requests, impl=self.impl)
