"""Verify and commit in whole conversations: rounds of draft windows against the float64 walk.

A round gives some of the requests a window each, a chain, a tree or the bare root, in any order, with padding between
them that is filled with NaN; the oracle walks every request alone, row by row. State and inputs are float64, so that
outputs, committed states and convolution inputs must equal the oracle's to 1e-12 (relative to the largest entry): a
wrong row, a stale row or a slot that moved cannot hide behind rounding. All modes get the same rounds, and so do
layers whose requests live in scattered blocks of a larger pool. "Class n" is the row of the list of known failure
classes that a test guards against.
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.layers import (
    MODES,
    SMALL,
    Layer,
    Oracle,
    Pool,
    batch_of,
    changed,
    contents,
    error,
    new_state,
    normal,
    padded_paths,
    random_inputs,
    random_path,
    same_bits,
)
from treewy import ops
from treewy import reference as ref
from treewy.ops import GDNDims, LayerState
from treewy.tree import DraftTree, TreeBatch

TOLERANCE = 1e-12
CHAIN, BARE = DraftTree.chain, DraftTree.chain(0)
# Rows 1 2 below the root, 3 4 below 1, 5 below 2: the paths (0, 2, 5) and (0, 1, 4) skip rows.
BUSHY = DraftTree((-1, 0, 0, 1, 1, 2))


def all_states(dims, *, requests=1, rows=8, history=None, dtype=torch.float64):
    """Every mode, and two layers in scattered blocks."""
    states = {mode: new_state(dims, mode, requests=requests, rows=rows, history=history, dtype=dtype) for mode in MODES}
    slots = random.Random(rows).sample(range(requests + 3), requests)
    for name, fold_always in (("pool, deferred", False), ("pool, reconstruct", True)):
        states[name] = Pool(
            dims, slots=slots, fold_always=fold_always, rows=rows, history=history or max(16, rows), dtype=dtype
        )
    return states


def talk(layer, rounds, *, requests=1, seed=0, rows=8, history=None, dtype=torch.float64, tolerance=TOLERANCE):
    """Plays rounds in all modes and holds every output, state and convolution input against the oracle.

    A round lists (request, tree, accepted path), request -1 for padding.
    """
    g = torch.Generator().manual_seed(seed)
    dims, params = layer.dims, layer.params(dtype)
    states = all_states(dims, requests=requests, rows=rows, history=history, dtype=dtype)
    oracles = [Oracle(layer) for _ in range(requests)]
    for number, entries in enumerate(rounds):
        chosen, trees, paths = zip(*entries, strict=True)
        length = min(rows, max(map(len, trees)) + number % 3)
        inputs = random_inputs(dims, len(entries), length, g, dtype)
        for place, (request, tree, _) in enumerate(entries):
            for tensor in inputs:
                tensor[place, 0 if request < 0 else len(tree) :] = float("nan")
        path, accepted = padded_paths(paths)
        accepted[[place for place, request in enumerate(chosen) if request < 0]] = -5
        live = [(place, request, trees[place]) for place, request in enumerate(chosen) if request >= 0]
        expected = torch.zeros(len(entries), length, dims.num_v_heads, dims.head_v_dim, dtype=torch.float64)
        for place, request, tree in live:
            x, a, b = (tensor[place, : len(tree)] for tensor in inputs)
            expected[place, : len(tree)] = oracles[request].verify(x, a, b, tree.parents)
            oracles[request].commit(paths[place])
        for mode, state in states.items():
            window = state.plan(batch_of(trees, length, dims), torch.tensor(chosen))
            out = state.verify(0, window, *inputs, params)
            assert not out[expected == 0].count_nonzero(), (mode, number)
            for place, _, _ in live:
                assert error(out[place], expected[place]) < tolerance, (mode, number, place)
            state.commit(window, path, accepted)
            for request, oracle in enumerate(oracles):
                S, conv = state.read(0, request)
                assert error(S, oracle.state) < tolerance, (mode, number, request)
                assert torch.equal(conv.double(), oracle.conv), (mode, number, request)
    for state in states.values():
        assert not isinstance(state, Pool) or state.free_blocks_untouched()
    return states, oracles


def random_rounds(rng, requests, rows, count):
    """Rounds of random subsets, orders, trees, paths and padding; a third of the windows are bare roots."""
    rounds = []
    for _ in range(count):
        chosen = rng.sample(range(requests), rng.randint(1, requests))
        for _ in range(rng.randint(0, 2)):
            chosen.insert(rng.randint(0, len(chosen)), -1)
        trees = [
            DraftTree.random(rng.choice([1, rng.randint(1, min(6, rows)), rng.randint(1, rows)]), rng, depth_bias=bias)
            for bias in rng.choices([0, 0.5, 0.9, 1], k=len(chosen))
        ]
        rounds.append([(request, tree, random_path(tree, rng)) for request, tree in zip(chosen, trees, strict=True)])
    return rounds


layers_of_any_shape = st.builds(
    lambda heads, ratio, dk, dv, width, seed, decay, bias, beta_scale: Layer.random(
        GDNDims(heads, heads * ratio, dk, dv, width), seed=seed, decay=decay, bias=bias, beta_scale=beta_scale
    ),
    st.integers(1, 2),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(2, 4),
    st.integers(0, 10**6),
    st.sampled_from(["weak", "middle", "strong"]),
    st.booleans(),
    st.sampled_from([1.0, 2.0]),
)


# Against the walk


@settings(max_examples=40, deadline=None)
@given(layers_of_any_shape, st.sampled_from([3, 16, 64]), st.booleans(), st.integers(0, 10**6))
def test_random_rounds_equal_the_walk_in_every_mode(layer, rows, short_history, seed):
    """Classes 1, 2, 7, 11, 18, 30, 32 in one: any layer, any trees, any order of requests, any accepted paths."""
    history = rows if short_history else None
    rounds = random_rounds(random.Random(seed), requests=3, rows=rows, count=5)
    talk(layer, rounds, requests=3, rows=rows, history=history, seed=seed)


@pytest.mark.parametrize("decay", ["weak", "middle", "strong"])
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_fp32_stays_within_1e_5_of_the_oracle(decay, beta_scale, seed):
    """Class 29, the plainest entry of the matrix: everything fp32."""
    dims = GDNDims(1, 2, head_k_dim=8, head_v_dim=8)
    layer = Layer.random(dims, seed=seed, decay=decay, beta_scale=beta_scale).to(torch.float32)
    rounds = random_rounds(random.Random(seed), requests=2, rows=16, count=4)
    talk(layer, rounds, requests=2, rows=16, dtype=torch.float32, tolerance=1e-5, seed=seed)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_speculative_and_plain_rounds_alternate(width):
    """Classes 1 and 2: after drafts are accepted, the plain round reads state and inputs from the same place."""
    layer = Layer.random(replace(SMALL, conv_width=width))
    drafted, plain = (0, CHAIN(3), (0, 1, 2)), (0, BARE, (0,))
    talk(layer, [[drafted], [plain]] * 3)


@pytest.mark.parametrize("accepted", range(1, 8))
def test_every_accepted_length_commits_its_own_state(accepted):
    """Classes 2 and 4: nothing is clamped to the length of the convolution history, and a plain round goes on."""
    after = {
        n: talk(Layer.random(), [[(0, CHAIN(6), tuple(range(n)))], [(0, BARE, (0,))]])[1][0].state
        for n in {accepted, 1 + accepted % 7}
    }
    assert error(after[accepted], after[1 + accepted % 7]) > 1e-3, "the length must make a difference"


def test_a_missing_accepted_count_is_an_error():
    """Class 3: there is no default length."""
    state = Pool(SMALL, slots=[0])
    window = state.plan(batch_of([BARE]), torch.tensor([0]))
    with pytest.raises(TypeError, match="accepted"):
        ops.commit(state.layer, window, torch.tensor([[0]]))


@pytest.mark.parametrize(
    "trees", [[CHAIN(3)] * 3, [BUSHY, CHAIN(2), BARE], [BARE] * 3], ids=["chain", "mixed", "plain"]
)
@pytest.mark.parametrize("accept", ["root only", "deepest"])
@pytest.mark.parametrize("padding", [False, True])
def test_every_kind_of_round_runs(trees, accept, padding):
    """Classes 7 and 10: chains, trees, windows of 1 and T rows together, padding, everything rejected."""
    paths = [tree.path(0 if accept == "root only" else len(tree) - 1) for tree in trees]
    entries = [(request, tree, path) for request, (tree, path) in enumerate(zip(trees, paths, strict=True))]
    if padding:
        entries.insert(1, (-1, BUSHY, (0,)))
    talk(Layer.random(), [entries, entries[::-1], entries], requests=3)


@pytest.mark.parametrize("rows", range(1, 10))
def test_windows_of_any_number_of_rows(rows):
    """Class 25: no size is special."""
    tree = DraftTree.random(rows, random.Random(rows))
    talk(Layer.random(), [[(0, tree, tree.path(rows - 1))]] * 2, rows=9)


def test_the_largest_window_uses_the_sign_bit_of_its_ancestor_masks():
    """Class 25: 64 rows, chain and tree."""
    tree = DraftTree.random(64, random.Random(1), depth_bias=0.7)
    talk(Layer.random(), [[(0, CHAIN(63), tuple(range(64)))], [(0, tree, tree.path(63))]], rows=64)


def test_rows_meet_their_ancestors_in_the_convolution_however_scattered():
    """Class 32: every depth 0 to 5, width 4, each level's parent drawn from anywhere in the level above."""
    parents, level = [-1], [0]
    rng = random.Random(5)
    for _ in range(5):
        above, level = level, list(range(len(parents), len(parents) + 4))
        parents += sorted(rng.choice(above) for _ in level)
    tree = DraftTree(tuple(parents))
    assert {depth: tree.depths.count(depth) for depth in range(6)} == {0: 1, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4}
    deepest = [(0, tree, tree.path(row)) for row in (20, 9, 3)]
    talk(Layer.random(), [[entry] for entry in deepest], rows=len(tree))


