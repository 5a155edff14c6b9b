"""A small language model as the drafter, of any family: a GDN draft model needs no snapshots either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy.drafting import Draft, Level, Request, TreeShape, grow_drafts
from treewy.transformers.target import HFTarget
from treewy.tree import MAX_ROWS, DraftTree, TreeBatch


class DraftModelDrafter:
    """Drafts with a causal language model that shares the target's tokenizer.

    The draft model is run as a target of its own: the text since the last round is one window, a chain, and is
    committed; every level of the tree is verified in a window that is never committed.

    Args:
        model: the draft model.
        shape: of the trees.
        sampled: draw children from the model's distribution where a request samples.
        num_requests: running requests at most.
    """

    def __init__(
        self, model: PreTrainedModel, shape: TreeShape, *, sampled: bool = False, num_requests: int = 64
    ) -> None:
        self.shape = shape
        self._sampled = sampled
        self._target = HFTarget(model, num_requests, need_gdn=False)

    def observe(self, request: Request, hidden: Tensor) -> None:
        """Nothing to do: `draft` reads the text."""

    def release(self, index: int) -> None:
        """Forgets a request."""
        self._target.release(index)

    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        """One draft per request. Errors of `grow_drafts`."""
        indices = [request.index for request in requests]
        roots = [request.tokens[-1] for request in requests]
        root_logits = self._catch_up(requests)
        parents = [[-1] for _ in requests]
        tokens = [[root] for root in roots]
        column_rows: list[list[int]] = [[0] for _ in requests]

        def next_logits(level: Level) -> Tensor:
            rows = torch.zeros_like(level.tokens)
            for b, (ids, above, valid) in enumerate(
                zip(level.tokens.tolist(), level.parents.tolist(), level.valid.tolist(), strict=True)
            ):
                for n, (token, parent, exists) in enumerate(zip(ids, above, valid, strict=True)):
                    column_rows[b].append(len(parents[b]) if exists else 0)
                    if exists:
                        rows[b, n] = len(parents[b])
                        parents[b].append(column_rows[b][parent])
                        tokens[b].append(token)
            logits = self._target.verify(indices, _padded(tokens), _batch(parents)).logits
            return logits.gather(1, rows.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1]))

        return grow_drafts(
            roots,
            root_logits,
            self.shape,
            next_logits,
            limits=[min(self.shape.max_depth, request.remaining - 1) for request in requests],
            temperatures=[request.sampling.temperature for request in requests],
            sampling=[request.sampling for request in requests] if self._sampled else None,
            generators=[request.generator for request in requests] if self._sampled else None,
        )

    def _catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Commits all of the text but its last token, the root; [B, V] logits of what follows the root."""
        committed = self._target.committed
        for request in requests:
            if not committed[request.index] or len(request.tokens) - len(committed[request.index]) > MAX_ROWS:
                self._target.prefill([request.index], [request.tokens[:-1]])
        chains = [request.tokens[len(committed[request.index]) :] for request in requests]
        logits: dict[int, Tensor] = {}
        only_root = [place for place, chain in enumerate(chains) if len(chain) == 1]
        behind = [place for place, chain in enumerate(chains) if len(chain) > 1]
        for group in filter(None, (only_root, behind)):
            tokens = [chains[place] for place in group]
            parents = [list(range(-1, len(chain) - 1)) for chain in tokens]
            output = self._target.verify([requests[place].index for place in group], _padded(tokens), _batch(parents))
            if group is behind:
                lengths = torch.tensor([len(chain) - 1 for chain in tokens])
                self._target.commit(torch.arange(int(lengths.max())).expand(len(group), -1), lengths)
            for n, place in enumerate(group):
                logits[place] = output.logits[n, len(chains[place]) - 1]
        return torch.stack([logits[place] for place in range(len(chains))])


def _padded(tokens: list[list[int]]) -> Tensor:
    longest = max(map(len, tokens))
    return torch.tensor([[*row, *(0,) * (longest - len(row))] for row in tokens])


def _batch(parents: list[list[int]]) -> TreeBatch:
    return TreeBatch.of([DraftTree(tuple(rows)) for rows in parents])
