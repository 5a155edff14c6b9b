"""A target small enough to enumerate: one GDN layer in float64 between an embedding and an output matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy.generation import TargetOutput
from treewy.ops import GDNDims, GDNParams, Window
from treewy.state import CommitMode, RecurrentState, StateSpec
from treewy.tree import DraftTree, TreeBatch

VOCAB = 7
DIMS = GDNDims(num_k_heads=1, num_v_heads=2, head_k_dim=4, head_v_dim=3)


class ToyTarget:
    """Logits depend on the whole text through the layer's state; there is nothing else to remember it by."""

    def __init__(
        self, mode: CommitMode = "deferred", num_requests: int = 4, max_rows: int = 64, sharpness: float = 3.0
    ) -> None:
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        heads = DIMS.num_v_heads
        self._x, self._a, self._b = random(VOCAB, DIMS.conv_dim), random(VOCAB, heads) - 2, random(VOCAB, heads)
        self._out = sharpness * random(DIMS.value_dim, VOCAB)
        self._params = GDNParams.of(DIMS, random(DIMS.conv_dim, 4), random(heads), random(heads))
        spec = StateSpec(DIMS, 1, mode, max_rows, max_rows - 1, torch.float64, torch.float64)
        self.state = RecurrentState(spec, num_requests)
        self._window: Window | None = None

    @property
    def state_bytes(self) -> int:
        return self.state.spec.bytes_per_request

    def prefill(self, requests: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[TargetOutput]:
        return [self._prefill(request, prompt) for request, prompt in zip(requests, prompts, strict=True)]

    def _prefill(self, request: int, tokens: Sequence[int]) -> TargetOutput:
        """Row by row: every token is a round of its own."""
        self.state.reset(request)
        outputs = []
        for token in tokens:
            outputs.append(self.verify([request], torch.tensor([[token]]), TreeBatch.of([DraftTree.chain(0)])))
            self.commit(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
        return TargetOutput(outputs[-1].logits, torch.cat([output.hidden for output in outputs], dim=1))

    def verify(self, requests: Sequence[int], tokens: Tensor, trees: TreeBatch) -> TargetOutput:
        self._window = self.state.plan(trees, torch.tensor(requests))
        hidden = self.state.verify(0, self._window, self._x[tokens], self._a[tokens], self._b[tokens], self._params)
        return TargetOutput(hidden.flatten(2) @ self._out, hidden.flatten(2))

    def commit(self, path: Tensor, accepted: Tensor) -> None:
        assert self._window is not None
        self.state.commit(self._window, path, accepted)
        self._window = None

    def release(self, request: int) -> None:
        self.state.reset(request)

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """[V]: what the target says after this text, from scratch."""
        fresh = ToyTarget("store_all", 1, 1)
        fresh._out = self._out
        return fresh.prefill([0], [tokens])[0].logits[0, 0]
