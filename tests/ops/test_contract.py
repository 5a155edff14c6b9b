"""What the operations refuse, and how they say it.

Every message names the value, the limit and the mend. Before each refused call every tensor of the state is copied, and
afterwards every bit must be as before: a call either does its work or nothing. The calls start from a state in the
middle of a conversation, with a pending history and a verified window, where a write would show.
"""

import re
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.ops.layers import SMALL, Layer, Pool, batch_of, changed, contents, new_state, padded_paths, random_inputs
from treewy import ops
from treewy.ops import GDNDims, GDNParams, SnapshotState
from treewy.tree import DraftTree

LAYER = Layer.random()
PARAMS = LAYER.params()
BUSHY = DraftTree((-1, 0, 0, 1, 1, 2))
MODES = ["store_all", "reconstruct", "deferred"]


class Middle:
    """Two requests with pending rows and, if `verified`, windows of six and four rows that wait for their commit."""

    def __init__(self, mode, verified=True):
        self.g = torch.Generator().manual_seed(0)
        state = new_state(SMALL, mode, requests=3, rows=6, history=7)
        self.state = type(state._all)(**{name: tensor[0] for name, tensor in state.tensors.items()})
        for tensor in self.state:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=self.g, dtype=torch.float64))
        self.fold_always = mode == "reconstruct"
        first = self.plan([BUSHY, BUSHY], [0, 2])
        self.verify(first)
        self.commit(first, *padded_paths([(0, 1), (0, 2, 5)]))
        self.window = self.plan([BUSHY, DraftTree.chain(3)], [0, 2])
        if verified:
            self.verify(self.window)

    def plan(self, trees, requests, rows=None):
        requests = torch.tensor(requests)
        return ops.plan(batch_of(trees, rows), requests, requests, num_slots=3, num_requests=3)

    def inputs(self, window):
        return random_inputs(SMALL, window.batch, window.trees.parents.shape[1], self.g)

    def verify(self, window, x=None, a=None, b=None, params=PARAMS):
        inputs = [mine if given is None else given for given, mine in zip((x, a, b), self.inputs(window), strict=True)]
        if isinstance(self.state, SnapshotState):
            return ops.verify_store_all(self.state, window, *inputs, params)
        return ops.verify(self.state, window, *inputs, params, fold_always=self.fold_always)

    def commit(self, window, path, accepted):
        commit = ops.commit_store_all if isinstance(self.state, SnapshotState) else ops.commit
        commit(self.state, window, path, accepted)

    @contextmanager
    def refuses(self, message, error=ValueError):
        before = contents(self.state)
        with pytest.raises(error, match=message):
            yield
        assert changed(self.state, before) == set()


@pytest.fixture(params=MODES)
def middle(request):
    return Middle(request.param)


@pytest.fixture(params=MODES)
def unverified(request):
    return Middle(request.param, verified=False)


# verify


def test_inputs_whose_shape_does_not_fit(unverified):
    x, a, b = unverified.inputs(unverified.window)
    expected = "do not fit 2 windows of 6 rows: x is [2, 6, 14], a and b are [2, 6, 2]"
    for wrong in ({"x": x[:, :5]}, {"x": x[:1]}, {"x": x[..., 1:]}, {"a": a[..., :1]}, {"b": b[:, 1:]}):
        with unverified.refuses(re.escape(expected)):
            unverified.verify(unverified.window, **wrong)


def test_inputs_in_another_dtype_than_the_state(unverified):
    x = unverified.inputs(unverified.window)[0].float()
    with unverified.refuses(r"x is torch.float32 and the state keeps inputs in torch.float64: convert x, or allocate"):
        unverified.verify(unverified.window, x=x)


def test_a_window_larger_than_the_state_has_room_for(unverified):
    window = unverified.plan([BUSHY], [0], rows=7)
    with unverified.refuses("a window of 7 rows does not fit a state for 6: truncate the trees or allocate more"):
        unverified.verify(window)


def test_a_tree_deeper_than_the_history():
    pool = Pool(SMALL, slots=[0], rows=8, history=4)
    window = pool.plan(batch_of([DraftTree.chain(4)]), torch.tensor([0]))
    before = contents(pool.layer)
    message = (
        "a tree of depth 4 can commit 5 rows at once, but the history holds 4: use a shallower tree or more history"
    )
    with pytest.raises(ValueError, match=message):
        pool.verify(0, window, *random_inputs(SMALL, 1, 5, torch.Generator()), PARAMS)
    assert changed(pool.layer, before) == set()


@pytest.mark.parametrize("mode", ["reconstruct", "deferred"])
def test_parameters_in_another_dtype_than_the_gates(mode):
    middle = Middle(mode, verified=False)
    with middle.refuses("parameters are torch.float32 and the state keeps gates in torch.float64: make both of one"):
        middle.verify(middle.window, params=LAYER.params(torch.float32))


