"""Drafting: what a drafter is, and how a tree grows level by level from the logits of its nodes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from treewy.acceptance import SamplingParams, draw, target_distribution
from treewy.tree import MAX_ROWS, DraftTree


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

    @property
    def shape(self) -> TreeShape:
        """Bounds every tree it proposes, so that the state can be sized."""

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
    """`draft_tree_widths`: every node at depth d gets `widths[d]` children; all ones is a chain.

    Raises:
        ValueError: a width below 1, or more than 64 rows.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(int(width) for width in self.widths))
        DraftTree.from_widths(self.widths)

    @property
    def rows(self) -> int:
        """Rows of the full tree, root included."""
        return len(DraftTree.from_widths(self.widths))

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.widths)


@dataclass(frozen=True)
class NodeBudget:
    """`draft_tree_budget`: best-first growth by cumulative draft probability, so shapes differ per request and round.

    Raises:
        ValueError: `rows` (root included) outside 1..64, or `max_depth` below 1.
    """

    rows: int
    max_depth: int

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"draft_tree_budget of {self.rows} rows: it is from 1 to {MAX_ROWS}, root included")
        if self.max_depth < 1:
            raise ValueError(f"draft_tree_budget with max_depth {self.max_depth}: it is 1 or more")


TreeShape = FixedWidths | NodeBudget

_LEAST_DRAFT_TEMPERATURE = 0.7
"""Measured: on held-out text the shipped model's greedy best-first trees accept 3 % more than with scores at 1."""


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


# Growing trees from the logits of a draft model


def grow_drafts(
    root_tokens: Sequence[int],
    root_logits: Tensor,
    shape: TreeShape,
    next_logits: NextLogits,
    *,
    limits: Sequence[int] | None = None,
    temperatures: Sequence[float] | None = None,
    sampling: Sequence[SamplingParams] | None = None,
    generators: Sequence[torch.Generator] | None = None,
) -> list[Draft]:
    """Grows one draft tree per request, level by level; nodes without children are not run through the model.

    With `FixedWidths` a node's children are the most probable tokens or, for requests whose sampling is not greedy,
    drawn without replacement from the draft's `target_distribution`. With `NodeBudget` the tree is exactly the `rows`
    nodes of highest probability given the root, and only nodes that can still be among them are run. Siblings stand
    together, the best or first drawn one first.

    Args:
        root_tokens: [B] last emitted token of each request.
        root_logits: [B, V] the draft model's logits of what follows each root.
        shape: of every tree.
        next_logits: runs one level through the draft model.
        limits: [B] greatest depth of each request's tree; None for no limit but the shape's. 0 gives the bare root.
        temperatures: [B] at which the target chooses tokens, 0 for greedy; None for 1. A `NodeBudget` scores nodes with
            the draft's distribution at this temperature, but not below 0.7: of a token that the target is certain to
            choose or not, the drafter is still uncertain.
        sampling: [B] how each request samples, or None to choose all children. Needs `generators`.
        generators: [B] source of each request's draws. Needs `sampling`.

    Returns:
        One draft per request, with `probs` where its children were drawn. A node has fewer children than the width asks
        for where fewer tokens have probability.

    Raises:
        ValueError: lengths that differ, `sampling` without `generators` or the reverse, or draws under a `NodeBudget`.
    """
    batch = len(root_tokens)
    if (sampling is None) != (generators is None):
        raise ValueError(
            "sampling and generators belong together; give both to draw children or neither to choose them"
        )
    for name, values in (
        ("root_logits", root_logits),
        ("limits", limits),
        ("temperatures", temperatures),
        ("sampling", sampling),
        ("generators", generators),
    ):
        if values is not None and len(values) != batch:
            raise ValueError(f"{name} has length {len(values)} for {batch} root tokens; they must be the same")
    if not batch:
        return []
    drawn = [b for b in range(batch) if sampling is not None and not sampling[b].greedy]
    if isinstance(shape, NodeBudget):
        if drawn:
            raise ValueError(
                "children cannot be drawn under a NodeBudget: to keep a node because of the probability of the token "
                "that was drawn would bias the emitted tokens; leave sampling out to choose the children (lossless at "
                "any temperature too), or use FixedWidths"
            )
        depths = [shape.max_depth if limits is None else min(limits[b], shape.max_depth) for b in range(batch)]
        sharpness = [1 / max(t, _LEAST_DRAFT_TEMPERATURE) for t in temperatures or [1.0] * batch]
        return _grow_best_first(root_tokens, root_logits, shape.rows, depths, next_logits, sharpness)
    deepest = len(shape.widths)
    depths = [deepest if limits is None else max(0, min(limits[b], deepest)) for b in range(batch)]
    draws = {b: (sampling[b], generators[b]) for b in drawn} if sampling is not None and generators is not None else {}
    return _grow_fixed(root_tokens, root_logits, shape.widths, depths, next_logits, draws)


