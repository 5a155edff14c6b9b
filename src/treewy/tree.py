"""Topology of one draft window: which row follows which.

Row 0 is the root (the last emitted token, always accepted), rows 1..N are draft nodes. Rows are in level order: a
parent stands before its child and depth never decreases. Every prefix of the rows is then itself a valid tree, so a
budget that cannot hold the whole window cuts it short instead of giving up speculation.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ROWS = 64
"""Rows of a window, root included: an ancestor set is one 64-bit mask."""


@dataclass(frozen=True)
class DraftTree:
    """A draft tree in level order.

    Args:
        parents: parent row of each row; -1 for row 0, which is the root.

    Raises:
        ValueError: no rows, more than 64 rows, a parent that does not stand before its child, or rows out of level
            order.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))
        _check_rows(len(self.parents))
        if self.parents[0] != -1:
            raise ValueError(f"row 0 is the root and has parent -1, not {self.parents[0]}")
        depths = [0]
        for row, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < row:
                raise ValueError(
                    f"row {row} has parent {parent}; a parent stands before its child, so 0 <= parent < {row}"
                )
            depths.append(depths[parent] + 1)
            if depths[row] < depths[row - 1]:
                raise ValueError(
                    f"row {row} has depth {depths[row]} after a row of depth {depths[row - 1]}; rows are in level "
                    "order (DraftTree.level_order() brings any parent-first order into it)"
                )

    # Constructors

    @staticmethod
    def chain(draft_nodes: int) -> DraftTree:
        """A chain of `draft_nodes` nodes below the root; 0 gives the bare root, which is plain decoding."""
        if draft_nodes < 0:
            raise ValueError(f"a chain has 0 or more draft nodes, not {draft_nodes}")
        _check_rows(draft_nodes + 1)
        return DraftTree.from_widths((1,) * draft_nodes)

    @staticmethod
    def from_widths(widths: Sequence[int]) -> DraftTree:
        """The full tree that branches `widths[d]` ways at depth d: (3, 3, 3) has 1 + 3 + 9 + 27 = 40 rows."""
        return _from_widths(tuple(int(width) for width in widths))

    @staticmethod
    def level_order(parents: Sequence[int]) -> tuple[DraftTree, list[int]]:
        """Brings nodes in any parent-first order into level order.

        Returns:
            The tree, and for each of its rows the index that the row had in `parents`.
        """
        depths: list[int] = []
        for row, parent in enumerate(parents):
            if not (parent == -1 if row == 0 else 0 <= parent < row):
                raise ValueError(f"row {row} has parent {parent}; row 0 has parent -1, any other 0 <= parent < {row}")
            depths.append(depths[parent] + 1 if row else 0)
        order = sorted(range(len(parents)), key=depths.__getitem__)
        new_row = {old: new for new, old in enumerate(order)}
        return DraftTree(tuple(new_row.get(parents[old], -1) for old in order)), order

    @staticmethod
    def best_first(
        parents: Sequence[int], log_probs: Sequence[float], budget: int, max_depth: int | None = None
    ) -> tuple[DraftTree, list[int]]:
        """Grows the tree of highest total probability from scored candidates, best first.

        Args:
            parents: candidates in any parent-first order, candidate 0 the root with parent -1.
            log_probs: log-probability of each candidate given its parent (<= 0; the root's is ignored). The score of a
                node is the sum along its path, so a parent never scores below its child and the result is
                ancestor-closed.
            budget: rows of the result, root included, at most 64.
            max_depth: deepest draft node that is taken; None for no limit.

        Returns:
            The tree, and for each of its rows the index of its candidate. Siblings stand together, best first.
        """
        _check_rows(budget, "a node budget")
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if not (parent == -1 if node == 0 else 0 <= parent < node):
                raise ValueError(f"candidate {node} has parent {parent}; candidates stand in a parent-first order")
            if node and not log_probs[node] <= 0:
                raise ValueError(f"candidate {node} has log-probability {log_probs[node]}, which is not <= 0")
            children.setdefault(parent, []).append(node)
        taken: list[int] = []
        frontier: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        while frontier and len(taken) < budget:
            cost, node, depth = heapq.heappop(frontier)
            taken.append(node)
            if max_depth is None or depth < max_depth:
                for child in children.get(node, ()):
                    heapq.heappush(frontier, (cost - log_probs[child], child, depth + 1))
        taken_children: dict[int, list[int]] = {}
        for node in taken[1:]:
            taken_children.setdefault(parents[node], []).append(node)
        order = [0]
        for node in order:
            order += taken_children.get(node, ())
        rows = {node: row for row, node in enumerate(order)}
        return DraftTree((-1, *(rows[parents[node]] for node in order[1:]))), order

    @staticmethod
    def random(rows: int, rng: random.Random, *, depth_bias: float = 0.5) -> DraftTree:
        """A random tree of `rows` rows; `depth_bias` 1 gives a chain, 0 a uniformly random recursive tree."""
        _check_rows(rows)
        parents = [-1]
        for row in range(1, rows):
            parents.append(row - 1 if rng.random() < depth_bias else rng.randrange(row))
        return DraftTree.level_order(parents)[0]

    # Facts

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def draft_nodes(self) -> int:
        """N: rows without the root."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each row; the root has 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Depth of the deepest row: the most draft nodes that one round can accept."""
        return self.depths[-1]

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Ancestor-or-self set of each row as a 64-bit mask: bit i is set where row i is on the path to the row."""
        masks: list[int] = []
        for row, parent in enumerate(self.parents):
            masks.append((masks[parent] if row else 0) | 1 << row)
        return tuple(masks)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Child rows of each row, in row order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(row)
        return tuple(map(tuple, children))

    def conv_ancestors(self, width: int = 4) -> tuple[tuple[int, ...], ...]:
        """The `width - 1` nearest proper ancestors of each row, nearest first: its causal convolution window.

        Negative codes reach into the committed inputs: -1 is the input before the root's, -2 the one before that.
        """
        codes: list[tuple[int, ...]] = []
        for parent in self.parents:
            nearer = (parent, *codes[parent]) if parent >= 0 else tuple(range(-1, -width, -1))
            codes.append(nearer[: width - 1])
        return tuple(codes)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from the root to `row`, both included."""
        if not 0 <= row < len(self):
            raise ValueError(f"row {row} is not in a tree of {len(self)} rows")
        path = [row]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def truncated(self, rows: int) -> DraftTree:
        """The first `rows` rows, themselves a valid tree; the tree itself where it has no more than that."""
        _check_rows(rows, "a truncated window")
        return self if rows >= len(self) else DraftTree(self.parents[:rows])

    def __str__(self) -> str:
        lines = ["0"]
        self._draw(0, "", lines)
        return "\n".join(lines)

    def _draw(self, row: int, indent: str, lines: list[str]) -> None:
        children = self.children[row]
        for child in children:
            last = child == children[-1]
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{child}")
            self._draw(child, indent + ("   " if last else "│  "), lines)


