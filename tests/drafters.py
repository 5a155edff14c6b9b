"""Drafters for tests: they know the text that is to come, and are wrong as often as they are told to be."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from treewy.drafting import Draft, FixedWidths, NodeBudget, Request, TreeShape
from treewy.tree import DraftTree


class KnownText:
    """Hides the coming tokens in its trees: on the right path a child is right with probability `accuracy`.

    Args:
        texts: the whole text of each request, by index.
        shape: `FixedWidths` gives that tree, `NodeBudget` random trees: shapes differ per request and round.
        accuracy: chance that the right token is among the children of a node on the right path.
        vocab: wrong tokens are drawn from 0 .. vocab - 1.
        plain_every: every so many rounds nothing is drafted; 0 for never.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], shape: TreeShape, accuracy: float, vocab: int, plain_every: int = 0
    ) -> None:
        self.shape = shape
        self.observed: dict[int, int] = {}
        self._texts, self._accuracy, self._vocab, self._plain_every = texts, accuracy, vocab, plain_every
        self._rng = random.Random(0)
        self._rounds = 0

    def observe(self, request: Request, hidden: Tensor) -> None:
        self.observed[request.index] = self.observed.get(request.index, 0) + hidden.shape[0]

    def release(self, index: int) -> None:
        self.observed.pop(index, None)

    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        self._rounds += 1
        plain = bool(self._plain_every) and self._rounds % self._plain_every == 0
        return [self._one(request, plain) for request in requests]

    def _one(self, request: Request, plain: bool) -> Draft:
        if plain:
            return Draft(DraftTree.chain(0), request.tokens[-1:])
        if isinstance(self.shape, NodeBudget):
            tree = DraftTree.random(self._rng.randint(1, self.shape.rows), self._rng, depth_bias=0.7)
            tree = tree.truncated(sum(depth <= self.shape.max_depth for depth in tree.depths))
        else:
            assert isinstance(self.shape, FixedWidths)
            tree = DraftTree.from_widths(self.shape.widths)
        coming = self._texts[request.index][len(request.tokens) :]
        tokens = [request.tokens[-1]] + [0] * tree.draft_nodes
        on_path = {0}
        for row in range(len(tree)):
            children = tree.children[row]
            right = coming[tree.depths[row]] if tree.depths[row] < len(coming) else None
            wrong = self._rng.sample([t for t in range(self._vocab) if t != right], len(children))
            for child, token in zip(children, wrong, strict=True):
                tokens[child] = token
            if children and row in on_path and right is not None and self._rng.random() < self._accuracy:
                child = self._rng.choice(children)
                tokens[child] = right
                on_path.add(child)
        return Draft(tree, tokens)
