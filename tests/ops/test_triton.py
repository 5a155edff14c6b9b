"""The Triton kernels beside the torch implementation, round after round, and beside float64 where precision counts.

Without a CUDA device they run in Triton's interpreter, on sizes of 16, the smallest that kernels take. Tests marked
`gpu` need the device itself: CUDA graphs, real sizes, compilations.
"""

import random
from itertools import pairwise

import pytest
import torch

from treewy import ops, reference
from treewy.ops import DeviceWindow, GatedNorm, GDNDims, GDNParams, LayerState
from treewy.ops import triton as kernels
from treewy.ops.support import unsupported_reason
from treewy.ops.triton.kernel_verify import verify_kernel
from treewy.state import RecurrentState, StateSpec
from treewy.tree import DraftTree, TreeBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = GDNDims(1, 2, 16, 16)
RING = ("keys", "values", "gates")


def params_of(dims, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    params = GDNParams.of(
        dims,
        0.4 * rand(dims.conv_dim, dims.conv_width),
        rand(dims.num_v_heads),
        rand(dims.num_v_heads),
        0.1 * rand(dims.conv_dim),
    )
    return params._replace(**{n: getattr(params, n).to(DEVICE) for n in ("taps", "conv_bias", "neg_A", "dt_bias")})


class Pair:
    """The same requests in the torch implementation, and in the kernels, padded there to a fixed plan."""

    def __init__(
        self, dims=SMALL, mode="deferred", requests=4, rows=8, depth=7, layers=1, state=torch.float32,
        inputs=torch.float32, history=None, batch=None,
    ):  # fmt: skip
        self.dims, self.rows, self.layers, self.inputs = dims, rows, layers, inputs
        spec = StateSpec(dims, layers, mode, rows, depth, state, inputs, history)
        self.torch, self.triton = (RecurrentState(spec, requests, DEVICE) for _ in range(2))
        self.fold_always = mode == "reconstruct"
        self.params = params_of(dims)
        self.window = DeviceWindow.empty(
            batch or requests, rows, num_slots=requests, num_requests=requests, device=DEVICE
        )
        self.tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[
            min(inputs, state, key=lambda dtype: (dtype.itemsize, dtype is torch.float16))
        ]
        for layer in range(layers):
            for request in range(requests):
                S = (0.3 * torch.randn(dims.num_v_heads, dims.head_v_dim, dims.head_k_dim)).to(DEVICE, state)
                conv = torch.randn(dims.conv_width - 1, dims.conv_dim).to(DEVICE, inputs)
                for side in (self.torch, self.triton):
                    side.load(layer, request, S, conv)
        for name in (*RING, "window_inputs"):
            self.triton.tensors[name].fill_(float("nan"))

    def start_at(self, end):
        """Moves the rings of all requests, which are empty, to where a window straddles their end, or any place."""
        for side in (self.torch, self.triton):
            side.tensors["end"].fill_(end % side.tensors["keys"].shape[2])

    def in_use(self):
        """[layers, R, ring, HV] bool: places of pending rows."""
        tensors = self.triton.tensors
        ring = tensors["keys"].shape[2]
        age = (tensors["end"][:, :, None] - 1 - torch.arange(ring, device=DEVICE)) % ring
        return age[..., None] < tensors["pending"][:, :, None]

    def spoil(self):
        """Whatever is not pending may be anything."""
        used = self.in_use()
        for name in RING:
            where = used.any(3) if name == "keys" else used
            self.triton.tensors[name][~where] = float("nan")

    def inputs_of(self, poison=()):
        """x, a, b for all layers, whatever stands in the places and rows that are padding."""
        batch, heads = self.window.batch, self.dims.num_v_heads
        tensors = [
            torch.randn(self.layers, batch, self.rows, columns) for columns in (self.dims.conv_dim, heads, heads)
        ]
        for tensor in tensors:
            for place, first_row in poison:
                tensor[:, place, first_row:] = float("nan")
        return [tensor.to(DEVICE, self.inputs) for tensor in tensors]

    def round(self, trees, requests, paths):
        """One round on both sides; outputs and state must agree, and padding must be zero."""
        self.spoil()
        count = len(trees)
        requests = torch.tensor(requests, device=DEVICE)
        batch = TreeBatch.of(trees, rows=self.rows, device=DEVICE)
        self.window.update(batch, requests, requests)
        poison = [(place, len(tree)) for place, tree in enumerate(trees)]
        poison += [(place, 0) for place in range(self.window.batch) if place >= count or requests[place] < 0]
        x, a, b = self.inputs_of(poison)
        plan = self.torch.plan(batch, requests)
        outputs = []
        for layer in range(self.layers):
            expected = self.torch.verify(layer, plan, x[layer, :count], a[layer, :count], b[layer, :count], self.params)
            found = ops.verify(
                self.triton._layers[layer], self.window, x[layer], a[layer], b[layer], self.params,
                fold_always=self.fold_always,
            )  # fmt: skip
            self.close(found[:count], expected)
            for place, first_row in poison:
                assert not found[place, first_row:].any()
            outputs.append(found)
        path = torch.full((self.window.batch, self.rows), -7, device=DEVICE)
        accepted = torch.ones(self.window.batch, dtype=torch.int64, device=DEVICE)
        for place, chosen in enumerate(paths):
            path[place, : len(chosen)] = torch.tensor(chosen)
            accepted[place] = len(chosen)
        self.torch.commit(plan, path[:count], accepted[:count])
        kernels.commit(self.triton._all, self.window, path, accepted)
        self.window.check()
        self.same_state()
        return outputs

    def same_state(self):
        for name, expected in self.torch.tensors.items():
            found = self.triton.tensors[name]
            if name in RING:
                used = self.in_use()
                where = used.any(3) if name == "keys" else used
                self.close(found[where], expected[where])
            elif name == "checkpoint":
                self.close(found, expected)
            elif name != "window_inputs":
                assert torch.equal(found, expected), name

    def rows_of(self, count):
        """Keys and values of the first rows of request 0's window, in float64 on the CPU."""
        end, ring = int(self.triton.tensors["end"][0, 0]), self.triton.tensors["keys"].shape[2]
        at = [(end + row) % ring for row in range(count)]
        return (self.triton.tensors[name][0, 0, at].cpu().double() for name in ("keys", "values"))

    def close(self, found, expected):
        scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
        torch.testing.assert_close(found.double() / scale, expected.double() / scale, rtol=0, atol=self.tolerance)


def random_rounds(pair, rounds, seed=0):
    rng = random.Random(seed)
    for _ in range(rounds):
        count = rng.randint(1, pair.window.batch)
        trees = [DraftTree.random(rng.randint(1, pair.rows), rng) for _ in range(count)]
        trees[0] = DraftTree.chain(rng.randrange(pair.rows))
        requests = rng.sample(range(pair.torch.num_requests), count)
        if count > 1 and rng.random() < 0.5:
            requests[rng.randrange(count)] = -1
        pair.round(trees, requests, [tree.path(rng.randrange(len(tree))) for tree in trees])


def bits(tensor):
    """What `torch.equal` can compare where there are NaNs: a copy."""
    return tensor.contiguous().view(torch.uint8).clone()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("mode", ["deferred", "reconstruct"])
def test_rounds_of_mixed_batches(mode):
    pair = Pair(mode=mode, layers=2, history=9 if mode == "deferred" else None)
    random_rounds(pair, 4)
    everyone = torch.arange(4, device=DEVICE)
    for side in (pair.torch, pair.triton):
        for layer in side._layers:
            (ops if side is pair.torch else kernels).fold(layer, everyone, everyone)
    assert not pair.triton.tensors["pending"].any()
    pair.same_state()


def test_draft_rounds_and_plain_rounds_alternate():
    pair = Pair(requests=1, rows=4, depth=3, history=5)
    for drafts, accepted in ((3, 2), (0, 1), (3, 4), (0, 1), (2, 1), (3, 3)):
        pair.round([DraftTree.chain(drafts)], [0], [tuple(range(accepted))])


def test_scattered_paths_join_the_history_in_order():
    pair = Pair(requests=2, history=8)
    tree = DraftTree((-1, 0, 0, 1, 2, 2, 5))
    for _ in range(4):
        pair.round([tree, tree], [1, 0], [(0, 2, 5), (0, 2, 5, 6)])


@pytest.mark.parametrize("end", [11, 13])
def test_scattered_paths_move_together_over_the_end_of_the_ring(end):
    """Six rows, more than the kernel has under way at a time, whose places are sources of rows further down."""
    pair = Pair(requests=1, rows=11, depth=6, layers=2, history=8)
    pair.start_at(end)
    tree = DraftTree((-1, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8))
    for path in ((0, 2, 4, 6, 8, 10), (0, 2, 4, 6, 7), (0, 2, 3), (0, 1)):
        pair.round([tree], [0], [path])


@pytest.mark.parametrize(
    ("dims", "rows"), [(GDNDims(3, 3, 64, 64), 27), (GDNDims(2, 8, 128, 256), 8)], ids=["rows", "channels"]
)
def test_many_rows_and_channels_in_convolution_and_commit(dims, rows):
    """Programs of two rows, some of two requests; tiles across queries, keys and values; over the end of the ring."""
    pair = Pair(dims, requests=5, rows=rows, depth=rows - 1, history=30)
    pair.start_at(-4)
    state = pair.triton._layers[0]
    rng = random.Random(0)
    trees = [DraftTree.random(rng.randint(rows - 2, rows), rng) for _ in range(4)]
    requests = [4, -1, 0, 2]
    where = torch.tensor(requests, device=DEVICE)
    pair.window.update(TreeBatch.of(trees, rows=rows, device=DEVICE), where, where)
    x = pair.inputs_of([(place, len(tree)) for place, tree in enumerate(trees)] + [(1, 0), (4, 0)])[0][0]
    conv = state.conv.clone()
    queries = kernels.convolve(state, pair.window, x, pair.params)
    state.gates.copy_(torch.arange(float(state.gates.numel())).view(state.gates.shape))
    before = LayerState(*(tensor.clone() for tensor in state))
    assert before.window_rows.tolist() == [len(trees[2]), 0, len(trees[3]), 0, len(trees[0])]
    moves = False
    weight, bias = pair.params.taps.flip(0).T.double(), pair.params.conv_bias.double()
    path, accepted = torch.zeros(5, rows, dtype=torch.int32, device=DEVICE), torch.ones(5, device=DEVICE).int()
    for place, (tree, request) in enumerate(zip(trees, requests, strict=True)):
        if request < 0:
            continue
        mixed = reference.causal_conv(
            x[place, : len(tree)].double(), conv[request].double(), weight, tree.parents, bias
        )
        at = (int(state.end[request]) + torch.arange(rows, device=DEVICE)) % state.keys.shape[1]
        used, unused = at[: len(tree)], at[len(tree) :]
        found = torch.cat([queries[place, : len(tree)], state.keys[request, used]], 1).flatten(1)
        found = torch.cat([found, state.values[request, used].flatten(1)], 1)
        pair.close(found, mixed)
        assert not queries[place, len(tree) :].any()
        assert state.keys[request, unused].isnan().all()
        assert state.values[request, unused].isnan().all()
        chosen = max((tree.path(row) for row in range(len(tree))), key=len)
        path[place, : len(chosen)], accepted[place] = torch.tensor(chosen), len(chosen)
        moves |= chosen != tuple(range(len(chosen)))
    assert not queries[[1, 4]].any()
    assert moves
    kernels.commit(state, pair.window, path, accepted)
    pair.window.check()
    for place, request in enumerate(requests):
        if request < 0:
            continue
        count = int(accepted[place])
        chosen = path[place, :count].long()
        expected = reference.committed_inputs(x[place], conv[request], chosen.tolist())
        assert torch.equal(state.conv[request], expected)
        end, ring = int(before.end[request]), state.keys.shape[1]
        target, source = (end + torch.arange(count, device=DEVICE)) % ring, (end + chosen) % ring
        for name in RING:
            assert torch.equal(getattr(state, name)[request, target], getattr(before, name)[request, source]), name
        assert int(state.end[request]) == (end + count) % ring
        assert state.pending[request].tolist() == [count] * dims.num_v_heads
    assert not state.window_rows.any()
    for request in (1, 3):
        for found, expected in zip(state, before, strict=True):
            assert torch.equal(bits(found[request, None]), bits(expected[request, None]))


def test_windows_go_round_the_ring():
    pair = Pair(requests=2, rows=3, depth=2, history=4)
    ends = []
    for seed in range(5):
        random_rounds(pair, 2, seed)
        ends.append(pair.triton.tensors["end"].flatten().tolist())
    assert any(later < sooner for before, after in pairwise(ends) for sooner, later in zip(before, after, strict=True))


def test_plain_decoding():
    pair = Pair(requests=3, rows=1, depth=0, history=3)
    for _ in range(8):  # folds twice, and goes round the ring of four
        pair.round([DraftTree.chain(0)] * 3, [2, 0, 1], [(0,)] * 3)


@pytest.mark.parametrize(("folded_before", "left"), [(0, [0, 2]), (2, [0, 0])])
def test_each_head_folds_where_its_own_rows_leave_no_room(folded_before, left):
    """The second head has folded some of what the first has pending, as a launch that was cut short leaves it."""
    pair = Pair(requests=1, rows=4, depth=3, history=5)
    where = torch.tensor([0], device=DEVICE)
    for accepted in (3, 2 - folded_before):
        if accepted:
            pair.round([DraftTree.chain(1 if accepted == 2 else 3)], [0], [tuple(range(accepted))])
        if accepted == 3:
            for side in (pair.torch, pair.triton):
                layer = side._layers[0]
                layer.checkpoint[0, 1] = ops.folded_state(layer, where, where)[0, 1]
                layer.pending[0, 1] = 0
    assert pair.triton.tensors["pending"].tolist() == [[[5 - folded_before, 2 - folded_before]]]
    trees = TreeBatch.of([DraftTree.chain(2)], rows=4, device=DEVICE)
    pair.window.update(trees, where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    expected = pair.torch.verify(0, pair.torch.plan(trees, where), x, a, b, pair.params)
    pair.close(ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False), expected)
    assert pair.triton.tensors["pending"].tolist() == [[left]]
    for side, implementation in ((pair.torch, ops), (pair.triton, kernels)):
        implementation.fold(side._layers[0], where, where)
    assert not pair.triton.tensors["pending"].any()
    pair.close(pair.triton.tensors["checkpoint"], pair.torch.tensors["checkpoint"])


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 2), (1, 3), (2, 8), (1, 8)])
def test_heads_that_share_keys(key_heads, value_heads):
    random_rounds(Pair(GDNDims(key_heads, value_heads, 16, 16), requests=2, rows=5, depth=4, history=6), 2)