def _grow_fixed(
    root_tokens: Sequence[int],
    root_logits: Tensor,
    widths: Sequence[int],
    depths: Sequence[int],
    next_logits: NextLogits,
    draws: dict[int, tuple[SamplingParams, torch.Generator]],
) -> list[Draft]:
    batch, vocab = root_logits.shape
    device = root_logits.device
    widths = [min(width, vocab) for width in widths[: max(depths)]]
    reach = torch.tensor(depths, device=device)[:, None, None]
    logits = root_logits[:, None]
    exists = torch.ones(batch, 1, dtype=torch.bool, device=device)
    first_column = 0
    token_levels: list[Tensor] = []
    exists_levels: list[Tensor] = []
    probs: dict[int, list[Tensor]] = {b: [] for b in draws}
    alike: dict[SamplingParams, list[int]] = {}
    for b, (params, _) in draws.items():
        alike.setdefault(replace(params, seed=None), []).append(b)
    for depth, width in enumerate(widths):
        nodes = logits.shape[1]
        # max is twice as fast as argmax or topk(1).
        tokens = logits.max(-1, keepdim=True).indices if width == 1 else logits.topk(width).indices
        children = (exists[:, :, None] & (reach > depth)).expand(-1, -1, width)
        if draws:
            children = children.clone()
            for params, group in alike.items():
                # Past its limit a request draws no more, or its tokens would depend on how deep its neighbours go.
                members = [b for b in group if depths[b] > depth]
                for b, q in zip(members, target_distribution(logits[members], params), strict=True):
                    tokens[b], has_mass = _draw_children(q, width, draws[b][1])
                    children[b] &= has_mass
                    probs[b].append(q)
        token_levels.append(tokens.flatten(1))
        exists_levels.append(exists := children.flatten(1))
        if depth + 1 < len(widths):
            run = exists & (reach[:, 0] > depth + 1)
            parents = torch.arange(first_column, first_column + nodes, device=device).repeat_interleave(width)
            first_column += nodes
            logits = next_logits(Level(depth + 1, token_levels[-1] * run, parents * run, run))

    drafts = []
    all_tokens = torch.cat(token_levels, 1).tolist() if widths else [[]] * batch
    all_exist = torch.cat(exists_levels, 1).tolist() if widths else [[]] * batch
    for b, root in enumerate(root_tokens):
        full = DraftTree.from_widths(widths[: depths[b]])
        kept = [0, *(column for column in range(1, len(full)) if all_exist[b][column - 1])]
        tree = full
        if len(kept) < len(full):
            rows = {column: row for row, column in enumerate(kept)}
            tree = DraftTree((-1, *(rows[full.parents[column]] for column in kept[1:])))
        tokens_b = [int(root), *(all_tokens[b][column - 1] for column in kept[1:])]
        drafts.append(Draft(tree, tokens_b, _rows_of(probs[b], kept, tree) if b in draws and len(tree) > 1 else None))
    return drafts


