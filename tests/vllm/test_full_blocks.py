"""A window across the end of a block, in float64: the full block holds the state at its end, the request goes on."""

from types import SimpleNamespace

import pytest
import torch

from treewy import ops
from treewy.ops import GDNDims, GDNParams
from treewy.state import StateSpec
from treewy.tree import DraftTree, TreeBatch
from treewy.vllm.commit import Group
from treewy.vllm.metadata import Round
from treewy.vllm.prefix_cache import Full, full_blocks, inputs_at_end, publish, up_to_the_end

DIMS = GDNDims(1, 2, 3, 4)
BLOCK = 8


def setting(rows: int):
    """Two requests in blocks 3 and 4 of seven, slots 1 and 0, with pending rows already; 5 and 6 are blocks before."""
    rng = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    spec = StateSpec(DIMS, 1, "deferred", rows, rows - 1, torch.float64, torch.float64, history_rows=12)
    sizes = {"checkpoint": 7, "conv": 7}
    state = ops.LayerState(
        **{name: torch.zeros(sizes.get(name, 2), *shape, dtype=dtype) for name, (shape, dtype) in spec.pieces().items()}
    )
    state.checkpoint.copy_(draw(*state.checkpoint.shape))
    state.conv.copy_(draw(*state.conv.shape))
    params = GDNParams.of(DIMS, draw(DIMS.conv_dim, 4), draw(2), draw(2))
    return state, params, draw


def advance(state, params, slots, inputs, counts) -> None:
    """Verifies a chain of inputs [B, T, …] and commits the first rows."""
    batch, rows = inputs[0].shape[:2]
    trees = TreeBatch.of([DraftTree.chain(rows - 1)] * batch)
    window = ops.plan(trees, slots, torch.tensor([1, 0]), num_slots=7, num_requests=2)
    ops.verify(state, window, *inputs, params, fold_always=False)
    ops.commit(state, window, torch.arange(rows).expand(batch, rows), counts)


@pytest.mark.parametrize("before", [4, 5, 6, 7])
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_the_state_at_the_end_of_a_block(before: int, accepted: int) -> None:
    state, params, draw = setting(4)
    slots, requests = torch.tensor([3, 4]), torch.tensor([1, 0])
    old = (draw(2, 3, DIMS.conv_dim), draw(2, 3, 2), draw(2, 3, 2))
    new = (draw(2, 4, DIMS.conv_dim), draw(2, 4, 2), draw(2, 4, 2))
    advance(state, params, slots, old, torch.tensor([3, 2]))
    expected = ops.LayerState(*(piece.clone() for piece in state))

    # The second request stays far from the end of its block.
    committed, counts = torch.tensor([before, 0]), torch.tensor([accepted, accepted])
    round = Round(
        window=None,
        slots=slots,
        requests=requests,
        committed=committed,
        block_table=torch.tensor([[5, 3], [4, 6]]),
        block_size=BLOCK,
        may_fill=True,
        most=4,
        tokens=None,
        places=None,
        owners=None,
    )
    full = full_blocks(round, counts)
    assert full is not None
    full = full.only()
    fills = before + accepted >= BLOCK
    assert (full is not None) == fills
    trees = TreeBatch.of([DraftTree.chain(3)] * 2)
    window = ops.plan(trees, slots, requests, num_slots=7, num_requests=2)
    ops.verify(state, window, *new, params, fold_always=False)
    inputs = inputs_at_end(state, full) if full is not None else None
    ops.commit(state, window, torch.arange(4).expand(2, 4), counts)
    if full is None:
        return
    publish(state, full, inputs)

    advance(expected, params, slots, new, torch.tensor([BLOCK - before, accepted]))
    at_end = ops.folded_state(expected, slots, requests)[0]
    torch.testing.assert_close(state.checkpoint[5], at_end, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.conv[5], expected.conv[3], rtol=0, atol=0)
    rest = before + accepted - BLOCK
    assert state.pending[1].tolist() == [rest, rest]
    if rest:
        later = tuple(part[:, BLOCK - before :][:, :rest] for part in new)
        advance(expected, params, slots, later, torch.tensor([rest, rest]))
        after = ops.folded_state(expected, slots, requests)[0]
        torch.testing.assert_close(ops.folded_state(state, slots, requests)[0], after, rtol=0, atol=1e-12)
    assert state.pending[0].tolist() == [2 + accepted] * 2
    untouched = [0, 1, 2, 6]
    assert torch.equal(state.checkpoint[untouched], expected.checkpoint[untouched])


def test_nothing_is_asked_of_blocks_far_from_their_end() -> None:
    far = Round(None, *[torch.zeros(1, dtype=torch.int64)] * 3, torch.zeros(1, 1), 8, False, 1, None, None, None)
    assert full_blocks(far, torch.tensor([1])) is None


