"""Draft trees: every fact of a tree against the same fact found the slow way.

Random trees come from hypothesis as parent lists in any parent-first order; level order is what `DraftTree.level_order`
makes of them. The slow way is always a walk along the parents of a single row. Limits (65 rows) are asked of every
constructor, and the messages must say what to do instead.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treewy.tree import MAX_ROWS, DraftTree, TreeBatch


@st.composite
def parent_lists(draw: st.DrawFn, max_rows: int = MAX_ROWS) -> list[int]:
    """Parents in any parent-first order; the reach back to a parent is drawn, so chains, stars and others occur."""
    rows = draw(st.integers(1, max_rows))
    reach = draw(st.integers(1, max_rows))
    return [-1] + [draw(st.integers(max(0, row - reach), row - 1)) for row in range(1, rows)]


def trees(max_rows: int = MAX_ROWS) -> st.SearchStrategy[DraftTree]:
    return parent_lists(max_rows).map(lambda parents: DraftTree.level_order(parents)[0])


def path_of(row: int, parents) -> list[int]:
    path = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


# Order


@given(parent_lists(), st.randoms(use_true_random=False))
def test_level_order_renames_rows_and_changes_no_edge(parents, rng):
    # The same tree in a shuffled order that is still parent-first.
    shuffled = [0]
    waiting = set(range(1, len(parents)))
    while waiting:
        shuffled.append(rng.choice(sorted(row for row in waiting if parents[row] in shuffled)))
        waiting.discard(shuffled[-1])
    place = {old: new for new, old in enumerate(shuffled)}
    tree, order = DraftTree.level_order([place[parents[old]] if old else -1 for old in shuffled])

    assert sorted(order) == list(range(len(parents)))
    original = [shuffled[index] for index in order]
    assert all(original[tree.parents[row]] == parents[original[row]] for row in range(1, len(tree)))
    assert list(tree.depths) == sorted(tree.depths)
    assert tree.depths == tuple(len(path_of(row, parents)) - 1 for row in original)
    assert DraftTree.level_order(tree.parents) == (tree, list(range(len(tree))))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "at least 1 row"),
        ((0,), "row 0 is the root and has parent -1, not 0"),
        ((-1, 1), "row 1 has parent 1; a parent stands before its child, so 0 <= parent < 1"),
        ((-1, -1), "row 1 has parent -1"),
        ((-1, 0, 1, 0), "row 3 has depth 1 after a row of depth 2; rows are in level order"),
    ],
)
def test_rows_that_are_no_tree_in_level_order_are_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(parents)


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, 2, 0]])
def test_level_order_refuses_what_is_not_parent_first(parents):
    with pytest.raises(ValueError, match="row"):
        DraftTree.level_order(parents)


# Facts


@given(trees())
def test_facts_of_every_row_agree_with_its_path(tree):
    for row in range(len(tree)):
        path = path_of(row, tree.parents)
        assert tree.path(row) == tuple(path)
        assert tree.depths[row] == len(path) - 1
        assert tree.ancestors[row] == sum(1 << ancestor for ancestor in path)
        assert tree.children[row] == tuple(r for r in range(len(tree)) if tree.parents[r] == row)
    assert tree.depth == max(tree.depths)
    assert tree.draft_nodes == len(tree) - 1


@given(trees(), st.integers(1, 6))
def test_conv_ancestors_are_the_last_inputs_before_the_row(tree, width):
    # Committed inputs carry the names -width..-1, oldest first, and stand before the path on the flat sequence.
    committed = list(range(-width, 0))
    for row, codes in enumerate(tree.conv_ancestors(width)):
        flat = committed + path_of(row, tree.parents)[:-1]
        assert list(codes) == flat[::-1][: width - 1]


def test_conv_window_of_scattered_ancestors_at_every_depth():
    """No row's ancestors are neighbours of it, and the window mixes committed inputs at depths 0, 1 and 2."""
    tree = DraftTree((-1, 0, 0, 1, 2, 1, 3, 4, 6, 7, 8))
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5)
    assert tree.conv_ancestors(4) == (
        (-1, -2, -3),
        (0, -1, -2),
        (0, -1, -2),
        (1, 0, -1),
        (2, 0, -1),
        (1, 0, -1),
        (3, 1, 0),
        (4, 2, 0),
        (6, 3, 1),
        (7, 4, 2),
        (8, 6, 3),
    )


