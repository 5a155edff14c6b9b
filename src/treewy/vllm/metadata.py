"""Attention metadata of a GDN layer: vLLM's own, and beside it the step's windows as a plan for `treewy.ops`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from treewy import ops
from treewy.ops import DeviceWindow, Window
from treewy.vllm.chains import chain_batch

NULL_BLOCK = 0
"""vLLM's block of padding rows."""


@dataclass
class Round:
    """The windows of one step, for the layers of one KV-cache group; B windows of up to T rows."""

    window: Window | DeviceWindow
    slots: Tensor
    """[B] int64, block of each window's request; -1 for padding."""
    requests: Tensor
    """[B] int64, request slot."""
    committed: Tensor
    """[B] tokens that were committed before this step."""
    block_table: Tensor
    """[B, columns] blocks of each request."""
    block_size: int
    may_fill: bool
    """Whether accepted rows may reach the end of a block; never without prefix caching."""
    most: int
    """T."""
    tokens: Tensor | None
    """[B, T] token of each row, any past the end of a window; None where tokens are the rows, in order."""
    places: Tensor | None
    """[n] int64, place in [B * T] of each token that is in a window; None likewise."""
    owners: Tensor | None
    """[n] int64, the tokens that are in windows, in the order of `places`; None likewise."""

    def windows(self, per_token: Tensor) -> Tensor:
        """[tokens, …] as [B, T, …]."""
        if self.tokens is not None:
            return per_token[self.tokens]
        batch = self.slots.shape[0]
        rows = per_token.shape[0] // batch
        return per_token.view(batch, rows, *per_token.shape[1:])

    def scatter(self, rows: Tensor, per_token: Tensor) -> None:
        """Writes [B, T, …] to the tokens of the windows, [tokens, …]."""
        flat = rows.flatten(0, 1)
        if self.owners is None:
            per_token[: flat.shape[0]] = flat
        else:
            per_token[self.owners] = flat[self.places]


@dataclass
class TreeWYMetadata(GDNAttentionMetadata):  # type: ignore[misc]
    """What a layer is given for a step."""

    round: Round | None = None
    """None where no row is a window."""
    engine: GDNAttentionMetadata | None = None
    """What is left to vLLM's kernels, as if it were the whole batch; None where nothing is."""
    engine_slots: Tensor | None = None
    """[P] blocks of the rows that are left to vLLM's kernels."""
    engine_requests: Tensor | None = None
    """[P] their request slots."""


class TreeWYBackend(GDNAttentionBackend):  # type: ignore[misc]
    """Backend of the replaced layer."""

    @staticmethod
    def get_builder_cls() -> type[TreeWYMetadataBuilder]:
        """The builder below."""
        return TreeWYMetadataBuilder