def test_parameters_of_a_convolution_of_another_width(unverified):
    wide = Layer.random(GDNDims(1, 2, 4, 3, conv_width=3)).params()
    message = "planned for a convolution of width 4, the state for 4, the layer has width 3: build trees and state with"
    with unverified.refuses(message):
        unverified.verify(unverified.window, params=wide)


def test_a_norm_whose_shape_does_not_fit(unverified):
    inputs, state = unverified.inputs(unverified.window), unverified.state
    z, weight = torch.zeros(2, 6, 2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    verify = ops.verify_store_all if isinstance(state, SnapshotState) else partial(ops.verify, fold_always=False)
    for wrong in (ops.GatedNorm(z[:, 1:], weight), ops.GatedNorm(z.flatten(2), weight), ops.GatedNorm(z, weight[1:])):
        with unverified.refuses(r"of the norm do not fit: z is \[2, 6, 2, 3\], weight \[3\]"):
            verify(state, unverified.window, *inputs, PARAMS, norm=wrong)


# commit


@pytest.mark.parametrize(("lengths", "limit"), [([1, 0], 3), ([1, -1], 3), ([4, 1], 3), ([1, 2**40], 3)])
def test_an_accepted_length_outside_the_path(middle, lengths, limit):
    """Class 4: never clamped."""
    path = torch.tensor([[0, 2, 5], [0, 1, 2]])
    text = rf"accepted is {re.escape(str(lengths))}; a round accepts the root at least and at most the {limit} rows"
    with middle.refuses(text):
        middle.commit(middle.window, path, torch.tensor(lengths))


@pytest.mark.parametrize(
    "path",
    [
        [1, 3, 0],
        [0, 3, 0],
        [0, 2, 4],
        [0, 0, 1],
        [0, 5, 2],
        [0, 2, 6],
        [0, 2, -1],
        [0, -1, 0],
        [-1, 0, 2],
        [0, 1, 2**40],
    ],
    ids=str,
)
def test_a_path_that_is_none_of_the_tree(middle, path):
    message = (
        rf"path {re.escape(str(path))} is none of the tree with parents .*starts at row 0, the root, and goes from"
    )
    with middle.refuses(message):
        middle.commit(middle.window, torch.tensor([path, [0, 1, 2]]), torch.tensor([3, 3]))


def test_a_path_into_the_padding_rows(middle):
    with middle.refuses(r"path \[0, 1, 2, 3, 4\] is none of the tree"):
        middle.commit(middle.window, torch.tensor([[0, 2, 5, 0, 0], [0, 1, 2, 3, 4]]), torch.tensor([3, 5]))
    with middle.refuses(r"path \[5\] is none of the tree"):
        middle.commit(middle.window, torch.tensor([[0], [5]]), torch.tensor([1, 1]))


def test_paths_whose_shape_does_not_fit(middle):
    for path, accepted in (([[0]], [1, 1]), ([[0], [0]], [1]), ([0, 0], [1, 1]), ([[0], [0]], [[1], [1]])):
        with middle.refuses(r"do not fit a round of 2 requests: \[2, P\] and \[2\]"):
            middle.commit(middle.window, torch.tensor(path), torch.tensor(accepted))
    with middle.refuses("path is torch.float32 and accepted torch.int64; both are integers"):
        middle.commit(middle.window, torch.tensor([[0.0], [0.0]]), torch.tensor([1, 1]))


def test_a_window_that_was_not_verified(unverified):
    with unverified.refuses(
        r"requests \[0, 2\] of layer 0 have verified windows of \[0, 0\] rows.*\[6, 4\].*commit it once"
    ):
        unverified.commit(unverified.window, torch.tensor([[0], [0]]), torch.tensor([1, 1]))


def test_a_second_commit_of_one_verify(middle):
    middle.commit(middle.window, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    with middle.refuses(
        r"verified windows of \[0, 0\] rows, but this one has \[6, 4\]: verify it in every layer, then commit"
    ):
        middle.commit(middle.window, torch.tensor([[0], [0]]), torch.tensor([1, 1]))


def test_another_window_than_the_verified_one(middle):
    with middle.refuses(r"verified windows of \[6, 4\] rows, but this one has \[6, 1\]"):
        middle.commit(middle.plan([BUSHY, DraftTree.chain(0)], [0, 2]), torch.tensor([[0], [0]]), torch.tensor([1, 1]))


@pytest.mark.parametrize("mode", MODES)
def test_a_window_that_one_layer_did_not_run(mode):
    state = new_state(SMALL, mode, layers=3)
    window = state.plan(batch_of([BUSHY]), torch.tensor([0]))
    for layer in (0, 2):
        state.verify(layer, window, *random_inputs(SMALL, 1, 6, torch.Generator()), PARAMS)
    before = contents(state)
    with pytest.raises(ValueError, match=r"requests \[0\] of layer 1 have verified windows of \[0\] rows"):
        state.commit(window, torch.tensor([[0]]), torch.tensor([1]))
    assert changed(state, before) == set()


def test_a_history_without_room():
    """Only a history that was changed between verify and commit can get there; it is refused all the same."""
    middle = Middle("deferred")
    middle.state.pending[2] = 6
    with middle.refuses(
        "request 2 accepts 2 rows, but 6 of the 7 rows of its history are pending: verify the window with"
    ):
        middle.commit(middle.window, torch.tensor([[0, 0], [0, 1]]), torch.tensor([1, 2]))


# plan


@pytest.mark.parametrize(("slots", "bad"), [([0, 3], 3), ([5, 1], 5), ([-1, 2**40], 2**40)])
def test_a_slot_past_the_pool(slots, bad):
    """Class 15: never clipped to the last slot."""
    with pytest.raises(IndexError, match=rf"slot {bad} is outside the 3 that exist \(0 .. 2\)"):
        ops.plan(batch_of([BUSHY] * 2), torch.tensor(slots), torch.tensor([0, 1]), num_slots=3, num_requests=9)


@pytest.mark.parametrize("bad", [9, -1])
def test_a_running_request_out_of_range(bad):
    with pytest.raises(IndexError, match=rf"running request {bad} is outside the 9 that exist \(0 .. 8\)"):
        ops.plan(batch_of([BUSHY] * 2), torch.tensor([0, 1]), torch.tensor([0, bad]), num_slots=3, num_requests=9)


def test_two_windows_for_one_slot_or_request():
    for what, slots, requests in (("slot", [2, 2], [0, 1]), ("running request", [0, 2], [1, 1])):
        with pytest.raises(
            ValueError, match=rf"{what} \d appears twice in one round; a state can be written once a round"
        ):
            ops.plan(batch_of([BUSHY] * 2), torch.tensor(slots), torch.tensor(requests), num_slots=3, num_requests=3)
    ops.plan(batch_of([BUSHY] * 3), torch.tensor([-1, 0, -1]), torch.tensor([4, 4, 4]), num_slots=3, num_requests=5)


def test_slots_for_another_number_of_trees():
    for slots, requests in (([0], [0, 1]), ([0, 1], [0]), ([0, 1, 2], [0, 1, 2])):
        with pytest.raises(ValueError, match=r"2 trees came with slots .*; both are \[2\]"):
            ops.plan(batch_of([BUSHY] * 2), torch.tensor(slots), torch.tensor(requests), num_slots=3, num_requests=3)


def test_a_plan_for_a_larger_pool_writes_nothing():
    """Class 15: the pool that `plan` was told of is not the one that `verify` gets."""
    pool = Pool(SMALL, slots=[0, 1], num_slots=3)
    before = contents(pool.layer)
    for slot, request in ((3, 0), (0, 2)):
        window = ops.plan(batch_of([BUSHY]), torch.tensor([slot]), torch.tensor([request]), num_slots=9, num_requests=9)
        with pytest.raises(IndexError):
            pool.verify(0, window, *random_inputs(SMALL, 1, 6, torch.Generator()), PARAMS)
        assert changed(pool.layer, before) == set()


# Dimensions and parameters


def test_dimensions_that_make_no_layer():
    """Class 30: H that does not divide HV."""
    with pytest.raises(ValueError, match="num_v_heads = 5 is no multiple of num_k_heads = 2; every key head serves"):
        GDNDims(2, 5, 4, 4)
    with pytest.raises(ValueError, match="head_k_dim is 0; it must be at least 1"):
        GDNDims(1, 1, 0, 4)
    with pytest.raises(ValueError, match="conv_width is 1; a causal convolution here has width 2 or more"):
        GDNDims(1, 1, 4, 4, conv_width=1)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("conv_weight", (13, 4), (14, 4)),
        ("conv_weight", (14, 1, 3), (14, 4)),
        ("A_log", (3,), (2,)),
        ("dt_bias", (2, 1), (2,)),
        ("conv_bias", (4,), (14,)),
    ],
)
def test_weights_of_other_dimensions(name, shape, needed):
    weights = {"conv_weight": (14, 4), "A_log": (2,), "dt_bias": (2,), "conv_bias": (14,)} | {name: shape}
    found = shape[:1] + shape[2:] if len(shape) == 3 else shape
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {found}; these dimensions need {needed}")):
        GDNParams.of(SMALL, **{name: torch.zeros(size) for name, size in weights.items()})


def test_weights_of_a_checkpoint_keep_their_meaning():
    """[C, 1, width] and [C, width] are the same weight; parameters are fp32 for half precision checkpoints."""
    weight = LAYER.conv_weight.bfloat16()
    flat = GDNParams.of(SMALL, weight, LAYER.A_log.bfloat16(), LAYER.dt_bias.bfloat16())
    deep = GDNParams.of(SMALL, weight[:, None], LAYER.A_log.bfloat16(), LAYER.dt_bias.bfloat16())
    assert torch.equal(flat.taps, deep.taps)
    assert {flat.taps.dtype, flat.neg_A.dtype, flat.dt_bias.dtype} == {torch.float32}
    assert torch.equal(flat.taps[0], weight[:, -1].float())
