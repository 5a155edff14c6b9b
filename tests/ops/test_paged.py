"""What an engine asks of the operations: plans of chains, outputs in its tensors, a commit over pools of their own."""

import pytest
import torch

from treewy import ops
from treewy.ops import DeviceWindow, GDNDims, GDNParams, LayerState
from treewy.state import StateSpec
from treewy.tree import DraftTree, TreeBatch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUFFERS = ("slots", "tree_rows", "parents", "ancestors", "conv_ancestors", "longest")


def empty(places: int, rows: int) -> DeviceWindow:
    return DeviceWindow.empty(places, rows, num_slots=9, num_requests=5, device=DEVICE)


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("rows", [[1], [3, 1, 2], [4, 4, 4, 4], [64, 2]])
def test_chains_are_the_trees_they_stand_for(rows: list[int]) -> None:
    """Class 25: windows of any number of rows."""
    slots, requests = tensor(*range(3, 3 + len(rows))), tensor(*range(len(rows)))
    expected, made = empty(4, max(rows)), empty(4, max(rows))
    expected.update(TreeBatch.of([DraftTree.chain(count - 1) for count in rows]), slots, requests)
    made.update_chains(tensor(0, *rows).cumsum(0).int(), slots.int(), requests.int())
    for name in BUFFERS:
        assert torch.equal(getattr(made, name)[: len(rows)], getattr(expected, name)[: len(rows)]), name
    assert made.requests[: len(rows)].tolist() == requests.tolist()
    assert made.slots[len(rows) :].tolist() == [-1] * (4 - len(rows))
    made.check()


def test_windows_are_picked_from_a_batch_with_prompts_and_padding() -> None:
    """Requests 0 and 3 are windows; 4 has no rows, and the last has the null block. Blocks lie in a wider table."""
    table = torch.tensor([[4, 8], [5, 8], [6, 8], [7, 8], [2, 8], [0, 8]], device=DEVICE, dtype=torch.int32)
    made = empty(4, 3)
    made.slots.fill_(3)
    chosen = tensor(3, 0, 4, 5)
    made.update_chains(
        tensor(0, 2, 7, 9, 12, 12, 13).int(), table[:, 0], tensor(4, 3, 2, 1, 0).int(), chosen=chosen, padding=0
    )
    assert made.slots.tolist() == [7, 4, -1, -1]
    assert made.requests.tolist() == [1, 4, -1, -1]
    assert made.tree_rows.tolist() == [3, 2, 0, 0]
    assert made.parents.tolist() == [[-1, 0, 1], [-1, 0, -1], [-1, -1, -1], [-1, -1, -1]]
    made.check()


@pytest.mark.parametrize(("slot", "request_", "rows"), [(9, 0, 2), (3, 5, 2), (3, 0, 3)])
def test_what_is_past_its_end_is_left_out(slot: int, request_: int, rows: int) -> None:
    made = empty(2, 2)
    made.update_chains(tensor(0, rows, rows + 1).int(), tensor(slot, 1), tensor(request_, 1))
    assert made.slots.tolist() == [-1, 1]
    with pytest.raises(IndexError, match="outside"):
        made.check()


def test_layers_with_pools_of_their_own_are_committed_in_one_launch() -> None:
    from treewy.ops.triton import commit

    layers, slots, rows = 3, 9, 4
    dims = GDNDims(1, 2, 16, 32)
    spec = StateSpec(dims, layers, "deferred", rows, rows - 1, torch.float32, torch.float32, history_rows=12)
    rng = torch.Generator().manual_seed(0)
    pieces = {}
    for name, (shape, dtype) in spec.pieces().items():
        size = {"checkpoint": slots, "conv": slots}.get(name, 5)
        piece = torch.zeros(layers, size, *shape, dtype=dtype)
        pieces[name] = (piece.normal_(generator=rng) if dtype.is_floating_point else piece).to(DEVICE)
    pieces["window_rows"][:, [1, 4]] = rows
    pieces["end"][:, 4] = 14
    stacked = LayerState(**pieces)
    # Pools as an engine keeps them: apart from each other, each block beside its recurrent state.
    pools = [torch.zeros(slots, 3 * dims.conv_dim + 40, device=DEVICE) for _ in range(layers)]
    views = [pool[:, : 3 * dims.conv_dim].view(slots, 3, dims.conv_dim) for pool in pools]
    for view, conv in zip(views, stacked.conv, strict=True):
        view.copy_(conv)
    apart = LayerState(**{name: piece.clone() for name, piece in pieces.items()})._replace(
        conv=views[0][None], checkpoint=stacked.checkpoint[:1]
    )
    window = empty(2, rows)
    window.update_chains(tensor(0, rows, 2 * rows).int(), tensor(7, 2), tensor(1, 4))
    path, accepted = torch.arange(rows, device=DEVICE).expand(2, rows), tensor(2, 4)
    commit(stacked, window, path, accepted)
    addresses = torch.tensor([view.data_ptr() for view in views], device=DEVICE)
    commit(apart, window, path, accepted, pools=addresses)
    window.check()
    for name in ("window_rows", "end", "pending"):
        assert torch.equal(getattr(apart, name), getattr(stacked, name)), name
    assert stacked.end[:, 4].tolist() == [2] * layers
    for view, conv in zip(views, stacked.conv, strict=True):
        assert torch.equal(view, conv)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_outputs_go_where_they_are_asked_to(impl: str) -> None:
    dims, rows = GDNDims(1, 2, 16, 16), 3
    spec = StateSpec(dims, 1, "deferred", rows, rows - 1, torch.float32, torch.float32, history_rows=6)
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE)

    state = LayerState(
        **{name: torch.zeros(5, *shape, dtype=dtype, device=DEVICE) for name, (shape, dtype) in spec.pieces().items()}
    )
    state.checkpoint.copy_(draw(*state.checkpoint.shape))
    params = GDNParams.of(dims, draw(dims.conv_dim, 4), draw(2), draw(2))
    trees = TreeBatch.of([DraftTree.chain(rows - 1)] * 2, device=DEVICE)
    window = ops.plan(trees, tensor(3, -1), tensor(1, 0), num_slots=5, num_requests=5, impl=impl)
    inputs = draw(2, rows, dims.conv_dim), draw(2, rows, 2), draw(2, rows, 2)
    expected = ops.verify(state, window, *inputs, params, fold_always=False)
    tokens = torch.full((2 * rows + 1, 2, 16), 7.0, device=DEVICE)
    out = tokens[: 2 * rows].view(2, rows, 2, 16)
    assert ops.verify(state, window, *inputs, params, fold_always=False, out=out).data_ptr() == tokens.data_ptr()
    assert torch.equal(out, expected)
    assert not out[1].any()
    assert (tokens[-1] == 7).all()
    if impl == "triton":
        with pytest.raises(ValueError, match="out is"):
            ops.verify(state, window, *inputs, params, fold_always=False, out=tokens)
