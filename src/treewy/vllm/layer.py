"""The GDN layer: draft windows go through `treewy.ops`, prompts through vLLM's own kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.platforms import current_platform

from treewy import ops
from treewy.ops import GatedNorm, GDNDims, GDNParams, Impl, LayerState
from treewy.vllm.metadata import Round, TreeWYBackend, TreeWYMetadata
from treewy.vllm.options import active
from treewy.vllm.running import RunningState, state_spec


class GatedDeltaNetLayer(QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """vLLM's layer with one block a request, whatever the window; vLLM's layer itself where TreeWY is not active."""

    running: RunningState | None = None
    """State of the running requests, shared by all layers; None where TreeWY is not active."""
    params: GDNParams | None = None

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
    def state(self) -> LayerState:
        """What the operations read and write: blocks of the engine's pool, and the running requests' rows."""
        assert self.running is not None
        conv, checkpoint = self.kv_cache[:2]
        if current_platform.is_cpu():
            # vLLM's CPU kernels keep [dk, dv] where its shape says [dv, dk].
            slots, heads, dv, dk = checkpoint.shape
            checkpoint = checkpoint.view(slots, heads, dk, dv).transpose(-1, -2)
        return self.running.layer(self.index, checkpoint, conv)

    # A step

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if self.running is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        metadata = self._metadata()
        if metadata is None:
            if not current_platform.is_cpu():
                super()._forward_core(mixed_qkv, b, a, core_attn_out)  # warms its kernels up
            return
        self._engine_rows(metadata, mixed_qkv, b, a, None, core_attn_out)
        if metadata.round is not None:
            self._windows(metadata.round, mixed_qkv, b, a, None, core_attn_out)

    def _forward_core_fused_norm_packed(self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
        if self.running is None:
            super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)
            return
        metadata = self._metadata()
        if metadata is None:
            if not current_platform.is_cpu():
                super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)
            return
        dims = self.dims
        mixed_qkv, z = mixed_qkvz.split([dims.conv_dim, dims.value_dim], dim=-1)
        z = z.unflatten(-1, (dims.num_v_heads, dims.head_v_dim))
        b, a = self.split_ba(ba)
        self._engine_rows(metadata, mixed_qkv, b, a, z, core_attn_out)
        if metadata.round is not None:
            self._windows(metadata.round, mixed_qkv, b, a, z, core_attn_out)

    def _metadata(self) -> TreeWYMetadata | None:
        every = get_forward_context().attn_metadata
        found = every.get(self.prefix) if isinstance(every, dict) else None
        assert found is None or isinstance(found, TreeWYMetadata)
        return found

    def _windows(self, round: Round, mixed_qkv: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor) -> None:
        assert self.params is not None
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
        )
        round.scatter(rows, out)

    def _fold(self, slots: Tensor, requests: Tensor) -> None:
        if self.impl == "torch":  # which takes no padding
            real = slots >= 0
            slots, requests = slots[real], requests[real]
        ops.fold(self.state, slots, requests, impl=self.impl)

    def _engine_rows(
        self, metadata: TreeWYMetadata, mixed_qkv: Tensor, b: Tensor, a: Tensor, z: Tensor | None, out: Tensor
    ) -> None:
        """Prompt rows: whatever is pending is folded, then vLLM's kernels take the block and leave a plain state."""
        engine = metadata.engine
        if engine is None:
            return
        assert metadata.engine_slots is not None
        assert metadata.engine_requests is not None
        self._fold(metadata.engine_slots, metadata.engine_requests)
        tokens = metadata.non_spec_token_indx if metadata.round is not None else None
        count = engine.num_actual_tokens
        if tokens is None:
            mixed_qkv, b, a, rows = mixed_qkv[:count], b[:count], a[:count], out[:count]
        else:
            mixed_qkv, b, a = mixed_qkv[tokens], b[tokens], a[tokens]
            rows = out.new_zeros(count, *out.shape[1:])
        every = get_forward_context().attn_metadata
        every[self.prefix] = engine
        try:
            if current_platform.is_cpu():
                torch.ops.vllm.cpu_gdn_attention_core(mixed_qkv, b.contiguous(), a.contiguous(), rows, self.prefix)
            else:
                super()._forward_core(mixed_qkv.contiguous(), b.contiguous(), a.contiguous(), rows)
        finally:
            every[self.prefix] = metadata
        if z is not None:
            gate = z[:count] if tokens is None else z[tokens]
            rows.copy_(self.norm(rows, gate))
        if tokens is not None:
            out[tokens] = rows