@pytest.mark.parametrize(("dk", "dv"), [(16, 32), (32, 16)])
def test_keys_and_values_of_different_sizes(dk, dv):
    random_rounds(Pair(GDNDims(1, 2, dk, dv), requests=2, rows=3, depth=2, history=3), 3)


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(state, inputs):
    random_rounds(Pair(requests=2, rows=4, depth=3, state=state, inputs=inputs, history=5), 3)


def test_a_split_of_the_value_heads_changes_nothing():
    whole = Pair(GDNDims(2, 4, 16, 16), requests=1, rows=4, depth=3)
    tree, where = TreeBatch.of([DraftTree((-1, 0, 0, 1))], rows=4, device=DEVICE), torch.tensor([0], device=DEVICE)
    x, a, b = (tensor[0] for tensor in whole.inputs_of())
    whole.window.update(tree, where, where)
    expected = ops.verify(whole.triton._layers[0], whole.window, x, a, b, whole.params, fold_always=False)
    for part in range(2):
        half = Pair(GDNDims(1, 2, 16, 16), requests=1, rows=4, depth=3)
        channels = torch.cat(
            [16 * part + torch.arange(16), 32 + 16 * part + torch.arange(16), 64 + 32 * part + torch.arange(32)]
        )
        channels = channels.to(DEVICE)
        heads = slice(2 * part, 2 * part + 2)
        mine, all_ = half.triton._layers[0], whole.torch._layers[0]
        mine.checkpoint.copy_(all_.checkpoint[:, heads])
        mine.conv.copy_(all_.conv[:, :, channels])
        params = whole.params._replace(
            dims=half.dims, taps=whole.params.taps[:, channels].contiguous(),
            conv_bias=whole.params.conv_bias[channels],
            neg_A=whole.params.neg_A[heads].contiguous(), dt_bias=whole.params.dt_bias[heads].contiguous(),
        )  # fmt: skip
        half.window.update(tree, where, where)
        found = ops.verify(
            mine, half.window, x[:, :, channels], a[:, :, heads], b[:, :, heads], params, fold_always=False
        )
        torch.testing.assert_close(found, expected[:, :, heads], rtol=1e-6, atol=1e-6)