def test_a_path_that_is_no_prefix_of_the_rows_goes_through_history_and_fold():
    """Class 34: (0, 2, 5) is committed, then two more rounds, with folds between them in a history of 7 rows."""
    rounds = [[(0, BUSHY, (0, 2, 5))], [(0, BUSHY, (0, 1, 4))], [(0, CHAIN(5), tuple(range(6)))]]
    states, _ = talk(Layer.random(), rounds, history=7, rows=7)
    assert states["deferred"].tensors["pending"].tolist() == [[[6, 6]]], "the third window did not fit besides six rows"


def test_a_window_of_several_layers_keeps_the_layers_apart():
    """Class 9: one commit for all layers, each with its own weights, inputs and history."""
    g, rng = torch.Generator().manual_seed(0), random.Random(0)
    layers = [Layer.random(seed=seed) for seed in range(3)]
    states = {mode: new_state(SMALL, mode, layers=3, requests=2) for mode in MODES}
    oracles = [[Oracle(layer) for layer in layers] for _ in range(2)]
    for _ in range(6):
        trees = [DraftTree.random(rng.randint(1, 8), rng) for _ in range(2)]
        paths = [random_path(tree, rng) for tree in trees]
        inputs = [random_inputs(SMALL, 2, 8, g) for _ in layers]
        for state in states.values():
            window = state.plan(batch_of(trees, 8), torch.tensor([1, 0]))
            for i, layer in enumerate(layers):
                state.verify(i, window, *inputs[i], layer.params())
            state.commit(window, *padded_paths(paths))
        for place, request in enumerate((1, 0)):
            for i, oracle in enumerate(oracles[request]):
                tree = trees[place]
                oracle.verify(*(tensor[place, : len(tree)] for tensor in inputs[i]), tree.parents)
                oracle.commit(paths[place])
                for state in states.values():
                    assert error(state.read(i, request)[0], oracle.state) < TOLERANCE


