"""Acceptance: how far the target follows a draft tree, greedily or by lossless sampling.

Everything here is for one request. A walk starts at the root, goes down as long as the target agrees with a child, and
ends with one bonus token of the target's own. A round thus emits `len(path)` tokens: those of the draft nodes on the
path, and the bonus token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from treewy.tree import DraftTree

_SMALLEST_TEMPERATURE = 1e-5
_NUCLEUS_HEAD = 256


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen from the target's logits.

    Args:
        temperature: divides the logits; 0 takes the most probable token (greedy) and ignores the rest.
        top_p: keeps the most probable tokens that together reach this probability; 1 keeps all.
        top_k: keeps this many of the most probable tokens; 0 keeps all.
        seed: of the request's own random generator; None takes a fresh one.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = self.temperature
        if not (temperature == 0 or _SMALLEST_TEMPERATURE <= temperature < math.inf):
            raise ValueError(
                f"temperature {temperature}: it is 0 or a finite number from {_SMALLEST_TEMPERATURE:g}; "
                "use 0 for greedy decoding"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: it is above 0 and at most 1; use 1 to keep all tokens")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ValueError(f"top_k {self.top_k}: it is a whole number from 0; use 0 to keep all tokens")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed {self.seed}: it is from 0 to 2**63 - 1; use None for a fresh one")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0


def target_scores(logits: Tensor, params: SamplingParams) -> Tensor:
    """The scores whose softmax tokens are sampled from: temperature, top-k, top-p, as in Hugging Face transformers.

    Tokens that tie with the last one of top-k all stay; top-p always keeps one token. Greedy `params` change nothing.

    Args:
        logits: [..., V], any floating dtype; -inf forbids a token.
        params: how tokens are chosen.

    Returns:
        [..., V] fp32 scores, -inf for tokens that are never sampled.
    """
    scores = logits.float()
    if params.greedy:
        return scores
    scores = scores / params.temperature
    if params.top_k:
        smallest = scores.topk(min(params.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < smallest, -math.inf)
    if params.top_p < 1:
        head = min(params.top_k or _NUCLEUS_HEAD, _NUCLEUS_HEAD) + 1
        scores = scores.masked_fill(~_nucleus(scores, params.top_p, head), -math.inf)
    return scores


def target_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are sampled from: the softmax of `target_scores`.

    Args:
        logits: [..., V], any floating dtype; -inf forbids a token.
        params: must not be greedy.

    Returns:
        [..., V] fp32 probabilities.

    Raises:
        ValueError: greedy `params`, which ask for an argmax and no distribution.
    """
    if params.greedy:
        raise ValueError("temperature 0 has no distribution to sample from; take the argmax and accept_greedy")
    return target_scores(logits, params).softmax(-1)


def choose(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token from the logits [V]: the most probable one, or one drawn from `target_distribution`."""
    if params.greedy:
        return int(logits.argmax())
    return int(draw(target_distribution(logits, params), generator))


def _nucleus(scores: Tensor, top_p: float, head: int) -> Tensor:
    """[..., V] bool: a token stays where the tokens above it hold less than `top_p`."""
    if scores.shape[-1] > head:
        # A full sort costs many times this head, which decides unless it is too short or would cut through a tie.
        top = scores.topk(head).values
        probs = (top - scores.logsumexp(-1, keepdim=True)).double().exp()
        count = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True)
        smallest = top.gather(-1, count - 1)
        if bool((top.gather(-1, count.clamp(max=head - 1)) < smallest).all()):
            return scores >= smallest
    ascending, tokens = scores.sort(dim=-1, stable=True)
    stays = ascending.softmax(-1).cumsum(-1) > 1 - top_p
    stays[..., -1] = True
    return torch.empty_like(stays).scatter_(-1, tokens, stays)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one token per row with probability proportional to its weight.

    A token of weight 0 is never drawn, and one uniform float64 number per row is taken from `generator`.

    Args:
        weights: [..., V], >= 0, a positive sum in every row.
        generator: on any device.

    Returns:
        [...] int64 tokens.
    """
    cumulative = weights.double().cumsum(-1)
    uniform = torch.rand(*weights.shape[:-1], 1, generator=generator, device=generator.device, dtype=torch.float64)
    below = uniform.to(weights.device) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, below, right=True).squeeze(-1)