def test_any_parent_first_order_gives_the_same_nodes():
    """Level order serves truncation; the kernels need no more than parents before children."""
    pair = Pair(requests=1, rows=6, depth=5)
    tree, where = DraftTree((-1, 0, 0, 1, 2, 3)), torch.tensor([0], device=DEVICE)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    layer = pair.triton._layers[0]
    pair.window.update(TreeBatch.of([tree], device=DEVICE), where, where)
    expected = ops.verify(layer, pair.window, x, a, b, pair.params, fold_always=False)
    for order in ([0, 1, 3, 5, 2, 4], [0, 2, 4, 1, 3, 5]):  # the row that each place takes
        place = {row: at for at, row in enumerate(order)} | {-1: -1}
        codes = [[place[code] if code >= 0 else code for code in tree.conv_ancestors()[row]] for row in order]
        masks = [sum(1 << place[i] for i in tree.path(row)) for row in order]
        moved = TreeBatch(
            torch.tensor([6]), torch.tensor([[place[tree.parents[row]] for row in order]]),
            torch.tensor([[tree.depths[row] for row in order]]), torch.tensor([masks]), torch.tensor([codes]),
            tree.depth,
        )  # fmt: skip
        pair.window.update(moved, where, where)
        found = ops.verify(layer, pair.window, x[:, order], a[:, order], b[:, order], pair.params, fold_always=False)
        torch.testing.assert_close(found, expected[:, order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dv", [16, 256])
def test_the_gated_norm_is_that_of_the_reference(dv):
    """The mean over a head is taken in one launch however long the head is."""
    pair = Pair(GDNDims(1, 2, 16, dv), requests=2, rows=4, depth=3)
    trees, where = TreeBatch.of([DraftTree((-1, 0, 0))], rows=4, device=DEVICE), torch.tensor([1], device=DEVICE)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    z, weight = torch.randn(2, 4, 2, dv, device=DEVICE), torch.randn(dv, device=DEVICE)
    pair.window.update(trees, where, where)
    plain = ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False)
    normed = ops.verify(
        pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False, norm=GatedNorm(z, weight, 1e-5)
    )
    expected = reference.gated_rms_norm(plain.double(), z.double(), weight.double(), 1e-5)
    expected[0, 3:] = 0
    torch.testing.assert_close(normed[:1].double(), expected[:1], rtol=1e-5, atol=1e-5)
    assert not normed[1].any()


def test_the_same_window_again_gives_the_same():
    pair = Pair(requests=1, rows=4, depth=3, history=4)
    pair.round([DraftTree.chain(3)], [0], [(0, 1, 2)])
    where = torch.tensor([0], device=DEVICE)
    pair.window.update(TreeBatch.of([DraftTree.chain(3)], device=DEVICE), where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    first, second = (
        ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False) for _ in range(2)
    )
    assert not pair.triton.tensors["pending"].any()  # the first has folded
    pair.close(second, first)


def test_another_window_may_take_the_place_of_one_that_waits():
    pair = Pair(requests=1, rows=4, depth=3, history=8)
    pair.round([DraftTree.chain(3)], [0], [(0, 1, 2)])
    where = torch.tensor([0], device=DEVICE)
    pair.window.update(TreeBatch.of([DraftTree((-1, 0, 0, 1))], device=DEVICE), where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False)
    pair.round([DraftTree.chain(1)], [0], [(0, 1)])


def test_inputs_may_be_slices_of_wider_rows():
    """As an engine has them: all tokens of a batch in one dimension, and one projection for x, z, a and b."""
    pair = Pair(requests=2, rows=3, depth=2, history=4)
    trees = TreeBatch.of([DraftTree.chain(2), DraftTree((-1, 0))], rows=3, device=DEVICE)
    where = torch.tensor([1, 0], device=DEVICE)
    pair.window.update(trees, where, where)
    C, heads, dv = pair.dims.conv_dim, pair.dims.num_v_heads, pair.dims.head_v_dim
    x, z, a, b = (
        part.unflatten(0, (2, 3))
        for part in torch.randn(6, C + heads * dv + 2 * heads + 5, device=DEVICE)[:, 5:].split(
            [C, heads * dv, heads, heads], dim=1
        )
    )
    z, weight = z.unflatten(2, (heads, dv)), torch.ones(dv, device=DEVICE)
    outputs = []
    for views in ((x, a, b, z), tuple(tensor.contiguous() for tensor in (x, a, b, z))):
        *inputs, gate = views
        norm = GatedNorm(gate, weight)
        layer = pair.triton._layers[0]
        outputs.append(ops.verify(layer, pair.window, *inputs, pair.params, fold_always=False, norm=norm))
        assert torch.equal(layer.window_inputs[where, :2], x[:, :2])
    assert torch.equal(*outputs)


def walked(pair, x, a, b, parents, params):
    """Outputs of request 0 by the float64 walk, from the rows that the last verify has left in the ring."""
    q = kernels.convolve(pair.triton._layers[0], pair.window, x, params)[0]
    k, v = pair.rows_of(len(parents))
    state = pair.torch._layers[0].checkpoint[0]
    q, k, v, a, b, S = (tensor.cpu().double() for tensor in (q, k, v, a[0], b[0], state))
    none = torch.zeros(params.dims.num_v_heads).double()
    out, _ = reference.walk(
        S, reference.l2_normalize(q) * 16**-0.5, reference.l2_normalize(k), v, reference.log_decay(a, none, none),
        reference.write_strength(b, params.beta_scale), parents,
    )  # fmt: skip
    return out


def test_equal_keys_and_negative_eigenvalues():
    """64 reflections along one key: the inverse has entries of size 2, powers of the interaction have huge ones."""
    rows = 64
    pair = Pair(GDNDims(1, 1, 16, 16), requests=1, rows=rows, depth=rows - 1, history=rows)
    params = pair.params._replace(
        neg_A=torch.tensor([-1.0], device=DEVICE), dt_bias=torch.tensor([0.0], device=DEVICE), beta_scale=2.0
    )
    where = torch.tensor([0], device=DEVICE)
    chain = DraftTree.chain(rows - 1)
    pair.window.update(TreeBatch.of([chain], device=DEVICE), where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    x[:, :, 16:32] = x[:, :1, 16:32]
    a.fill_(-7.0)  # log decay near -0.001
    b.fill_(10.0)
    pair.triton._layers[0].conv[0, :, 16:32] = x[0, 0, 16:32]
    found = ops.verify(pair.triton._layers[0], pair.window, x, a, b, params, fold_always=False).cpu()[0]
    expected = walked(pair, x, a, b, chain.parents, params)
    assert (found - expected).norm() < 5e-5 * expected.norm()


def test_a_strong_decay_above_leaves_the_digits_of_a_weak_one():
    dims, rows = GDNDims(1, 1, 16, 16), 64
    pair = Pair(dims, requests=1, rows=rows, depth=rows - 1, history=rows)
    params = pair.params._replace(neg_A=torch.tensor([-1.0], device=DEVICE), dt_bias=torch.tensor([0.0], device=DEVICE))
    where = torch.tensor([0], device=DEVICE)
    pair.window.update(TreeBatch.of([DraftTree.chain(rows - 1)], device=DEVICE), where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    a.fill_(20.0)
    a[:, 40:] = -4.6  # log decay near -0.01 after 40 rows of -20
    layer = pair.triton._layers[0]
    found = ops.verify(layer, pair.window, x, a, b, params, fold_always=False).cpu().double()[0]
    expected = walked(pair, x, a, b, DraftTree.chain(rows - 1).parents, params)
    assert found.isfinite().all()
    assert float((found - expected).norm() / expected.norm()) < 2e-6


# Bookkeeping


def test_nothing_but_the_round_is_touched():
    pair = Pair(requests=5, batch=4, rows=4, depth=3, history=4)
    pair.round([DraftTree.chain(3)] * 2, [1, 3], [(0, 1, 2)] * 2)
    others = [0, 2, 4]
    before = {name: tensor[:, others].clone() for name, tensor in pair.triton.tensors.items()}
    pair.round([DraftTree.chain(2), DraftTree.chain(1), DraftTree((-1, 0, 0))], [3, -1, 1], [(0, 1), (0,), (0, 2)])
    for name, tensor in pair.triton.tensors.items():
        assert torch.equal(bits(tensor[:, others]), bits(before[name])), name


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_poisoned_request_stays_alone_and_recovers():
    pair = Pair(requests=3, rows=3, depth=2, history=3)
    for side in (pair.torch, pair.triton):
        side.tensors["checkpoint"][:, 1] = float("inf")
    where = torch.tensor([0, 1, 2], device=DEVICE)
    trees = TreeBatch.of([DraftTree.chain(2)] * 3, device=DEVICE)
    pair.window.update(trees, where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    out = ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=True)
    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().all()
    for side in (pair.torch, pair.triton):
        for request in range(3):
            side.reset(request)
    random_rounds(pair, 2)


def test_slots_far_apart_in_a_large_pool():
    dims = GDNDims(1, 1, 16, 16)
    pair = Pair(dims, requests=2, rows=2, depth=1, history=2, state=torch.bfloat16)
    far = 2**31 + 64
    pool = torch.empty(far + 256, dtype=torch.bfloat16, device=DEVICE).as_strided((2, 1, 16, 16), (far, 256, 16, 1))
    pool.copy_(pair.torch._layers[0].checkpoint)
    pair.triton._layers[0] = pair.triton._layers[0]._replace(checkpoint=pool)
    pair.triton._all = pair.triton._all._replace(checkpoint=pool[None])
    for _ in range(2):  # the second round folds what the first has left
        pair.round([DraftTree.chain(1)], [1], [(0, 1)])


@pytest.mark.parametrize(("slot", "request_"), [(3, 0), (0, 3), (0, -1)])
def test_addresses_past_the_end_are_refused_not_clipped(slot, request_):
    pair = Pair(requests=3, rows=2, depth=1)
    pair.window.update(
        TreeBatch.of([DraftTree.chain(1)] * 2, device=DEVICE), torch.tensor([slot, 1]), torch.tensor([request_, 1])
    )
    before = bits(pair.triton.tensors["values"][:, [0, 2]])
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    out = ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False)
    assert not out[0].any()
    assert out[1].any()
    assert torch.equal(bits(pair.triton.tensors["values"][:, [0, 2]]), before)
    with pytest.raises(IndexError, match="slot or running request outside"):
        pair.window.check()
    pair.window.check()  # said once


@pytest.mark.parametrize(
    ("path", "accepted", "why"),
    [
        ((0, 3), 2, "leaves its tree"),
        ((1, 3), 2, "leaves its tree"),
        ((0, 9), 2, "leaves its tree"),
        ((0, 1), 0, "leaves its tree"),
        ((0, 1), 3, "leaves its tree"),
    ],
)
def test_a_wrong_path_changes_nothing(path, accepted, why):
    pair = Pair(requests=1, rows=4, depth=3)
    where = torch.tensor([0], device=DEVICE)
    pair.window.update(TreeBatch.of([DraftTree((-1, 0, 0, 1))], device=DEVICE), where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False)
    before = {name: tensor.clone() for name, tensor in pair.triton.tensors.items()}
    kernels.commit(
        pair.triton._all, pair.window, torch.tensor([path], device=DEVICE), torch.tensor([accepted], device=DEVICE)
    )
    with pytest.raises(ValueError, match=why):
        pair.window.check()
    for name, tensor in pair.triton.tensors.items():
        assert torch.equal(bits(tensor), bits(before[name])), name


def test_a_window_is_committed_once():
    pair = Pair(requests=1, rows=2, depth=1)
    pair.round([DraftTree.chain(1)], [0], [(0, 1)])
    kernels.commit(pair.triton._all, pair.window, torch.tensor([[0]], device=DEVICE), torch.tensor([1], device=DEVICE))
    with pytest.raises(ValueError, match="committed already"):
        pair.window.check()
    pair.same_state()


def test_a_history_without_room_is_refused():
    pair = Pair(requests=1, rows=2, depth=1)
    pair.round([DraftTree.chain(1)], [0], [(0, 1)])
    where = torch.tensor([0], device=DEVICE)
    pair.window.update(TreeBatch.of([DraftTree.chain(1)], device=DEVICE), where, where)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=False)
    pair.triton.tensors["pending"][0, 0] = torch.tensor([0, 15])  # one head without room is enough
    kernels.commit(
        pair.triton._all, pair.window, torch.tensor([[0, 1]], device=DEVICE), torch.tensor([2], device=DEVICE)
    )
    with pytest.raises(ValueError, match="without room"):
        pair.window.check()
    assert pair.triton.tensors["pending"].tolist() == [[[0, 15]]]


# The choice of implementation


def test_the_plan_chooses_and_the_results_agree():
    pair = Pair(requests=2, rows=4, depth=3, history=4)
    trees = TreeBatch.of([DraftTree.chain(2), DraftTree((-1, 0, 0))], rows=4, device=DEVICE)
    where = torch.tensor([1, -1], device=DEVICE)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    path, accepted = torch.tensor([[0, 1], [0, 0]], device=DEVICE), torch.tensor([2, 1], device=DEVICE)
    outputs = []
    for side, impl in ((pair.torch, "torch"), (pair.triton, "triton")):
        window = ops.plan(trees, where, where, num_slots=2, num_requests=2, impl=impl)
        outputs.append(ops.verify(side._layers[0], window, x, a, b, pair.params, fold_always=False))
        ops.commit(side._layers[0], window, path, accepted)
        ops.fold(side._layers[0], where[:1], where[:1], impl=impl)
    pair.close(*outputs)
    pair.same_state()


def test_an_unknown_implementation_is_refused():
    pair = Pair(requests=1, rows=1, depth=0)
    where = torch.tensor([0], device=DEVICE)
    with pytest.raises(ValueError, match="one of torch, triton"):
        ops.plan(TreeBatch.of([DraftTree.chain(0)]), where, where, num_slots=1, num_requests=1, impl="numpy")
    with pytest.raises(ValueError, match="one of torch, triton"):
        ops.fold(pair.triton._layers[0], where, where, impl="numpy")


# What is refused


def test_unsupported_layers_say_why():
    pair = Pair(requests=1, rows=2, depth=1)
    state = pair.triton._layers[0]
    assert unsupported_reason(SMALL, state, 2) is None
    assert "head_k_dim is 24" in unsupported_reason(GDNDims(1, 1, 24, 16), state, 2)
    assert "65 rows" in unsupported_reason(SMALL, state, 65)
    assert "float64" in unsupported_reason(SMALL, state._replace(checkpoint=state.checkpoint.double()), 2)
    assert "history holds" in unsupported_reason(SMALL, state._replace(keys=state.keys[:, :2]), 2)
    assert "checkpoint is not contiguous" in unsupported_reason(
        SMALL, state._replace(checkpoint=state.checkpoint.mT), 2
    )


def test_shapes_that_do_not_fit():
    pair = Pair(requests=2, rows=2, depth=1)
    x, a, b = (tensor[0] for tensor in pair.inputs_of())
    state = pair.triton._layers[0]
    with pytest.raises(ValueError, match="do not fit a plan for 2 of 2"):
        pair.window.update(TreeBatch.of([DraftTree.chain(2)]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"a is \(2, 1, 2\)"):
        ops.verify(state, pair.window, x, a[:, :1], b, pair.params, fold_always=False)
    with pytest.raises(ValueError, match="convert x"):
        ops.verify(state, pair.window, x.half(), a, b, pair.params, fold_always=False)
    with pytest.raises(ValueError, match="heads adjacent"):
        ops.verify(state, pair.window, x, a, b, pair.params, fold_always=False, norm=GatedNorm(x, x))


# On the device


def compilations():
    return sum(len(cache[0]) for cache in verify_kernel.device_caches.values())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["deferred", "reconstruct"])
def test_one_graph_serves_every_topology(mode):
    """Captured once; replayed with other trees, other acceptance, fewer requests, padding; nothing is compiled anew."""
    dims = GDNDims(2, 4, 64, 64)
    pair = Pair(dims, mode, requests=5, batch=4, rows=8, depth=7, state=torch.bfloat16, inputs=torch.bfloat16)
    x, a, b = (torch.zeros_like(tensor[0]) for tensor in pair.inputs_of())
    path = torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
    accepted = torch.ones(4, dtype=torch.int64, device=DEVICE)

    def work():
        out = ops.verify(pair.triton._layers[0], pair.window, x, a, b, pair.params, fold_always=pair.fold_always)
        kernels.commit(pair.triton._all, pair.window, path, accepted)
        return out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()  # all padding: compiles and touches nothing
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = work()
    stream.synchronize()
    before = compilations()
    rng = random.Random(1)
    for _ in range(20):
        count = rng.randint(1, 4)
        trees = [DraftTree.random(rng.randint(1, 8), rng) for _ in range(count)]
        requests = torch.tensor(rng.sample(range(5), count), device=DEVICE)
        if count > 1:
            requests[rng.randrange(count)] = -1
        batch = TreeBatch.of(trees, rows=8, device=DEVICE)
        poison = [(place, 0) for place in range(count, 4)] + [(place, len(tree)) for place, tree in enumerate(trees)]
        for buffer, value in zip((x, a, b), pair.inputs_of(poison), strict=True):
            buffer.copy_(value[0])
        for place, tree in enumerate(trees):
            chosen = tree.path(rng.randrange(len(tree)))
            path[place, : len(chosen)] = torch.tensor(chosen)
            accepted[place] = len(chosen)
        pair.window.update(batch, requests, requests)
        graph.replay()
        plan = pair.torch.plan(batch, requests)
        expected = pair.torch.verify(0, plan, x[:count], a[:count], b[:count], pair.params)
        pair.close(out[:count], expected)
        assert not out[count:].any()
        pair.torch.commit(plan, path[:count], accepted[:count])
        pair.window.check()
        pair.same_state()
    assert compilations() == before


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 15, 40, 64])
@pytest.mark.parametrize("dims", [GDNDims(2, 4, 128, 128), GDNDims(1, 3, 64, 256), GDNDims(1, 8, 256, 64)], ids=str)
def test_real_sizes(dims, rows):
    random_rounds(
        Pair(
            dims,
            requests=3,
            rows=rows,
            depth=rows - 1,
            history=max(rows, 6),
            state=torch.bfloat16,
            inputs=torch.bfloat16,
        ),
        3,
    )