@lru_cache(maxsize=256)
def _from_widths(widths: tuple[int, ...]) -> DraftTree:
    parents, level = [-1], [0]
    for depth, width in enumerate(widths):
        if width < 1:
            raise ValueError(
                f"draft_tree_widths {widths}: the width at depth {depth} is {width}; every width is 1 or more"
            )
        rows = len(parents) + width * len(level)
        if rows > MAX_ROWS:
            raise ValueError(
                f"draft_tree_widths {widths} need at least {rows} rows; a window has at most {MAX_ROWS}, root "
                "included: use smaller widths or fewer levels"
            )
        next_level = range(len(parents), rows)
        parents += [parent for parent in level for _ in range(width)]
        level = list(next_level)
    return DraftTree(tuple(parents))


def _check_rows(rows: int, what: str = "a window") -> None:
    if rows < 1:
        raise ValueError(f"{what} has at least 1 row, the root, not {rows}")
    if rows > MAX_ROWS:
        raise ValueError(
            f"{what} has at most {MAX_ROWS} rows, root included, because an ancestor set is one 64-bit mask; {rows} "
            "were asked for: take fewer nodes"
        )


class TreeBatch(NamedTuple):
    """Trees of a batch of requests as tensors: data, so that kernels and CUDA graphs serve every topology.

    Rows past a request's tree are padding: parent -1, depth 0, empty ancestor set.
    """

    rows: Tensor
    """[B] int32, rows of each tree."""
    parents: Tensor
    """[B, T] int32."""
    depths: Tensor
    """[B, T] int32."""
    ancestors: Tensor
    """[B, T] int64, ancestor-or-self masks (bit 63 is the sign bit)."""
    conv_ancestors: Tensor
    """[B, T, width - 1] int32, codes as in `DraftTree.conv_ancestors`; padding rows have the root's."""
    max_depth: int
    """Depth of the deepest tree; steps of the level-wise solve."""

    @staticmethod
    def of(
        trees: Iterable[DraftTree],
        *,
        rows: int | None = None,
        conv_width: int = 4,
        device: torch.device | str | None = None,
    ) -> TreeBatch:
        """Stacks trees, padded to `rows` rows (default: the largest tree's).

        Raises:
            ValueError: no trees, or a tree with more than `rows` rows.
        """
        trees = tuple(trees)
        if not trees:
            raise ValueError("a batch has at least one tree")
        padded = max(map(len, trees)) if rows is None else rows
        largest = max(map(len, trees))
        if largest > padded:
            raise ValueError(f"a tree of {largest} rows does not fit a window of {padded}; truncate it first")
        batch = _stack(trees, padded, conv_width)
        return batch if device is None else batch.to(device)

    def to(self, device: torch.device | str) -> TreeBatch:
        """The same batch on another device."""
        tensors = (field.to(device, non_blocking=True) if isinstance(field, Tensor) else field for field in self)
        return TreeBatch(*tensors)  # type: ignore[arg-type]

    def is_ancestor(self) -> Tensor:
        """[B, T, T] bool: entry [b, t, i] says that row i is an ancestor of row t, or t itself."""
        bits = torch.arange(self.parents.shape[1], device=self.ancestors.device)
        return (self.ancestors[:, :, None] >> bits) & 1 == 1


@lru_cache(maxsize=64)
def _stack(trees: tuple[DraftTree, ...], rows: int, conv_width: int) -> TreeBatch:
    def padded(values: Iterable[Sequence[object]], filler: object) -> list[list[object]]:
        return [[*value, *(filler,) * (rows - len(value))] for value in values]

    signed = [[mask - (1 << 64 if mask >> 63 else 0) for mask in tree.ancestors] for tree in trees]
    before_root = tuple(range(-1, -conv_width, -1))
    return TreeBatch(
        rows=torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
        parents=torch.tensor(padded((tree.parents for tree in trees), -1), dtype=torch.int32),
        depths=torch.tensor(padded((tree.depths for tree in trees), 0), dtype=torch.int32),
        ancestors=torch.tensor(padded(signed, 0), dtype=torch.int64),
        conv_ancestors=torch.tensor(
            padded((tree.conv_ancestors(conv_width) for tree in trees), before_root), dtype=torch.int32
        ),
        max_depth=max(tree.depth for tree in trees),
    )
