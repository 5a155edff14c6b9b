"""Attention metadata of a GDN layer: vLLM's own, and beside it the step's windows as a plan for `treewy.ops`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from treewy import ops
from treewy.ops import DeviceWindow, Window
from treewy.vllm.chains import chain_batch

Places = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
NULL_BLOCK = 0
"""vLLM's block of padding rows."""


class Rows(NamedTuple):
    """Some requests of a batch, or some of its tokens."""

    places: Places
    """[n] their places in the batch, on the host."""
    where: slice | Tensor
    """The same as an index on the device: a slice where they follow each other."""

    @property
    def leading(self) -> bool:
        """Whether they are the first of the batch."""
        return isinstance(self.where, slice) and self.where.start == 0


@dataclass
class Round:
    """The windows of one step, for the layers of one KV-cache group; B windows of up to T rows."""

    window: Window | DeviceWindow
    slots: Tensor
    """[B] int64, block of each window's request; -1 for padding."""
    requests: Tensor
    """[B] int64, request slot; -1 for padding."""
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
    """[B, T] token of each row, any past the end of a window; None where the first B * T tokens are the rows."""
    places: Tensor | None
    """[n] int64, place in [B * T] of each token that is in a window; None likewise."""
    owners: Tensor | None
    """[n] int64, the tokens that are in windows, in the order of `places`; None likewise."""

    def windows(self, per_token: Tensor) -> Tensor:
        """[tokens, …] as [B, T, …]."""
        if self.tokens is not None:
            return per_token[self.tokens]
        batch = self.slots.shape[0]
        return per_token[: batch * self.most].view(batch, self.most, *per_token.shape[1:])

    def scatter(self, rows: Tensor, per_token: Tensor) -> None:
        """Writes [B, T, …] to the tokens of the windows, [tokens, …], where these are not the first ones in order."""
        per_token[self.owners] = rows.flatten(0, 1)[self.places]


@dataclass
class Prompts:
    """What of a step is left to vLLM's kernels, for the layers of one KV-cache group; P requests."""

    batch: GDNAttentionMetadata
    """As if it were a batch of its own."""
    tokens: slice | Tensor
    """Their tokens."""
    slots: Tensor
    """[P] their blocks."""
    requests: Tensor | None
    """[P] request slots; None where none of them can have pending rows."""


@dataclass
class TreeWYMetadata(GDNAttentionMetadata):  # type: ignore[misc]
    """What a layer is given for a step."""

    round: Round | None = None
    """None where no row is a window."""
    prompts: Prompts | None = None
    """None where all are."""
    common: Any = None
    """vLLM's metadata of the whole batch, of the first KV-cache group."""
    window_rows: Rows | None = None
    prompt_rows: Rows | None = None


class TreeWYBackend(GDNAttentionBackend):  # type: ignore[misc]
    """Backend of the replaced layer."""

    @staticmethod
    def get_builder_cls() -> type[TreeWYMetadataBuilder]:
        """The builder below."""
        return TreeWYMetadataBuilder