def test_the_history_is_folded_no_sooner_than_it_must():
    """The point of the mode `deferred`: 3 + 3 rows are pending, a window of depth 2 still fits, the next does not."""
    layer, pool, g = Layer.random(), Pool(SMALL, slots=[0], history=9), torch.Generator().manual_seed(0)
    pending, written = [], []
    for _ in range(6):
        checkpoint = pool.layer.checkpoint.clone()
        window = pool.plan(batch_of([BUSHY]), torch.tensor([0]))
        pool.verify(0, window, *random_inputs(SMALL, 1, 6, g), layer.params())
        written.append(not same_bits(pool.layer.checkpoint, checkpoint))
        pool.commit(window, *padded_paths([(0, 2, 5)]))
        pending += pool.layer.pending.tolist()
    assert pending == [[n, n] for n in (3, 6, 9, 3, 6, 9)]
    assert written == [False, False, False, True, False, False]


# The ring


def clear_unused(layer, requests, rows=0):
    """NaN in every place that holds neither a pending row nor one of the `rows` of an open window."""
    size = layer.keys.shape[1]
    for request in requests:
        end, pending = int(layer.end[request]), int(layer.pending[request].max())
        used = {(end + place) % size for place in range(-pending, rows)}
        unused = [place for place in range(size) if place not in used]
        for ring in (layer.keys, layer.values, layer.gates):
            ring[request, unused] = float("nan")


@pytest.mark.parametrize("fold_always", [False, True], ids=["deferred", "reconstruct"])
@pytest.mark.parametrize("decay", ["weak", "strong"])
def test_a_ring_goes_round_and_what_is_not_in_use_may_be_anything(fold_always, decay):
    """40 rounds of two requests with pending rows of different number, in a ring of 13 places, the unused ones NaN."""
    layer, rng, g = Layer.random(decay=decay), random.Random(0), torch.Generator().manual_seed(0)
    pool = Pool(SMALL, slots=[2, 0], rows=6, history=7, fold_always=fold_always)
    oracles, size, happened = [Oracle(layer) for _ in range(2)], 13, set()
    for _ in range(40):
        chosen = rng.choice([[0, 1], [1, 0], [0], [1]])
        trees = [DraftTree.random(rng.randint(1, 6), rng, depth_bias=rng.choice([0, 0.5, 1])) for _ in chosen]
        paths = [random_path(tree, rng) for tree in trees]
        inputs = random_inputs(SMALL, len(chosen), 6, g)
        clear_unused(pool.layer, range(2))
        before = contents(pool.layer)
        window = pool.plan(batch_of(trees, 6), torch.tensor(chosen))
        out = pool.verify(0, window, *inputs, layer.params())
        for request in chosen:
            clear_unused(pool.layer, [request], 6)
        pending, end = pool.layer.pending.tolist(), before["end"].tolist()
        pool.commit(window, *padded_paths(paths))
        for place, (request, tree, path) in enumerate(zip(chosen, trees, paths, strict=True)):
            rows = len(tree)
            expected = oracles[request].verify(*(tensor[place, :rows] for tensor in inputs), tree.parents)
            oracles[request].commit(path)
            assert error(out[place, :rows], expected) < TOLERANCE
            assert error(pool.read(0, request)[0], oracles[request].state) < TOLERANCE
            assert int(pool.layer.end[request]) == (end[request] + len(path)) % size
            had = int(before["pending"][request, 0])
            folded = had > 0 and (fold_always or had + tree.depth + 1 > 7)
            assert pending[request] == [0, 0] if folded else [had, had]
            assert pool.layer.pending[request].tolist() == [pending[request][0] + len(path)] * 2
            happened |= {("folded", folded), ("window over the end", end[request] + rows > size)}
            happened |= {("scattered path over the end", end[request] + path[-1] >= size and path[-1] >= len(path))}
            happened |= {("pending over the end", had > end[request])}
    assert len(happened) == 8, "each of these happened, and did not happen"