def test_padding_is_not_the_last_request() -> None:
    """On a GPU padding stays in the round, as request -1, several times; the last running request has rows to hide."""
    state, _, _ = setting(4)
    state.pending.fill_(5)
    state.end.fill_(1)
    before = state.pending.clone(), state.end.clone()
    slots, requests, target = torch.tensor([3, -1, -1]), torch.tensor([1, -1, -1]), torch.tensor([5, -1, -1])
    full = Full(slots, requests, target, first=torch.tensor([1, 0, 0]), rest=torch.tensor([2, 0, 0]))
    with up_to_the_end(state, full):
        assert state.pending.tolist() == [[5, 5], [3, 3]]
        assert state.end.tolist() == [1, 15]
    assert torch.equal(state.pending, before[0])
    assert torch.equal(state.end, before[1])


def group(impl: str, dims: GDNDims, params: list[GDNParams], rows: int) -> SimpleNamespace:
    """Two layers of an engine, whose pools lie apart, with random states: five requests, twelve blocks."""
    rng = torch.Generator().manual_seed(1)
    spec = StateSpec(dims, len(params), "deferred", rows, rows - 1, torch.float32, torch.float32, history_rows=12)
    pieces = {
        name: torch.zeros(len(params), 5, *shape, dtype=dtype)
        for name, (shape, dtype) in spec.pieces().items()
        if name not in ("checkpoint", "conv")
    }

    def layer(_: GDNParams) -> SimpleNamespace:
        pool = torch.randn(12, dims.num_v_heads, dims.head_v_dim, dims.head_k_dim, generator=rng)
        conv = torch.randn(12, dims.conv_width - 1, dims.conv_dim, generator=rng)
        made = SimpleNamespace(impl=impl, running=SimpleNamespace(pieces=pieces))

        def move(index: int) -> None:
            mine = {name: piece[index] for name, piece in pieces.items()}
            made.state = ops.LayerState(checkpoint=pool, conv=conv, **mine)

        made.move = move
        return made

    layers = [layer(each) for each in params]
    return SimpleNamespace(group=Group(layers, 0), layers=layers, pieces=pieces)


@pytest.mark.parametrize("padding", [1, -1])
def test_kernels_commit_and_publish_what_the_torch_implementation_does(padding: int) -> None:
    """Class 8, 22: a request that crosses an end, one that reaches it in its last block, one far from it, padding."""
    dims, rows = GDNDims(1, 2, 16, 16), 4
    rng = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    params = [GDNParams.of(dims, draw(dims.conv_dim, 4), draw(2), draw(2)) for _ in range(2)]
    torch_side, kernels = (group(impl, dims, params, rows) for impl in ("torch", "triton"))
    requests = torch.tensor([3, 0, 4, padding])
    table = torch.tensor([[5, 6], [7, 1], [8, 2], [9, 3]])
    committed = torch.tensor([2, 6, 4, 90])
    for step, accepted in enumerate(([4, 1, 1, 3], [3, 1, 2, 3], [2, 3, 1, 3])):
        x, a, b = draw(2, 4, rows, dims.conv_dim), draw(2, 4, rows, 2), draw(2, 4, rows, 2)
        counts = torch.tensor(accepted)
        column = (committed + rows - 1) // BLOCK
        slots = table.gather(1, column.clamp(max=1)[:, None])[:, 0]
        slots[3] = -1
        for side, impl in ((torch_side, "torch"), (kernels, "triton")):
            for before, after in zip(table[:3, 0], table[:3, 1], strict=True):
                for layer in side.layers if step == 1 else ():  # vLLM copies the block when a request moves on
                    for pool in (layer.state.checkpoint, layer.state.conv):
                        pool[after] = pool[before]
            trees = TreeBatch.of([DraftTree.chain(rows - 1)] * 4)
            window = ops.plan(trees, slots, requests, num_slots=12, num_requests=5, impl=impl)
            for index, layer in enumerate(side.layers):
                ops.verify(layer.state, window, x[index], a[index], b[index], params[index], fold_always=False)
            side.group.commit(
                Round(window, slots, requests, committed, table, BLOCK, True, rows, None, None, None), counts
            )
        committed = committed + counts
        for name, piece in torch_side.pieces.items():
            torch.testing.assert_close(kernels.pieces[name], piece, rtol=0, atol=1e-5)
        for mine, other in zip(kernels.layers, torch_side.layers, strict=True):
            torch.testing.assert_close(mine.state.checkpoint, other.state.checkpoint, rtol=0, atol=1e-5)
            torch.testing.assert_close(mine.state.conv, other.state.conv, rtol=0, atol=0)