class TreeWYMetadataBuilder(GDNAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds it for the first KV-cache group of a step; the others have other blocks, and all else in common."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self.layers = [context[name] for name in layer_names]
        self.running = self.layers[0].running
        self.supports_update_block_table = True
        self._buffers: dict[int, DeviceWindow] = {}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> TreeWYMetadata:
        """Arguments as vLLM's builder. A row longer than a window (a capture dummy) is left to vLLM's kernels."""
        common = common_attn_metadata
        lengths = np.diff(common.query_start_loc_cpu.numpy())
        is_window = np.zeros_like(lengths, dtype=bool)
        if num_decode_draft_tokens_cpu is not None:
            drafted = num_decode_draft_tokens_cpu.numpy()
            is_window[: len(drafted)] = (drafted >= 0) & (lengths[: len(drafted)] <= self.num_spec + 1)
        is_prompt = ~is_window & (lengths > 0)
        prompts = bool(is_prompt.any())
        metadata = TreeWYMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=int(is_window.sum()),
            num_spec_decode_tokens=int(lengths[is_window].sum()),
            num_actual_tokens=common.num_actual_tokens,
            common=common,
        )
        if metadata.num_spec_decodes:
            # Without prompts the padding of a captured graph comes along, which has no tokens.
            metadata.window_rows = self._rows(is_window if prompts else np.ones_like(is_window))
            metadata.round = self._round(metadata.window_rows, lengths, common)
        if prompts:
            metadata.prompt_rows = self._rows(is_prompt)
            metadata.prompts = self._prompts(metadata.prompt_rows, lengths, common)
        self.running.note_windows(is_window)
        return metadata

    def update_block_table(self, metadata: TreeWYMetadata, blk_table: Tensor, slot_mapping: Tensor) -> TreeWYMetadata:
        """The same step for another KV-cache group: other blocks, and all else as it is; arguments as vLLM's."""
        current = self._current(blk_table, metadata.common.seq_lens)
        round, prompts = metadata.round, metadata.prompts
        if round is not None:
            assert metadata.window_rows is not None
            window, slots, requests = self._plan(metadata.window_rows, round.most, current, metadata.common)
            table = blk_table[metadata.window_rows.where]
            round = replace(round, window=window, slots=slots, requests=requests, block_table=table)
        if prompts is not None:
            assert metadata.prompt_rows is not None
            where, batch = metadata.prompt_rows.where, prompts.batch
            slots, checkpoint = current[where], batch.checkpoint
            mine = replace(
                batch,
                non_spec_state_indices_tensor=slots,
                prefill_state_indices=slots[batch.num_decodes :] if batch.num_prefills else None,
                checkpoint=None if checkpoint is None else checkpoint.regather_state_indices(blk_table[where]),
            )
            prompts = replace(prompts, batch=mine, slots=slots)
        return replace(metadata, round=round, prompts=prompts)

    def _current(self, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        """[requests] the block that each request is in."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table: Tensor = mamba_get_block_table_tensor(block_table, seq_lens, self.kv_cache_spec, mode)
        return table[:, 0]

    def _rows(self, mask: Mask) -> Rows:
        """Those in a mask; nothing is copied to the device where they follow each other."""
        places = np.flatnonzero(mask)
        first, end = int(places[0]), int(places[-1]) + 1
        together = end - first == len(places)
        return Rows(places, slice(first, end) if together else async_tensor_h2d(places, device=self.device))

    def _prompts(self, rows: Rows, lengths: Places, common: Any) -> Prompts:
        is_prompt = np.zeros_like(lengths, dtype=bool)
        is_prompt[rows.places] = True
        tokens = self._rows(is_prompt.repeat(lengths)).where
        mine = lengths[rows.places]
        starts = np.concatenate([[0], mine.cumsum()]).astype(np.int32)
        on_host = torch.from_numpy(rows.places)
        batch = super().build(
            0,
            common.replace(
                query_start_loc=async_tensor_h2d(starts, device=self.device),
                query_start_loc_cpu=torch.from_numpy(starts),
                seq_lens=common.seq_lens[rows.where],
                seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[on_host],
                is_prefilling=common.is_prefilling[on_host],
                num_reqs=len(mine),
                num_actual_tokens=int(starts[-1]),
                max_query_len=int(mine.max()),
                block_table_tensor=common.block_table_tensor[rows.where],
                slot_mapping=common.slot_mapping[tokens],
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            ),
        )
        slots = batch.non_spec_state_indices_tensor
        assert slots is not None
        requests = self.running.requests[rows.where] if self.running.may_be_pending(rows.places) else None
        return Prompts(batch, tokens, slots, requests)

    def _round(self, rows: Rows, lengths: Places, common: Any) -> Round:
        mine = lengths[rows.places]
        most = max(int(mine.max()), 1)
        tokens = places = owners = None
        if not rows.leading or not (mine[mine > 0] == most).all():
            row = np.arange(most)
            real = row < mine[:, None]
            of_row = common.query_start_loc_cpu.numpy()[rows.places][:, None].astype(np.int64) + row
            owners = async_tensor_h2d(of_row[real], device=self.device)
            tokens = async_tensor_h2d(np.where(real, of_row, 0), device=self.device)
            places = async_tensor_h2d(np.flatnonzero(real), device=self.device)
        current = self._current(common.block_table_tensor, common.seq_lens)
        window, slots, requests = self._plan(rows, most, current, common)
        return Round(
            window=window,
            slots=slots,
            requests=requests,
            committed=common.compute_num_computed_tokens()[rows.where],
            block_table=common.block_table_tensor[rows.where],
            block_size=self.kv_cache_spec.block_size,
            may_fill=self._may_fill(common.seq_lens_cpu_upper_bound.numpy()[rows.places], mine),
            most=most,
            tokens=tokens,
            places=places,
            owners=owners,
        )

    def _may_fill(self, seq_lens: Places, rows: Places) -> bool:
        """Asked on the host, which may be two windows ahead of the device: rather too often than not often enough."""
        if self.vllm_config.cache_config.mamba_cache_mode != "align":
            return False
        size = self.kv_cache_spec.block_size
        behind = np.maximum(seq_lens - rows - 2 * (self.num_spec + 1), 0)
        return bool((seq_lens // size > behind // size).any())

    def _plan(
        self, rows: Rows, most: int, current: Tensor, common: Any
    ) -> tuple[Window | DeviceWindow, Tensor, Tensor]:
        """The plan of these windows of at most `most` rows, and [B] slots and requests, -1 for padding."""
        layer, running = self.layers[0], self.running
        sizes = {"num_slots": layer.kv_cache[0].shape[0], "num_requests": running.num_requests}
        if layer.impl == "torch":
            slots = current[rows.where].long()
            requests = F.pad(running.requests, (0, current.shape[0] - running.requests.shape[0]), value=-1)[rows.where]
            slots = torch.where((slots != NULL_BLOCK) & (requests >= 0), slots, -1)
            trees = chain_batch(common.query_start_loc.diff()[rows.where], most, layer.dims.conv_width)
            return ops.plan(trees, slots, requests, **sizes), slots, requests
        # Captured graphs read these buffers, so windows of a length always have the same ones.
        if most not in self._buffers:
            buffers = DeviceWindow.empty(
                running.num_requests,
                most,
                device=self.device,
                conv_width=layer.dims.conv_width,
                impl=layer.impl,
                **sizes,
            )
            self._buffers[most] = replace(buffers, errors=running.errors)
        window = self._buffers[most].first(len(rows.places))
        chosen = None if rows.leading else async_tensor_h2d(rows.places, device=self.device)
        window.update_chains(common.query_start_loc, current, running.requests, chosen=chosen, padding=NULL_BLOCK)
        return window, window.slots, window.requests