@pytest.mark.parametrize("path", [(0, 2, 5), (0, 1, 4), (0, 2), (0,)], ids=str)
def test_a_scattered_path_is_gathered_wherever_the_ring_ends(path):
    """Class 34: two layers whose rings end in different places, every pair of them; one commit moves rows in both."""
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    inputs = random_inputs(SMALL, 1, 6, g)
    oracle = Oracle(layer)
    oracle.verify(*(tensor[0] for tensor in inputs), BUSHY.parents)
    oracle.commit(path)
    for end in range(13):
        state = new_state(SMALL, "deferred", layers=2, rows=6, history=7)
        state.tensors["end"][:, 0] = torch.tensor([end, (3 * end + 1) % 13])
        window = state.plan(batch_of([BUSHY]), torch.tensor([0]))
        for number in range(2):
            state.verify(number, window, *inputs, layer.params())
        verified = contents(state)
        state.commit(window, *padded_paths([path]))
        moved = {"keys", "values", "gates"} if path[-1] >= len(path) else set()
        assert changed(state, verified) == moved | {"conv", "end", "pending", "window_rows"}
        for number in range(2):
            assert error(state.read(number, 0)[0], oracle.state) < TOLERANCE
            assert torch.equal(state.read(number, 0)[1], oracle.conv)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_verify_that_folds_gives_the_outputs_of_the_unfolded_state(dtype):
    """Twins, one of which folds: the same outputs to the bit, and nothing pending afterwards.

    Run again it reads the folded checkpoint: the same up to the rounding of that.
    """
    layer, g = Layer.random().to(torch.float32), torch.Generator().manual_seed(0)
    params = layer.params(torch.float64 if dtype == torch.float64 else torch.float32)
    folds, keeps = (new_state(SMALL, "deferred", rows=6, history=rows, dtype=dtype) for rows in (7, 20))
    for _ in range(2):
        inputs = random_inputs(SMALL, 1, 6, g, dtype)
        outs = []
        for state in (folds, keeps):
            window = state.plan(batch_of([BUSHY]), torch.tensor([0]))
            outs.append(state.verify(0, window, *inputs, params))
            state.commit(window, *padded_paths([(0, 2, 5)]))
        assert same_bits(*outs)
    inputs, committed, before = random_inputs(SMALL, 1, 6, g, dtype), folds.read(0, 0)[0], contents(folds)
    window = folds.plan(batch_of([BUSHY]), torch.tensor([0]))
    out = folds.verify(0, window, *inputs, params)
    assert same_bits(out, keeps.verify(0, window, *inputs, params))
    assert folds.tensors["pending"].tolist() == [[[0, 0]]]
    assert keeps.tensors["pending"].tolist() == [[[6, 6]]]
    assert torch.equal(folds.tensors["end"], before["end"]), "only a commit moves it"
    rounding = max(TOLERANCE, torch.finfo(dtype).eps)
    assert error(folds.tensors["checkpoint"][0, 0], committed) < rounding
    folded = contents(folds)
    again = folds.verify(0, window, *inputs, params)
    assert changed(folds, folded) == set()
    assert error(again, out) < rounding
    folds.commit(window, *padded_paths([(0, 1, 3)]))
    keeps.commit(window, *padded_paths([(0, 1, 3)]))
    assert error(folds.read(0, 0)[0], keeps.read(0, 0)[0]) < rounding


def test_each_head_has_what_it_has_pending():
    """Kernels fold head by head: a request whose first head is folded and whose second is not goes on all the same."""
    layer, pool, g = filled_pool(history=9)
    expected, inputs = contents(pool.layer), random_inputs(SMALL, 2, 6, g)
    window = pool.plan(batch_of([BUSHY, CHAIN(2)]), torch.tensor([0, 1]))
    out = pool.verify(0, window, *inputs, layer.params())
    states = [pool.read(0, request)[0] for request in range(2)]
    for name, tensor in pool.layer._asdict().items():
        tensor.copy_(expected[name])
    pool.layer.checkpoint[4, 0] = states[0][0]
    pool.layer.pending[0, 0] = 0
    assert error(pool.verify(0, window, *inputs, layer.params()), out) < TOLERANCE
    for request in range(2):
        assert error(pool.read(0, request)[0], states[request]) < TOLERANCE
    pool.commit(window, *padded_paths([(0, 1), (0, 1)]))
    assert pool.layer.pending.tolist() == [[2, 5], [4, 4]]


