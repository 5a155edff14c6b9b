"""What the model runner does around a forward: names the batch's requests before it, commits accepted rows after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from treewy.vllm.commit import Group
from treewy.vllm.layer import GatedDeltaNetLayer
from treewy.vllm.metadata import Round, TreeWYMetadata
from treewy.vllm.metrics import Meter, summary

logger = init_logger("vllm.treewy")


class TreeWYModelState(MambaHybridModelState):  # type: ignore[misc]
    """vLLM's state of a hybrid model, with a commit instead of a choice of snapshots.

    vLLM's `num_accepted_tokens` says in which of a request's blocks the state is; here that is always its first, so it
    stays at 1, and vLLM's own copies between blocks (prefix caching) move a block as it is.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        layers = [
            layer
            for layer in vllm_config.compilation_config.static_forward_context.values()
            if isinstance(layer, GatedDeltaNetLayer) and layer.running is not None
        ]
        self.layers = {layer.prefix: layer for layer in layers}
        assert layers[0].running is not None
        self.running = layers[0].running
        self.groups: list[Group] = []
        self.rounds: list[tuple[Group, Round]] = []
        self.meter = Meter(self.running)
        logger.info(summary(self.running))

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Blocks are allocated."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.groups, count = [], 0
        for group in kv_cache_config.kv_cache_groups:
            mine = [self.layers[name] for name in group.layer_names if name in self.layers]
            if mine:
                self.groups.append(Group(mine, count))
                count += len(mine)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request is admitted, for the first time or after preemption."""
        super().add_request(req_index, new_req_data)
        self.running.reset(req_index)

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Builds the step's metadata; arguments as vLLM's."""
        self.running.stage(input_batch.idx_mapping, input_batch.idx_mapping_np)
        metadata = super().prepare_attn(input_batch, *args, **kwargs)
        self.rounds = []
        if not kwargs.get("for_capture", False):
            for group in self.groups:
                found = metadata.get(group.layers[0].prefix)
                if isinstance(found, TreeWYMetadata) and found.round is not None:
                    self.rounds.append((group, found.round))
            if self.rounds:
                self.meter.before_step()
        return metadata

    def postprocess_state(
        self, idx_mapping: Tensor, num_sampled: Tensor | int, num_computed_tokens: Tensor | None = None
    ) -> None:
        """Commits what was accepted: as many rows as the request has more computed tokens than before the step."""
        rounds, self.rounds = self.rounds, []
        if rounds:
            assert num_computed_tokens is not None
            _, round = rounds[0]  # groups differ in their blocks alone
            accepted = num_computed_tokens[round.requests] - round.committed
            if self.groups[0].impl == "torch":  # which reads the length of padding too
                accepted = torch.where(round.slots >= 0, accepted, 1)
            for group, round in rounds:
                group.commit(round, accepted)
            self.meter.after_commit(round.requests, accepted, round.slots)
        super().postprocess_state(idx_mapping, 1, num_computed_tokens)