def _happens(probability: float, generator: torch.Generator) -> bool:
    return torch.rand((), generator=generator, device=generator.device, dtype=torch.float64).item() < probability


class Acceptance(NamedTuple):
    """What one round accepts of a draft tree."""

    path: tuple[int, ...]
    """Accepted rows, root first; never empty."""
    token: int
    """The bonus token, the target's own, which is emitted after the path and is the next root."""


def accept_greedy(tree: DraftTree, tokens: Sequence[int], best: Sequence[int]) -> Acceptance:
    """Follows the target's most probable tokens down the tree.

    Args:
        tree: the draft tree.
        tokens: token of each row.
        best: the target's most probable token after each row.

    Raises:
        ValueError: lengths that differ from the tree's, or siblings with equal tokens.
    """
    _check(tree, tokens, len(best), "best")
    path = [0]
    while (child := _child(tree, tokens, path[-1], best[path[-1]])) is not None:
        path.append(child)
    return Acceptance(tuple(path), best[path[-1]])


def accept_sampled(
    tree: DraftTree, tokens: Sequence[int], target: Tensor, draft: Tensor | None, generator: torch.Generator
) -> Acceptance:
    """Lossless acceptance: the emitted tokens are distributed exactly as if each were sampled from the target.

    Siblings that were drawn without replacement are offered one after the other (recursive rejection sampling). With p
    the target's and q the draft's distribution at a node, child x is accepted with probability min(1, p(x) / q(x)). If
    it is not, p becomes the normalised positive part of p - q, q loses x and is normalised again, and the next sibling
    is offered. The bonus token is drawn from the p that is left.

    Children that were chosen, not drawn, come from point masses, for which the same rule reduces to: draw y from p, go
    down if y is a child, emit y if it is not.

    Source: for a chain, Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).

    Args:
        tree: the draft tree.
        tokens: token of each row. Drawn siblings stand in the order in which they were drawn.
        target: [rows, V] probabilities of what follows each row, from `target_distribution`.
        draft: [rows, V] distribution that each row's children were drawn from, without replacement; None if they were
            chosen without chance. Rows without children are not read.
        generator: the only source of randomness; on any device.

    Raises:
        ValueError: lengths that differ from the tree's, or siblings with equal tokens.
    """
    _check(tree, tokens, target.shape[0], "target")
    if draft is not None and draft.shape != target.shape:
        raise ValueError(f"draft has shape {tuple(draft.shape)}, target {tuple(target.shape)}; they must be the same")
    path = [0]
    while True:
        row = path[-1]
        if draft is None or not tree.children[row]:
            token = int(draw(target[row], generator))
            child = _child(tree, tokens, row, token)
        else:
            child, left = _offer(tree.children[row], tokens, target[row], draft[row], generator)
            token = int(draw(left, generator)) if child is None else tokens[child]
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)


def _offer(
    children: Sequence[int], tokens: Sequence[int], target: Tensor, draft: Tensor, generator: torch.Generator
) -> tuple[int | None, Tensor]:
    """The first accepted child, or None and the weights [V] that the bonus token is drawn from."""
    p, q = target.double(), draft.double()
    p = p / p.sum()
    for child in children:
        token = tokens[child]
        if not q[token] > 0:
            # q cannot have drawn it (what q still held vanished in rounding), so it counts as chosen: a point mass.
            q = torch.zeros_like(q)
            q[token] = 1
        q = q / q.sum()
        if _happens(float(p[token] / q[token]), generator):
            return child, p
        left = (p - q).relu()
        total = left.sum()
        if total > 0:  # otherwise p and q agree to the last bit, and this rejection is rounding
            p = left / total
        q[token] = 0
    return None, p


def _child(tree: DraftTree, tokens: Sequence[int], row: int, token: int) -> int | None:
    return next((child for child in tree.children[row] if tokens[child] == token), None)


def _check(tree: DraftTree, tokens: Sequence[int], rows: int, what: str) -> None:
    for name, length in ("tokens", len(tokens)), (what, rows):
        if length != len(tree):
            raise ValueError(f"{name} has {length} rows, the tree {len(tree)}; they must be the same")
    if len(set(zip(tree.parents, tokens, strict=True))) < len(tree):
        raise ValueError("siblings have equal tokens; every child of a node must stand for another token")