# The norm that follows


@pytest.mark.parametrize("mode", MODES)
def test_the_gated_norm_is_that_of_the_reference(mode):
    """Applied to the outputs before they are rounded; padding requests and rows stay zero, whatever z holds there."""
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    state, plain = (new_state(SMALL, mode, requests=2) for _ in range(2))
    trees, inputs = [BUSHY, BARE, CHAIN(3)], random_inputs(SMALL, 3, 6, g)
    z, weight = normal(g, 3, 6, 2, 3), normal(g, 3)
    z[1], z[2, 4:] = float("nan"), float("inf")
    for _ in range(2):
        outs = []
        for one, norm in ((state, ops.GatedNorm(z, weight, eps=1e-3)), (plain, None)):
            window = one.plan(batch_of(trees), torch.tensor([1, -1, 0]))
            outs.append(one.verify(0, window, *inputs, layer.params(), norm=norm))
            one.commit(window, *padded_paths([(0, 2, 5), (0,), (0, 1)]))
        for place, rows in ((0, 6), (2, 4)):
            expected = ref.gated_rms_norm(outs[1][place, :rows], z[place, :rows], weight, 1e-3)
            assert error(outs[0][place, :rows], expected) < TOLERANCE
        assert not outs[0][1].count_nonzero()
        assert not outs[0][2, 4:].count_nonzero()


def test_outputs_are_rounded_after_the_norm_and_not_before():
    """bf16 inputs: of 36 outputs all but a tie are the exact ones rounded once."""
    layer, g = Layer.random().to(torch.float32), torch.Generator().manual_seed(0)
    inputs, z, weight = random_inputs(SMALL, 1, 6, g, torch.bfloat16), normal(g, 1, 6, 2, 3), normal(g, 3)
    state = new_state(SMALL, "deferred", dtype=torch.float32, inputs=torch.bfloat16)
    window = state.plan(batch_of([CHAIN(5)]), torch.tensor([0]))
    normed = state.verify(0, window, *inputs, layer.params(torch.float32), norm=ops.GatedNorm(z, weight))
    oracle, parents = Oracle(layer), CHAIN(5).parents
    x, a, b = (tensor[0].double() for tensor in inputs)
    out, _ = ref.walk(oracle.state, *layer.rows(x, a, b, oracle.conv, parents, torch.bfloat16), parents)
    assert int((normed[0] != ref.gated_rms_norm(out, z[0], weight).bfloat16()).sum()) <= 1


# Order, batch and heads


def test_a_request_does_not_see_its_batch():
    """Class 9: every request of a mixed batch, in any order, equals itself alone; gates and inputs travel together."""
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    trees = [BUSHY, BARE, CHAIN(4), DraftTree.from_widths((3, 2))]
    x, a, b = random_inputs(SMALL, 4, 10, g)
    path, accepted = padded_paths([tree.path(len(tree) - 1) for tree in trees])
    for mode in MODES:
        states, outs = [], []
        for groups in ([[0, 1, 2, 3]], [[2, 0, 3, 1]], [[3], [1], [0], [2]]):
            state, out = new_state(SMALL, mode, requests=4, rows=10), torch.zeros(4, 10, 2, 3, dtype=torch.float64)
            for _ in range(2):
                for group in groups:
                    window = state.plan(batch_of([trees[i] for i in group], 10), torch.tensor(group))
                    out[group] = state.verify(0, window, x[group], a[group], b[group], layer.params())
                    state.commit(window, path[group], accepted[group])
            states.append(torch.stack([state.read(0, request)[0] for request in range(4)]))
            outs.append(out)
        for out, S in zip(outs[1:], states[1:], strict=True):
            assert error(out, outs[0]) < TOLERANCE
            assert error(S, states[0]) < TOLERANCE


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 20), st.integers(0, 10**6))
def test_the_order_of_the_rows_does_not_matter(rows, seed):
    """Class 33: level order, depth first and a random parent-first order of one tree.

    The reference takes any parent-first order as it stands, the operations take it through `level_order`: the same
    output for every node, and the same state for every accepted node.
    """
    layer, dims, rng = Layer.random(seed=seed), SMALL, random.Random(seed)
    tree = DraftTree.random(rows, rng, depth_bias=0.3)
    x, a, b = random_inputs(dims, 1, rows, torch.Generator().manual_seed(seed))
    node = rng.randrange(rows)
    want = Oracle(layer)
    expected = want.verify(x[0], a[0], b[0], tree.parents)
    want.commit(tree.path(node))

    def random_order():
        order, ready = [], [0]
        while ready:
            order.append(ready.pop(rng.randrange(len(ready))))
            ready += tree.children[order[-1]]
        return order

    def depth_first(row=0):
        return [row, *(below for child in tree.children[row] for below in depth_first(child))]

    for nodes in (list(range(rows)), depth_first(), random_order()):
        place = {node: i for i, node in enumerate(nodes)}
        parents = [place.get(tree.parents[node], -1) for node in nodes]
        walk = Oracle(layer)
        assert error(walk.verify(x[0, nodes], a[0, nodes], b[0, nodes], parents), expected[nodes]) < TOLERANCE
        q, k, v, log_alpha, beta = layer.rows(x[0, nodes], a[0, nodes], b[0, nodes], walk.conv, parents)
        assert error(ref.closed_form(walk.state, q, k, v, log_alpha, beta, parents)[0], expected[nodes]) < TOLERANCE

        levels, order = DraftTree.level_order(parents)
        permuted = [nodes[i] for i in order]
        for mode in MODES:
            state = new_state(dims, mode, rows=rows)
            window = state.plan(batch_of([levels]), torch.tensor([0]))
            out = state.verify(0, window, x[:, permuted], a[:, permuted], b[:, permuted], layer.params())
            assert error(out[0], expected[permuted]) < TOLERANCE
            state.commit(window, *padded_paths([levels.path(permuted.index(node))]))
            assert error(state.read(0, 0)[0], want.state) < TOLERANCE


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_heads_can_be_split_over_devices(parts, ratio):
    """Class 30: every device runs its part of the key and value heads; put side by side it is the same result."""
    whole = Layer.random(GDNDims(4, 4 * ratio, 4, 3))
    g, rng = torch.Generator().manual_seed(0), random.Random(0)
    rounds = [(*random_inputs(whole.dims, 1, 6, g), random_path(BUSHY, rng)) for _ in range(4)]

    def run(layer, channels, part, count):
        outs, state = [], new_state(layer.dims, "deferred", rows=6, history=7)
        for x, a, b, path in rounds:
            window = state.plan(batch_of([BUSHY]), torch.tensor([0]))
            mine = (tensor.chunk(count, dim=2)[part] for tensor in (a, b))
            outs.append(state.verify(0, window, x[:, :, channels], *mine, layer.params()))
            state.commit(window, *padded_paths([path]))
        return torch.stack(outs), state.read(0, 0)[0]

    expected, S = run(whole, slice(None), 0, 1)
    shards = [run(*whole.shard(part, parts), part, parts) for part in range(parts)]
    assert error(torch.cat([out for out, _ in shards], dim=3), expected) < TOLERANCE
    assert error(torch.cat([state for _, state in shards]), S) < TOLERANCE


