"""Drafting: what a drafter is, and how a tree grows level by level from the logits of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from treewy.acceptance import SamplingParams
from treewy.tree import DraftTree


@dataclass
class Request:
    """One sequence that is being decoded."""

    index: int
    """Place among the running requests; constant while the request runs."""
    tokens: list[int]
    """Prompt and emitted tokens; the last one is the root of the next window."""
    prompt_length: int
    max_new_tokens: int
    sampling: SamplingParams
    generator: torch.Generator
    """This request's own randomness, so that its tokens do not depend on its neighbours."""
    finish_reason: str | None = None
    scores: list[Tensor] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - (len(self.tokens) - self.prompt_length)


class Draft(NamedTuple):
    """What a drafter proposes for one request and one round."""

    tree: DraftTree
    tokens: list[int]
    """Token of each row; row 0 is the root, the last emitted token. Siblings have different tokens."""
    probs: Tensor | None = None
    """[rows, V] fp32, the distribution that each row's children were drawn from without replacement, in row order.
    None where children are chosen, not drawn (top-k, n-gram): the tree is then a function of the text."""


class Drafter(Protocol):
    """Proposes draft trees. One drafter serves all running requests."""

    def observe(self, request: Request, hidden: Tensor) -> None:
        """Takes in newly committed positions, after the prompt and after every round.

        Args:
            request: `request.tokens` already holds the tokens that follow these positions: the last `len(hidden)`.
            hidden: [n, D] the target's last hidden states (after its final norm) of these positions.
        """

    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        """One draft per request; the bare root (`DraftTree.chain(0)`) where there is nothing to propose."""

    def release(self, index: int) -> None:
        """Forgets the request with this index."""


@dataclass(frozen=True)
class FixedWidths:
    """`draft_tree_widths`: every node at depth d gets `widths[d]` children; all ones is a chain."""

    widths: tuple[int, ...]


@dataclass(frozen=True)
class NodeBudget:
    """`draft_tree_budget`: best-first growth by cumulative draft probability, so shapes differ per request and round."""

    rows: int
    max_depth: int


TreeShape = FixedWidths | NodeBudget


class Level(NamedTuple):
    """The nodes of one depth that a drafter is asked to run through its model.

    Nodes that were run are numbered in columns: the root is column 0, then each level's columns in order, padded to the
    same number for every request.
    """

    depth: int
    tokens: Tensor
    """[B, n] int64, 0 in padding."""
    parents: Tensor
    """[B, n] int64, column of each node's parent; 0 in padding."""
    valid: Tensor
    """[B, n] bool, False in padding."""


NextLogits = Callable[[Level], Tensor]
"""Runs one level through the draft model: [B, n, V] logits of what follows each node."""