@given(trees(), st.integers(1, MAX_ROWS))
def test_a_prefix_is_a_valid_tree_with_the_same_facts(tree, rows):
    prefix = tree.truncated(rows)
    kept = min(rows, len(tree))
    assert len(prefix) == kept
    assert prefix.parents == tree.parents[:kept]
    assert prefix.depths == tree.depths[:kept]
    assert prefix.ancestors == tree.ancestors[:kept]
    assert prefix.conv_ancestors() == tree.conv_ancestors()[:kept]
    assert prefix == DraftTree(prefix.parents)


def test_path_refuses_rows_outside_the_tree():
    for row in -1, 3:
        with pytest.raises(ValueError, match=f"row {row} is not in a tree of 3 rows"):
            DraftTree.chain(2).path(row)


# Constructors


@pytest.mark.parametrize("nodes", [0, 1, 5, 63])
def test_chain(nodes):
    tree = DraftTree.chain(nodes)
    assert tree.parents == tuple(range(-1, nodes))
    assert tree.depth == nodes


@given(
    st.lists(st.integers(1, 4), max_size=4).filter(
        lambda widths: sum(itertools.accumulate([1, *widths], int.__mul__)) <= 64
    )
)
def test_widths_give_every_node_of_a_depth_as_many_children(widths):
    tree = DraftTree.from_widths(widths)
    assert len(tree) == sum(itertools.accumulate([1, *widths], int.__mul__))
    for row, depth in enumerate(tree.depths):
        assert len(tree.children[row]) == (widths[depth] if depth < len(widths) else 0)
    # Children of one node stand together.
    assert list(tree.parents) == sorted(tree.parents)


def test_the_papers_widths():
    assert [len(DraftTree.from_widths(widths)) for widths in [(1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 3, 3)]] == [
        4,
        11,
        15,
        40,
    ]


@given(st.integers(1, MAX_ROWS), st.integers(), st.sampled_from([0.0, 0.5, 1.0]))
def test_random_trees_are_valid(rows, seed, bias):
    tree = DraftTree.random(rows, random.Random(seed), depth_bias=bias)
    assert len(tree) == rows
    assert DraftTree(tree.parents) == tree
    if bias == 1:
        assert tree == DraftTree.chain(rows - 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: DraftTree((-1, *range(64))),
        lambda: DraftTree.chain(64),
        lambda: DraftTree.from_widths((64,)),
        lambda: DraftTree.from_widths((3, 3, 3, 1)),
        lambda: DraftTree.level_order([-1] + [0] * 64),
        lambda: DraftTree.best_first([-1, 0], [0.0, -1.0], 65),
        lambda: DraftTree.random(65, random.Random(0)),
        lambda: DraftTree.chain(3).truncated(65),
    ],
    ids=["parents", "chain", "widths", "deep widths", "level_order", "best_first", "random", "truncated"],
)
def test_65_rows_are_refused_with_the_reason_everywhere(build):
    with pytest.raises(ValueError, match=r"at most 64 rows|at most 64, root") as refusal:
        build()
    assert "root included" in str(refusal.value)
    assert any(mend in str(refusal.value) for mend in ("fewer nodes", "smaller widths or fewer levels"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DraftTree.chain(-1), "0 or more draft nodes, not -1"),
        (lambda: DraftTree.from_widths((2, 0, 1)), "the width at depth 1 is 0; every width is 1 or more"),
        (lambda: DraftTree.random(0, random.Random(0)), "at least 1 row"),
        (lambda: DraftTree.chain(3).truncated(0), "a truncated window has at least 1 row"),
        (lambda: DraftTree.best_first([-1, 0], [0.0, -1.0], 0), "a node budget has at least 1 row"),
        (
            lambda: DraftTree.best_first([-1, 0], [0.0, 0.5], 2),
            "candidate 1 has log-probability 0.5, which is not <= 0",
        ),
        (lambda: DraftTree.best_first([-1, 0], [0.0, float("nan")], 2), "log-probability nan"),
        (lambda: DraftTree.best_first([-1, 2, 0], [0.0, -1.0, -1.0], 2), "candidate 1 has parent 2"),
    ],
)
def test_other_faults_are_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Best first


def scores(parents, log_probs):
    return [sum(log_probs[node] for node in path_of(row, parents)[1:]) for row in range(len(parents))]