# Memory


def filled_pool(num_slots=6, **options):
    """A pool whose two requests sit in the blocks 4 and 1, after one round with a pending history; nothing is NaN."""
    layer, pool = Layer.random(), Pool(SMALL, slots=[4, 1], num_slots=num_slots, **options)
    g = torch.Generator().manual_seed(9)
    for tensor in pool.layer:
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=g, dtype=torch.float64))
    window = pool.plan(batch_of([BUSHY, CHAIN(3)]), torch.tensor([0, 1]))
    pool.verify(0, window, *random_inputs(SMALL, 2, 6, g), layer.params())
    pool.commit(window, *padded_paths([(0, 2, 5), (0, 1)]))
    return layer, pool, g


def test_only_the_slot_of_a_request_changes_and_only_where_the_contract_says():
    """Class 5: of the pools a verify writes the folded checkpoint, a commit the convolution inputs, in one block."""
    layer, pool, g = filled_pool(history=6)
    before = contents(pool.layer)
    window = pool.plan(batch_of([CHAIN(3)]), torch.tensor([0]))
    pool.verify(0, window, *random_inputs(SMALL, 1, 4, g), layer.params())
    ring = {"keys", "values", "gates"}
    assert changed(pool.layer, before) == ring | {"window_inputs", "window_rows", "checkpoint", "pending"}, (
        "three pending rows and four do not fit six"
    )
    verified = contents(pool.layer)
    pool.commit(window, *padded_paths([(0, 1)]))
    assert changed(pool.layer, verified) == {"conv", "end", "pending", "window_rows"}, "a chain moves no row"
    for name, tensor in pool.layer._asdict().items():
        mine = 4 if name in ("checkpoint", "conv") else 0
        others = [i for i in range(len(tensor)) if i != mine]
        assert same_bits(tensor[others], before[name][others]), name


def test_fold_empties_the_history_of_its_requests_and_of_no_other():
    """Class 5: a fold writes one block and one pending count; what reads the block then finds the folded state."""
    _, pool, _ = filled_pool()
    before, folded = contents(pool.layer), pool.read(0, 1)[0]
    ops.fold(pool.layer, torch.tensor([1]), torch.tensor([1]))
    assert changed(pool.layer, before) == {"checkpoint", "pending"}
    assert pool.layer.pending.tolist() == [[3, 3], [0, 0]]
    assert same_bits(pool.layer.checkpoint[1], folded)
    others = [0, 2, 3, 4, 5]
    assert same_bits(pool.layer.checkpoint[others], before["checkpoint"][others])
    ops.fold(pool.layer, torch.tensor([1]), torch.tensor([1]))
    assert same_bits(pool.layer.checkpoint[1], folded), "with nothing pending a fold changes nothing"


