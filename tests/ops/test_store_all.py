"""The baseline that keeps one state a row of the window.

The conversations of `test_verify_commit.py` hold it against the float64 walk together with the other modes. Here is
what only it has: a snapshot of every row, a pointer to the committed one, and windows that cannot be run twice, because
the state of a row may stand where the committed one stood.
"""

import random

import pytest
import torch

from tests.ops.layers import (
    SMALL,
    Layer,
    Oracle,
    batch_of,
    changed,
    contents,
    error,
    new_state,
    padded_paths,
    random_inputs,
    random_path,
    same_bits,
)
from treewy.ops import SnapshotState, commit_store_all, plan, verify_store_all
from treewy.tree import DraftTree

LAYER = Layer.random()
BUSHY = DraftTree((-1, 0, 0, 1, 1, 2))


def snapshot_state(requests=3, rows=8):
    state = new_state(SMALL, "store_all", requests=requests, rows=rows)
    return SnapshotState(**{name: tensor[0] for name, tensor in state.tensors.items()})


def plan_of(trees, requests, *, rows=None, num_requests=3):
    requests = torch.tensor(requests)
    return plan(batch_of(trees, rows), requests, requests, num_slots=num_requests, num_requests=num_requests)


def test_every_row_has_its_own_state_and_commit_points_at_one():
    state, oracle, rng = snapshot_state(), Oracle(LAYER), random.Random(0)
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        tree = DraftTree.random(rng.randint(1, 8), rng)
        window, path = plan_of([tree], [1]), random_path(tree, rng)
        x, a, b = random_inputs(SMALL, 1, len(tree), g)
        verify_store_all(state, window, x, a, b, LAYER.params())
        oracle.verify(x[0], a[0], b[0], tree.parents)
        assert error(state.snapshots[1, : len(tree)], oracle._states) < 1e-12
        snapshots = state.snapshots.clone()
        commit_store_all(state, window, *padded_paths([path]))
        oracle.commit(path)
        assert same_bits(state.snapshots, snapshots), "a commit moves no state"
        assert int(state.committed[1]) == path[-1]
        assert torch.equal(state.conv[1], oracle.conv)


def test_only_the_requests_of_the_round_change():
    """Class 5 and 11: other requests and padding stay as they were, bit for bit."""
    state, g = snapshot_state(), torch.Generator().manual_seed(0)
    for tensor in state:
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=g, dtype=torch.float64))
    before = contents(state)
    window = plan_of([BUSHY, DraftTree.chain(3)], [-1, 2])
    x, a, b = random_inputs(SMALL, 2, 6, g)
    x[0], x[1, 4:] = float("nan"), float("inf")
    out = verify_store_all(state, window, x, a, b, LAYER.params())
    assert not out[0].count_nonzero()
    assert changed(state, before) == {"snapshots", "window_inputs", "window_rows"}
    assert same_bits(state.snapshots[2, 4:], before["snapshots"][2, 4:]), "rows past the tree have no state"
    commit_store_all(state, window, torch.tensor([[9, 9], [0, 1]]), torch.tensor([5, 2]))
    assert changed(state, before) == {"snapshots", "window_inputs", "conv", "committed"}
    for name, tensor in state._asdict().items():
        assert same_bits(tensor[:2], before[name][:2]), name


def test_a_round_of_nothing_but_padding_changes_nothing():
    """Class 11: all slots negative."""
    state = snapshot_state()
    before, window = contents(state), plan_of([BUSHY], [-1])
    out = verify_store_all(state, window, *random_inputs(SMALL, 1, 6, torch.Generator()), LAYER.params())
    commit_store_all(state, window, torch.tensor([[0]]), torch.tensor([1]))
    assert changed(state, before) == set()
    assert out.shape == (1, 6, 2, 3)
    assert not out.count_nonzero()


def test_a_window_cannot_be_run_again_before_its_commit():
    """What a second run would silently read is the state of a rejected row. The other modes allow it."""
    state, g = snapshot_state(), torch.Generator().manual_seed(0)
    window, inputs = plan_of([BUSHY, BUSHY], [0, 2]), random_inputs(SMALL, 2, 6, g)
    verify_store_all(state, window, *inputs, LAYER.params())
    before = contents(state)
    single = tuple(tensor[:1] for tensor in inputs)
    for again, values in ((window, inputs), (plan_of([BUSHY], [2]), single)):
        with pytest.raises(
            ValueError, match=r"request \d has a window of 6 rows that waits for its commit.*commit it, or"
        ):
            verify_store_all(state, again, *values, LAYER.params())
    assert changed(state, before) == set()
    verify_store_all(state, plan_of([BUSHY], [1]), *single, LAYER.params())
    commit_store_all(state, window, *padded_paths([(0,), (0, 1)]))
    verify_store_all(state, window, *inputs, LAYER.params())


def test_a_verify_that_stopped_halfway_cannot_be_mistaken_for_a_whole_one(monkeypatch):
    """The window counts as open from the first snapshot that is written, so a retry is refused instead of wrong."""
    state, inputs = snapshot_state(), random_inputs(SMALL, 1, 6, torch.Generator().manual_seed(0))
    window = plan_of([BUSHY], [0])

    def stop(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr("treewy.ops.torch_impl._outputs", stop)
        with pytest.raises(InterruptedError):
            verify_store_all(state, window, *inputs, LAYER.params())
    with pytest.raises(ValueError, match="waits for its commit"):
        verify_store_all(state, window, *inputs, LAYER.params())
