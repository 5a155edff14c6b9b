"""A small language model as the drafter, of any family: a GDN draft model needs no snapshots either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

    Raises:
        ValueError: a model that cannot be run, see `HFTarget`.
    """

    def __init__(self, model: PreTrainedModel, shape: TreeShape, *, sampled: bool = False) -> None:
        self.shape = shape
        self._sampled = sampled
        # The longest chain is what one round can emit, and the root before it.
        self._longest_chain = min(shape.max_depth, MAX_ROWS - 2) + 2
        self._target = self._sized(model, 1)

    def _sized(self, model: PreTrainedModel, num_requests: int) -> HFTarget:
        rows = max(self.shape.rows, self._longest_chain)
        return HFTarget(
            model, num_requests, max_rows=rows, max_depth=self._longest_chain - 1, mode="reconstruct", need_gdn=False
        )

    def observe(self, request: Request, hidden: Tensor) -> None:
        """Nothing to do: `draft` reads the text."""

    def release(self, index: int) -> None:
        """Forgets a request."""
        if index < len(self._target.committed):
            self._target.release(index)

    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        """One draft per request. Errors of `grow_drafts`."""
        indices = [request.index for request in requests]
        if max(indices) >= len(self._target.committed):
            self._target = self._sized(self._target.model, max(indices) + 1)  # and every text is run again
        roots = [request.tokens[-1] for request in requests]
        root_logits = self._catch_up(requests)
        columns = [_Columns(root) for root in roots]

        def next_logits(level: Level) -> Tensor:
            fields = zip(level.tokens.tolist(), level.parents.tolist(), level.valid.tolist(), strict=True)
            windows = [mine.window(*theirs) for mine, theirs in zip(columns, fields, strict=True)]
            logits = self._target.verify(
                indices, _padded([window.tokens for window in windows]), _batch([window.parents for window in windows])
            ).logits
            rows = torch.tensor([window.new_rows for window in windows], device=logits.device)
            return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))

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
            if (
                not committed[request.index]
                or len(request.tokens) - len(committed[request.index]) > self._longest_chain
            ):
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


class _Window(NamedTuple):
    tokens: list[int]
    parents: list[int]
    new_rows: list[int]
    """Row of each node of the level; 0 in padding."""


class _Columns:
    """Nodes of one request's growing tree, numbered as `Level` numbers them."""

    def __init__(self, root_token: int) -> None:
        self._tokens, self._parents = [root_token], [-1]

    def window(self, tokens: list[int], parents: list[int], valid: list[bool]) -> _Window:
        """Takes in a level; its nodes and their ancestors as a window. Nodes that growth has dropped are not in it."""
        first = len(self._tokens)
        self._tokens += tokens
        self._parents += parents
        kept = {0}
        for column, exists in enumerate(valid, start=first):
            while exists and column not in kept:
                kept.add(column)
                column = self._parents[column]
        rows = {column: row for row, column in enumerate(sorted(kept))}
        return _Window(
            [self._tokens[column] for column in rows],
            [rows.get(self._parents[column], -1) for column in rows],
            [rows.get(first + n, 0) for n in range(len(tokens))],
        )


def _padded(tokens: list[list[int]]) -> Tensor:
    longest = max(map(len, tokens))
    return torch.tensor([[*row, *(0,) * (longest - len(row))] for row in tokens])


def _batch(parents: list[list[int]]) -> TreeBatch:
    return TreeBatch.of([DraftTree(tuple(rows)) for rows in parents])