def test_padding_touches_nothing_and_gives_zeros():
    """Class 11: garbage in a padding request and in the rows past a tree reaches neither outputs nor any slot."""
    layer, pool, g = filled_pool()
    twin = Pool(SMALL, slots=[4, 1], num_slots=6)
    for mine, theirs in zip(twin.layer, pool.layer, strict=True):
        mine.copy_(theirs)
    x, a, b = random_inputs(SMALL, 4, 6, g)
    for garbage in (x, a, b):
        garbage[[0, 2]] = float("nan")
        garbage[1, 2:] = float("inf")
    trees = [BUSHY, CHAIN(1), CHAIN(5), BUSHY]
    window = pool.plan(batch_of(trees), torch.tensor([-1, 1, -1, 0]))
    out = pool.verify(0, window, x, a, b, layer.params())
    assert out.isfinite().all()
    assert not out[[0, 2]].count_nonzero()
    assert not out[1, 2:].count_nonzero()
    pool.commit(window, torch.tensor([[7, 7], [0, 1], [-1, -1], [0, 2]]), torch.tensor([0, 2, 99, 2]))

    alone = twin.plan(batch_of([trees[1], trees[3]], 6), torch.tensor([1, 0]))
    real = [tensor[[1, 3]] for tensor in (x, a, b)]
    for tensor in real:
        tensor[0, 2:] = 0
    assert same_bits(twin.verify(0, alone, *real, layer.params()), out[[1, 3]])
    twin.commit(alone, torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 2]))
    assert changed(pool.layer, contents(twin.layer)) == set()


