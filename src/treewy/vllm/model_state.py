"""What the model runner does around a forward: names the batch's requests before it, commits accepted rows after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from treewy import ops
from treewy.vllm.layer import GatedDeltaNetLayer
from treewy.vllm.metadata import Round, TreeWYMetadata
from treewy.vllm.metrics import Meter, summary
from treewy.vllm.prefix_cache import full_blocks, inputs_at_end, publish

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
        self.rounds: list[tuple[Round, list[GatedDeltaNetLayer]]] = []
        self.meter = Meter(self.running)
        logger.info(summary(self.running))

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request is admitted, for the first time or after preemption."""
        super().add_request(req_index, new_req_data)
        self.running.reset(req_index)

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Builds the step's metadata; arguments as vLLM's."""
        self.running.stage(input_batch.idx_mapping)
        metadata = super().prepare_attn(input_batch, *args, **kwargs)
        self.rounds = []
        if not kwargs.get("for_capture", False):
            by_round: dict[int, tuple[Round, list[GatedDeltaNetLayer]]] = {}
            for name, layer in self.layers.items():
                found = metadata.get(name)
                if isinstance(found, TreeWYMetadata) and found.round is not None:
                    by_round.setdefault(id(found.round), (found.round, []))[1].append(layer)
            self.rounds = list(by_round.values())
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
            for round, layers in rounds:
                accepted = _commit(round, layers, num_computed_tokens)
                if layers[0].index == 0:
                    self.meter.after_commit(round.requests, accepted, round.slots >= 0)
        super().postprocess_state(idx_mapping, 1, num_computed_tokens)


def _commit(round: Round, layers: list[GatedDeltaNetLayer], num_computed_tokens: Tensor) -> Tensor:
    """Returns [B] accepted rows."""
    impl = layers[0].impl
    committed = num_computed_tokens[round.requests.clamp(min=0)]
    accepted = torch.where(round.slots >= 0, committed - round.committed, 1)
    path = torch.arange(round.most, device=accepted.device)
    paths = path.expand(accepted.shape[0], -1)
    full = full_blocks(round, accepted, impl=impl)
    for layer in layers:
        state = layer.state
        inputs = None if full is None else inputs_at_end(state, full, path)
        ops.commit(state, round.window, paths, accepted)
        if full is not None and inputs is not None:
            publish(state, full, inputs, impl=impl)
    return accepted