class TreeWYMetadataBuilder(GDNAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds it once a step and KV-cache group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self.layers = [context[name] for name in layer_names]
        self.running = self.layers[0].running
        # One block a request, where vLLM's own builder stages one a row.
        self.spec_state_indices_tensor = torch.empty(self.decode_cudagraph_max_bs, 1, dtype=torch.int32, device=device)
        self._buffers: dict[int, DeviceWindow] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> TreeWYMetadata:
        """As vLLM's builder. A row longer than a window (a capture dummy) is left to vLLM's kernels."""
        batch = common_attn_metadata
        lengths = batch.query_start_loc_cpu.diff()
        if num_decode_draft_tokens_cpu is not None:
            too_long = lengths[: num_decode_draft_tokens_cpu.shape[0]] > self.num_spec + 1
            num_decode_draft_tokens_cpu = num_decode_draft_tokens_cpu.masked_fill(too_long, -1)
        built = super().build(
            common_prefix_len, batch, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build=fast_build
        )
        metadata = TreeWYMetadata(**{field.name: getattr(built, field.name) for field in fields(built)})
        windows = built.spec_sequence_masks_cpu
        if windows is None:
            self._leave_to_engine(metadata, built, torch.ones_like(lengths, dtype=torch.bool), lengths)
            return metadata
        metadata.round = self._round(built, batch, windows, lengths)
        if built.num_prefills:
            self._leave_to_engine(
                metadata,
                replace(
                    built,
                    num_actual_tokens=built.num_prefill_tokens,
                    num_spec_decodes=0,
                    num_spec_decode_tokens=0,
                    spec_query_start_loc=None,
                    spec_state_indices_tensor=None,
                    spec_sequence_masks=None,
                    spec_sequence_masks_cpu=None,
                    spec_token_indx=None,
                    non_spec_token_indx=None,
                    num_accepted_tokens=None,
                ),
                ~windows,
                lengths,
            )
        return metadata

    def _leave_to_engine(
        self, metadata: TreeWYMetadata, built: GDNAttentionMetadata, rows: Tensor, lengths: Tensor
    ) -> None:
        chosen = rows.nonzero().flatten()
        real = async_tensor_h2d(lengths[chosen] > 0, device=self.device)
        requests = self.running.requests[async_tensor_h2d(chosen, device=self.device)]
        assert built.non_spec_state_indices_tensor is not None
        slots = built.non_spec_state_indices_tensor[: chosen.shape[0]].long()
        metadata.engine = built
        metadata.engine_slots = torch.where(real & (slots != NULL_BLOCK) & (requests >= 0), slots, -1)
        metadata.engine_requests = requests

    def _round(self, built: GDNAttentionMetadata, batch: Any, windows: Tensor, lengths: Tensor) -> Round:
        """Of the rows in `windows`; where all are, padding of a captured graph included, which has no tokens."""
        mixed = built.num_prefills > 0
        slots = built.spec_state_indices_tensor[:, 0].long()
        chosen = windows.nonzero().flatten() if mixed else torch.arange(slots.shape[0])
        where = async_tensor_h2d(chosen, device=self.device) if mixed else slice(slots.shape[0])
        requests = self.running.requests[where]
        slots = torch.where((slots != NULL_BLOCK) & (requests >= 0), slots, -1)
        rows = lengths[chosen]
        most = max(int(rows.max()), 1)
        tokens = places = owners = None
        if mixed or not bool((rows[rows > 0] == most).all()):
            row = torch.arange(most)
            real = row < rows[:, None]
            of_row = (batch.query_start_loc_cpu[chosen][:, None] + row).long()
            owners = async_tensor_h2d(of_row[real], device=self.device)
            tokens = async_tensor_h2d(of_row.masked_fill(~real, 0), device=self.device)
            places = async_tensor_h2d(real.flatten().nonzero().flatten(), device=self.device)
        return Round(
            window=self._plan(async_tensor_h2d(rows, device=self.device), slots, requests, most),
            slots=slots,
            requests=requests,
            committed=batch.compute_num_computed_tokens()[where],
            block_table=batch.block_table_tensor[where],
            block_size=self.kv_cache_spec.block_size,
            may_fill=self._may_fill(batch.seq_lens_cpu_upper_bound[chosen], rows),
            most=most,
            tokens=tokens,
            places=places,
            owners=owners,
        )

    def _may_fill(self, seq_lens: Tensor, rows: Tensor) -> bool:
        """Asked on the host, which may be two windows ahead of the device: rather too often than not often enough."""
        if self.vllm_config.cache_config.mamba_cache_mode != "align":
            return False
        size = self.kv_cache_spec.block_size
        behind = (seq_lens - rows - 2 * (self.num_spec + 1)).clamp(min=0)
        return bool((seq_lens // size > behind // size).any())

    def _plan(self, rows: Tensor, slots: Tensor, requests: Tensor, most: int) -> Window | DeviceWindow:
        layer = self.layers[0]
        trees = chain_batch(rows, most, layer.dims.conv_width)
        sizes = {"num_slots": layer.kv_cache[0].shape[0], "num_requests": self.running.num_requests}
        if layer.impl == "torch":
            planned: Window = ops.plan(trees, slots, requests, **sizes)
            return planned
        # Captured graphs read these buffers, so windows of a length always have the same ones.
        if most not in self._buffers:
            self._buffers[most] = DeviceWindow.empty(
                self.running.num_requests,
                most,
                device=self.device,
                conv_width=layer.dims.conv_width,
                impl=layer.impl,
                **sizes,
            )
        window = self._buffers[most].first(slots.shape[0])
        window.update(trees, slots, requests)
        return window