@given(parent_lists(max_rows=8), st.data())
def test_best_first_is_the_best_of_all_ancestor_closed_sets(parents, data):
    """Brute force over all subsets of up to 8 candidates; the total is the expected number of accepted rows."""
    log_probs = [-data.draw(st.floats(0.01, 4)) for _ in parents]
    budget = data.draw(st.integers(1, 8))
    max_depth = data.draw(st.none() | st.integers(0, 4))
    tree, order = DraftTree.best_first(parents, log_probs, budget, max_depth)
    probs = torch.tensor(scores(parents, log_probs), dtype=torch.float64).exp()

    def allowed(subset):
        chosen = set(subset)
        return all(
            parents[node] in chosen and (max_depth is None or len(path_of(node, parents)) - 1 <= max_depth)
            for node in subset
            if node
        )

    subsets = (
        (0, *rest)
        for size in range(min(budget, len(parents)))
        for rest in itertools.combinations(range(1, len(parents)), size)
    )
    best = max(float(probs[list(subset)].sum()) for subset in subsets if allowed(subset))
    assert float(probs[order].sum()) == pytest.approx(best, rel=1e-12)

    assert order[0] == 0
    assert len(set(order)) == len(order) == len(tree) <= budget
    assert all(order[tree.parents[row]] == parents[order[row]] for row in range(1, len(tree)))
    # Siblings stand together, best first.
    assert list(tree.parents) == sorted(tree.parents)
    assert all(
        log_probs[order[row]] >= log_probs[order[row + 1]]
        for row in range(1, len(tree) - 1)
        if tree.parents[row] == tree.parents[row + 1]
    )


def test_best_first_takes_ties_in_the_order_given():
    tree, order = DraftTree.best_first([-1, 0, 0, 0, 1], [0.0, -1.0, -1.0, -1.0, 0.0], 4)
    assert order == [0, 1, 2, 3]
    assert tree.parents == (-1, 0, 0, 0)


# Printing


def test_printing_draws_the_tree():
    assert str(DraftTree.from_widths((2, 2))) == "\n".join(
        [
            "0",
            "├─ 1",
            "│  ├─ 3",
            "│  └─ 4",
            "└─ 2",
            "   ├─ 5",
            "   └─ 6",
        ]
    )
    assert str(DraftTree.chain(0)) == "0"
    assert len(str(DraftTree.chain(63)).splitlines()) == 64


# Batches


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 3), st.integers(2, 5))
def test_batch_holds_each_tree_and_padding(members, extra, conv_width):
    rows = min(MAX_ROWS, max(map(len, members)) + extra)
    batch = TreeBatch.of(members, rows=rows, conv_width=conv_width)
    assert batch.rows.tolist() == [len(tree) for tree in members]
    assert batch.max_depth == max(tree.depth for tree in members)
    shapes = {name: (tuple(field.shape), field.dtype) for name, field in batch._asdict().items() if name != "max_depth"}
    size = (len(members), rows)
    assert shapes == {
        "rows": (size[:1], torch.int32),
        "parents": (size, torch.int32),
        "depths": (size, torch.int32),
        "ancestors": (size, torch.int64),
        "conv_ancestors": ((*size, conv_width - 1), torch.int32),
    }
    is_ancestor = batch.is_ancestor()
    for b, tree in enumerate(members):
        n = len(tree)
        assert batch.parents[b].tolist() == [*tree.parents, *[-1] * (rows - n)]
        assert batch.depths[b].tolist() == [*tree.depths, *[0] * (rows - n)]
        assert [mask % (1 << 64) for mask in batch.ancestors[b].tolist()] == [*tree.ancestors, *[0] * (rows - n)]
        padding = list(range(-1, -conv_width, -1))
        expected = [list(codes) for codes in tree.conv_ancestors(conv_width)] + [padding] * (rows - n)
        assert batch.conv_ancestors[b].tolist() == expected
        paths = [path_of(row, tree.parents) for row in range(n)] + [[]] * (rows - n)
        assert is_ancestor[b].tolist() == [[i in path for i in range(rows)] for path in paths]


def test_row_63_uses_the_sign_bit():
    batch = TreeBatch.of([DraftTree.chain(63)])
    assert batch.ancestors[0, 63] == -1
    assert batch.ancestors[0, 62] == (1 << 63) - 1
    assert torch.equal(batch.is_ancestor()[0], torch.ones(64, 64, dtype=torch.bool).tril())


def test_batch_moves_to_a_device():
    batch = TreeBatch.of([DraftTree.from_widths((2, 2))], device="meta")
    assert {field.device.type for field in batch if isinstance(field, torch.Tensor)} == {"meta"}
    assert batch.max_depth == 2


def test_batch_refuses_nothing_and_too_few_rows():
    with pytest.raises(ValueError, match="at least one tree"):
        TreeBatch.of([])
    with pytest.raises(ValueError, match="a tree of 4 rows does not fit a window of 3; truncate it first"):
        TreeBatch.of([DraftTree.chain(1), DraftTree.chain(3)], rows=3)


def test_batch_of_the_same_trees_is_made_once():
    first, second = (TreeBatch.of([DraftTree.from_widths((2, 2)), DraftTree.chain(3)]) for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))