def _draw_children(q: Tensor, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [n, width] drawn without replacement from the rows of q [n, V], and whether there was one left to draw."""
    left = q.double()
    tokens, has_mass = [], []
    for _ in range(width):
        token = draw(left, generator).clamp_(max=q.shape[-1] - 1)[:, None]
        tokens.append(token)
        has_mass.append(left.gather(-1, token) > 0)
        left.scatter_(-1, token, 0)
    return torch.cat(tokens, -1), torch.cat(has_mass, -1)


def _rows_of(levels: list[Tensor], kept: list[int], tree: DraftTree) -> Tensor:
    """[rows, V]: distributions of columns as those of rows; zero where a row has no children."""
    columns = torch.cat(levels)
    parents = [row for row in range(len(tree)) if tree.children[row]]
    probs = columns.new_zeros(len(tree), columns.shape[1])
    probs[parents] = columns[[kept[row] for row in parents]]
    return probs


class _BestFirst:
    """One request's growth under a node budget. Candidates are numbered as they are found: a parent-first order."""

    def __init__(self, root_token: int, rows: int, max_depth: int) -> None:
        self.rows, self.max_depth = rows, max_depth
        self.parents, self.tokens, self.log_probs, self.depths = [-1], [root_token], [0.0], [0]
        self.best = [(0.0, 0)]
        """(cost, candidate) of the best `rows` so far, in order; the cost is -log(probability given the root)."""

    def level(self, depth: int) -> list[int]:
        """Candidates of this depth that may still have children in the tree; the last of `best` has no room for one."""
        if depth >= self.max_depth:
            return []
        return [node for _, node in self.best[: self.rows - 1] if self.depths[node] == depth]

    def add_children(self, nodes: list[int], log_probs: list[list[float]], tokens: list[list[int]]) -> None:
        """Takes in the children of `nodes`, most probable first, as far as they are among the best."""
        costs = {node: cost for cost, node in self.best}
        bound = self.best[-1][0] if len(self.best) == self.rows else math.inf
        found: list[tuple[float, int]] = []
        for node, node_log_probs, node_tokens in zip(nodes, log_probs, tokens, strict=False):  # columns may be padded
            for log_prob, token in zip(node_log_probs, node_tokens, strict=True):
                cost = costs[node] - log_prob
                if cost >= bound:
                    break
                found.append((cost, len(self.parents)))
                self.parents.append(node)
                self.tokens.append(int(token))
                self.log_probs.append(log_prob)
                self.depths.append(self.depths[node] + 1)
        self.best = sorted(self.best + found)[: self.rows]

    def draft(self) -> Draft:
        nodes = sorted(node for _, node in self.best)
        place = {node: index for index, node in enumerate(nodes)}
        parents = [place.get(self.parents[node], -1) for node in nodes]
        tree, order = DraftTree.best_first(parents, [self.log_probs[node] for node in nodes], self.rows)
        return Draft(tree, [self.tokens[nodes[index]] for index in order])


def _grow_best_first(
    root_tokens: Sequence[int],
    root_logits: Tensor,
    rows: int,
    depths: Sequence[int],
    next_logits: NextLogits,
    sharpness: Sequence[float],
) -> list[Draft]:
    requests = [_BestFirst(int(root), rows, depth) for root, depth in zip(root_tokens, depths, strict=True)]
    columns = [{0: 0} for _ in requests]
    levels = [request.level(0) for request in requests]
    logits, first_column, depth = root_logits[:, None], 1, 0
    scale = torch.tensor(sharpness, device=logits.device)[:, None, None]
    while any(levels):
        logits = logits.float() * scale
        # A node of this depth stands behind as many ancestors, so no more children than these can be in the tree.
        top = logits.topk(min(rows - 1 - depth, logits.shape[-1]))
        log_probs = (top.values - logits.logsumexp(-1, keepdim=True)).clamp_(max=0)
        # One transfer for both; float64 holds every token exactly.
        log_probs_list, tokens_list = torch.stack([log_probs.double(), top.indices.double()]).tolist()
        for b, request in enumerate(requests):
            request.add_children(levels[b], log_probs_list[b], tokens_list[b])
        depth += 1
        levels = [request.level(depth) for request in requests]
        nodes = max(map(len, levels))
        if not nodes:
            break
        fields = torch.zeros(3, len(requests), nodes, dtype=torch.int64)
        entries = []
        for b, (request, level) in enumerate(zip(requests, levels, strict=True)):
            padding = [0] * (nodes - len(level))
            entries.append([request.tokens[node] for node in level] + padding)
            entries.append([columns[b][request.parents[node]] for node in level] + padding)
            entries.append([1] * len(level) + padding)
            columns[b].update((node, first_column + place) for place, node in enumerate(level))
        fields = torch.tensor(entries, dtype=torch.int64, device=logits.device).view(len(requests), 3, nodes)
        first_column += nodes
        logits = next_logits(Level(depth, fields[:, 0], fields[:, 1], fields[:, 2].bool()))
    return [request.draft() for request in requests]


# Drafting without a model


class NgramDrafter:
    """Proposes what followed the last tokens earlier in the same text: prompt lookup, as a tree.

    The earlier occurrences of the text's last `max_ngram` tokens, then those of shorter n-grams down to `min_ngram`,
    vote for their continuations, with more weight for longer matches. The best `shape.rows` nodes make the tree.

    Args:
        shape: budget of every tree.
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, shape: NodeBudget, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram {min_ngram}, max_ngram {max_ngram}: it takes 1 <= min_ngram <= max_ngram")
        self.shape, self.max_ngram, self.min_ngram = shape, max_ngram, min_ngram
        self._indexes: dict[int, _NgramIndex] = {}

    def observe(self, request: Request, hidden: Tensor) -> None:
        """Takes in the tokens that are new since the last call; `hidden` is not read."""
        self._index(request)

    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        """One draft per request, no deeper than what it may still emit; the bare root where nothing repeats."""
        return [self._draft(request) for request in requests]

    def release(self, index: int) -> None:
        """Forgets the request with this index; one that is not known is no error."""
        self._indexes.pop(index, None)

    def _index(self, request: Request) -> _NgramIndex:
        index = self._indexes.setdefault(request.index, _NgramIndex(range(self.min_ngram, self.max_ngram + 1)))
        index.extend(request.tokens)
        return index

    def _draft(self, request: Request) -> Draft:
        tokens, votes = request.tokens, self._index(request).votes(request.tokens)
        # A round emits one token more than it accepts draft nodes.
        max_depth = min(self.shape.max_depth, request.remaining - 1)
        parents: list[int] = []
        nodes: list[int] = []
        log_probs: list[float] = []
        # (cost, order of discovery, parent, token, log-probability, depth, votes)
        frontier = [(0.0, 0, -1, tokens[-1], 0.0, 0, votes)]
        found = 1
        while frontier and len(nodes) < self.shape.rows:
            cost, _, parent, token, log_prob, depth, votes = heapq.heappop(frontier)
            row = len(nodes)
            parents.append(parent)
            nodes.append(token)
            log_probs.append(log_prob)
            if depth >= max_depth:
                continue
            children: dict[int, list[tuple[int, float]]] = {}
            for end, weight in votes:
                if end + depth < len(tokens):
                    children.setdefault(tokens[end + depth], []).append((end, weight))
            total = sum(weight for _, weight in votes) + _NOVELTY
            for child, child_votes in children.items():
                child_log_prob = math.log(sum(weight for _, weight in child_votes) / total)
                entry = (cost - child_log_prob, found, row, child, child_log_prob, depth + 1, child_votes)
                heapq.heappush(frontier, entry)
                found += 1
        tree, order = DraftTree.best_first(parents, log_probs, self.shape.rows)
        return Draft(tree, [nodes[index] for index in order])


_NOVELTY = 8.0
"""Weight of a continuation that the text has not shown yet, so that the votes make no certainty."""
_MATCH_WEIGHT = 4.0
"""An occurrence that matches one token more weighs this many times more."""
_MAX_VOTES = 256
"""Occurrences that vote, the most recent of the longest n-grams first."""


class _NgramIndex:
    """Where every n-gram of one text ends."""

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths
        self.length = 0
        self.ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in the tokens past those that are known."""
        for end in range(self.length + 1, len(tokens) + 1):
            for n in self.lengths[: end - self.lengths.start + 1]:
                self.ends.setdefault(tuple(tokens[end - n : end]), []).append(end)
        self.length = max(self.length, len(tokens))

    def votes(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """(end, weight) of earlier occurrences of the text's last tokens: `tokens[end]` is what followed."""
        votes: dict[int, float] = {}
        for n in reversed(self.lengths):
            for end in reversed(self.ends.get(tuple(tokens[-n:]), ())):
                if len(votes) >= _MAX_VOTES:
                    break
                if end < len(tokens) and end not in votes:
                    votes[end] = _MATCH_WEIGHT**n
        return list(votes.items())