def test_a_round_of_nothing_but_padding_changes_nothing():
    """Class 11: all slots negative."""
    layer, pool, g = filled_pool()
    before = contents(pool.layer)
    window = pool.plan(batch_of([BUSHY, BARE]), torch.tensor([-1, -1]))
    out = pool.verify(0, window, *random_inputs(SMALL, 2, 6, g), layer.params())
    pool.commit(window, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    ops.fold(pool.layer, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert changed(pool.layer, before) == set()
    assert out.shape == (2, 6, 2, 3)
    assert not out.count_nonzero()


def test_a_smaller_batch_in_the_buffers_of_a_larger_one_leaves_the_rest_alone():
    """Class 12: buffers for four requests; after a round of four comes one of three, the fourth place is padding.

    The buffers still hold the fourth request's inputs and running index, as they do when a captured graph is replayed.
    """
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    pool = Pool(SMALL, slots=[5, 2, 0, 3], num_slots=7)
    trees = [CHAIN(3), BUSHY, BARE, CHAIN(5)]
    slots, requests = torch.tensor([5, 2, 0, 3]), torch.arange(4)
    x, a, b = random_inputs(SMALL, 4, 6, g)
    path, accepted = padded_paths([tree.path(len(tree) - 1) for tree in trees])
    for slot_of_the_last in (3, -1, -1):
        slots[3] = slot_of_the_last
        before = contents(pool.layer)
        window = ops.plan(batch_of(trees), slots, requests, num_slots=7, num_requests=4)
        out = pool.verify(0, window, x, a, b, layer.params())
        pool.commit(window, path, accepted)
        assert out.isfinite().all()
        assert bool(out[3].count_nonzero()) == (slot_of_the_last >= 0)
    for name, tensor in pool.layer._asdict().items():
        guarded = [3, 1, 4, 6] if name in ("checkpoint", "conv") else [3]
        assert same_bits(tensor[guarded], before[name][guarded]), name
    assert pool.layer.pending.tolist() == [[n, n] for n in (12, 9, 3, 6)]


def test_addresses_are_64_bit():
    """Class 14: two blocks 2^31 elements apart. The memory between them is never touched, so it costs nothing."""
    layer, dims = Layer.random(), SMALL
    far = 2**31
    pool = Pool(dims, slots=[1, 0], num_slots=2, fold_always=True, dtype=torch.bfloat16)

    def spread(tensor):
        block = tensor[0].numel()
        view = torch.empty(far + block, dtype=tensor.dtype).as_strided(tensor.shape, (far, *tensor[0].stride()))
        return view.copy_(tensor)

    copies = {name: tensor.clone() for name, tensor in pool.layer._asdict().items()}
    wide = LayerState(**copies | {name: spread(copies[name]) for name in ("checkpoint", "conv")})
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        inputs = random_inputs(dims, 1, 6, g, torch.bfloat16)
        window = pool.plan(batch_of([BUSHY]), torch.tensor([0]))
        for state in (pool.layer, wide):
            before = contents(state)
            ops.verify(state, window, *inputs, layer.params(torch.float32), fold_always=True)
            ops.commit(state, window, *padded_paths([(0, 2, 5)]))
            assert same_bits(state.checkpoint[0], before["checkpoint"][0])
            assert same_bits(state.conv[0], before["conv"][0])
    assert wide.checkpoint[1].count_nonzero()
    assert changed(wide, contents(pool.layer)) == set()


def test_a_poisoned_request_stays_alone_and_its_slot_recovers():
    """Class 17: infinities in one request's state, history, stash and inputs; then the slot gets a new request."""
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    for mode in MODES:
        state, clean = (new_state(SMALL, mode, requests=2) for _ in range(2))
        for tensor in state.tensors.values():
            if tensor.is_floating_point():
                tensor[:, 0] = float("inf")
        for number in range(6):
            inputs = random_inputs(SMALL, 2, 6, g)
            if number == 3:
                state.reset(0)
                clean.reset(0)
            outs = []
            for one in (state, clean):
                window = one.plan(batch_of([BUSHY, BUSHY]), torch.tensor([0, 1]))
                outs.append(one.verify(0, window, *inputs, layer.params()))
                one.commit(window, *padded_paths([(0, 1), (0, 2, 5)]))
            assert same_bits(outs[0][1], outs[1][1]), "the other request is untouched"
            assert bool(outs[0][0].isfinite().all()) == (number >= 3)
            assert same_bits(outs[0][0], outs[1][0]) == (number >= 3)


# Interruption and repetition


class Interrupt(TorchDispatchMode):
    """Raises instead of the n-th tensor operation."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.last = at, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.at -= 1
        self.last = str(func)
        if self.at < 0:
            raise InterruptedError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fold_always", [False, True], ids=["deferred", "reconstruct"])
def test_a_verify_that_stops_anywhere_can_be_run_again(fold_always):
    """A round that fails halfway, at any tensor operation, is repeated: same outputs, same committed state.

    The two writes of a fold, checkpoint and pending count, stand together; nothing can fail between them.
    """
    layer, pool, g = filled_pool(history=6, fold_always=fold_always)
    inputs = random_inputs(SMALL, 2, 6, g)
    before = contents(pool.layer)
    window = pool.plan(batch_of([CHAIN(3), BUSHY]), torch.tensor([0, 1]))

    def run(interrupt):
        for name, tensor in pool.layer._asdict().items():
            tensor.copy_(before[name])
        try:
            with Interrupt(interrupt) as mode:
                out = pool.verify(0, window, *inputs, layer.params())
        except InterruptedError:
            if mode.last.startswith("aten.index_fill_"):
                return None
            out = pool.verify(0, window, *inputs, layer.params())
        else:
            nonlocal finished
            finished = True
        pool.commit(window, *padded_paths([(0, 1), (0, 2)]))
        return out, [pool.read(0, request) for request in range(2)]

    finished = False
    expected, committed = run(10**6)
    finished, at, repeated = False, 0, 0
    while not finished:
        if (result := run(at)) is not None:
            assert error(result[0], expected) < TOLERANCE, at
            for (S, conv), (want_S, want_conv) in zip(result[1], committed, strict=True):
                assert error(S, want_S) < TOLERANCE, at
                assert torch.equal(conv, want_conv), at
            repeated += 1
        at += 1
    assert repeated > 30


@pytest.mark.parametrize("mode", ["reconstruct", "deferred"])
def test_a_window_may_be_run_again_or_replaced_before_its_commit(mode):
    """The last window counts, however many were run before it: a retry, another tree, another batch."""
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    state, once = new_state(SMALL, mode, requests=2, history=8), new_state(SMALL, mode, requests=2, history=8)
    for number in range(5):
        inputs, others = random_inputs(SMALL, 2, 6, g), random_inputs(SMALL, 2, 8, g)
        state.verify(0, state.plan(batch_of([CHAIN(7), BARE]), torch.tensor([1, 0])), *others, layer.params())
        window = state.plan(batch_of([BUSHY, CHAIN(number)], 6), torch.tensor([0, 1]))
        outs = [state.verify(0, window, *inputs, layer.params()) for _ in range(3)]
        alone = once.verify(0, window, *inputs, layer.params())
        for one in (state, once):
            one.commit(window, *padded_paths([(0, 2, 5), (0,)]))
        assert all(error(out, alone) < TOLERANCE for out in outs)
        for request in range(2):
            assert error(state.read(0, request)[0], once.read(0, request)[0]) < TOLERANCE
            assert torch.equal(state.read(0, request)[1], once.read(0, request)[1])


def test_trees_are_data_for_any_topology_of_the_same_rows():
    """A batch of trees built as tensors, not from `DraftTree`, with the padding that `TreeBatch` documents."""
    layer, g = Layer.random(), torch.Generator().manual_seed(0)
    made = batch_of([BUSHY, CHAIN(2)], 7)
    copied = TreeBatch(*(field.clone() if isinstance(field, torch.Tensor) else field for field in made))
    inputs = random_inputs(SMALL, 2, 7, g)
    outs = []
    for trees in (made, copied):
        state = new_state(SMALL, "deferred", requests=2)
        outs.append(state.verify(0, state.plan(trees, torch.tensor([0, 1])), *inputs, layer.params()))
    assert same_bits(*outs)
    new = batch_of([CHAIN(5), CHAIN(5)], 7)
    for old, field in zip(copied, new, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(field)
    refilled = copied._replace(max_depth=5)
    outs = []
    for trees in (new, refilled):
        state = new_state(SMALL, "deferred", requests=2)
        outs.append(state.verify(0, state.plan(trees, torch.tensor([0, 1])), *inputs, layer.params()))
    assert same_bits(*outs)
