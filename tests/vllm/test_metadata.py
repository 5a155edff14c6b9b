"""Plans of a step: chains as tensors, buffers that captured graphs read, and tokens in and out of windows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treewy.tree import DraftTree, TreeBatch
from treewy.vllm.chains import chain_batch
from treewy.vllm.metadata import Round, TreeWYMetadataBuilder


@pytest.mark.parametrize("rows", [[1], [3, 1, 2], [4, 4], [64, 2]])
def test_chains_are_the_trees_they_stand_for(rows: list[int]) -> None:
    """Class 25: windows of any number of rows."""
    expected = TreeBatch.of([DraftTree.chain(count - 1) for count in rows])
    made = chain_batch(torch.tensor(rows), max(rows), 4)
    for name, value in made._asdict().items():
        wanted = getattr(expected, name)
        assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, name


def test_a_place_without_a_request_is_padding() -> None:
    made = chain_batch(torch.tensor([2, 0]), 3, 4)
    assert made.rows.tolist() == [2, 0]
    assert made.parents.tolist() == [[-1, 0, -1], [-1, -1, -1]]
    assert made.ancestors.tolist() == [[1, 3, 0], [0, 0, 0]]


def builder(impl: str, num_requests: int = 5) -> TreeWYMetadataBuilder:
    """A builder that only plans."""
    made = object.__new__(TreeWYMetadataBuilder)
    layer = SimpleNamespace(
        impl=impl, dims=SimpleNamespace(conv_width=4), kv_cache=(torch.zeros(9, 3, 2), torch.zeros(9, 1, 2, 2))
    )
    made.layers, made._buffers, made.device = [layer], {}, torch.device("cpu")
    made.running = SimpleNamespace(
        num_requests=num_requests, requests=torch.tensor([4, 0, 2, 1]), errors=torch.zeros(1, dtype=torch.int32)
    )
    return made


def plan(made: TreeWYMetadataBuilder, lengths: list[int], blocks: list[int], windows: list[bool] | None = None):
    """Of a batch with these windows; default all."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = made._rows(np.array(windows or [True] * len(lengths)))
    common = SimpleNamespace(query_start_loc=starts)
    return made._plan(rows, max(lengths), torch.tensor(blocks, dtype=torch.int32), common)


@pytest.mark.parametrize("windows", [None, [True, True, False, True, True]])
def test_both_plans_name_the_same_requests(windows) -> None:
    lengths, blocks = [3, 1, 2, 3, 0], [8, 2, 3, 5, 0]
    planned, slots, requests = plan(builder("torch"), lengths, blocks, windows)
    window, mine, named = plan(builder("triton"), lengths, blocks, windows)
    assert slots.tolist() == mine.tolist() == ([8, 2, 3, 5, -1] if windows is None else [8, 2, 5, -1])
    assert requests.tolist() == named.tolist() == ([4, 0, 2, 1, -1] if windows is None else [4, 0, 1, -1])
    assert window.tree_rows[:-1].tolist() == planned.trees.rows.tolist()
    window.check()


def test_kernels_are_given_buffers_that_stay() -> None:
    """Class 11, 12: a batch of two after one of four leaves no old binding behind, at the same addresses."""
    made = builder("triton")
    four, *_ = plan(made, [3, 3, 3, 3], [4, 5, 6, 7])
    addresses = [value.data_ptr() for value in vars(four).values() if isinstance(value, torch.Tensor)]
    padded, *_ = plan(made, [3, 1, 0, 0], [8, 2, 0, 0])
    assert [value.data_ptr() for value in vars(padded).values() if isinstance(value, torch.Tensor)] == addresses
    assert padded.slots.tolist() == [8, 2, -1, -1]
    assert padded.tree_rows.tolist() == [3, 1, 0, 0]
    assert padded.errors is made.running.errors


def test_windows_of_another_length_have_their_own_buffers() -> None:
    made = builder("triton")
    one, three = plan(made, [1], [3])[0], plan(made, [3], [3])[0]
    assert (one.rows, three.rows) == (1, 3)
    assert one.slots.data_ptr() != three.slots.data_ptr()


def round_of(tokens=None, places=None, owners=None, batch: int = 2) -> Round:
    empty = torch.zeros(batch, dtype=torch.int64)
    return Round(
        window=None,
        slots=empty,
        requests=empty,
        committed=empty,
        block_table=empty[:, None],
        block_size=8,
        may_fill=False,
        most=2,
        tokens=tokens,
        places=places,
        owners=owners,
    )


def test_tokens_that_are_rows_are_not_moved() -> None:
    tokens = torch.arange(8.0).view(4, 2)
    windows = round_of().windows(torch.cat([tokens, tokens])[:6])
    assert torch.equal(windows.flatten(0, 1), tokens)
    windows = round_of().windows(tokens)
    assert windows.shape == (2, 2, 2)
    assert windows.data_ptr() == tokens.data_ptr()


def test_tokens_of_windows_among_others() -> None:
    """Tokens 1, 2 and 5 are windows of two rows and of one; the others are prompts'."""
    made = round_of(torch.tensor([[1, 2], [5, 0]]), torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5]))
    tokens = torch.arange(6.0)[:, None]
    windows = made.windows(tokens)
    assert windows[..., 0].tolist() == [[1, 2], [5, 0]]
    out = torch.full((6, 1), -1.0)
    made.scatter(windows, out)
    assert out[:, 0].tolist() == [-1, 1, 2, -1, -1, 5]
