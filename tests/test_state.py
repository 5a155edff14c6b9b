"""State of running requests: its bytes, and its life between rounds in the three modes.

Bytes are counted tensor by tensor against what the specification says. Life is load, read, fold, copy and reset,
between rounds and inside of them: each against a request that lived without them, or against the float64 walk. Where a
call must leave others alone, every tensor of the others is compared bit for bit. "Class n" is the row of the list of
known failure classes that a test guards against.
"""

import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.layers import (
    MODES,
    SMALL,
    Layer,
    Oracle,
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
from treewy.ops import GDNDims
from treewy.state import RecurrentState, StateSpec
from treewy.tree import DraftTree

LAYER = Layer.random()
BUSHY = DraftTree((-1, 0, 0, 1, 1, 2))
SHIPPED = GDNDims(num_k_heads=1, num_v_heads=2, head_k_dim=128, head_v_dim=128)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run(state, request, tree, path, inputs):
    """One round of one request in every layer; path None leaves the window open."""
    window = state.plan(batch_of([tree]), torch.tensor([request]))
    outs = [state.verify(layer, window, *inputs, LAYER.params()) for layer in range(state.spec.num_layers)]
    if path is not None:
        state.commit(window, *padded_paths([path]))
    return outs[0]


def rounds(count, seed=0):
    """Trees, accepted paths and inputs."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        tree = DraftTree.random(rng.randint(1, 8), rng)
        yield tree, random_path(tree, rng), random_inputs(SMALL, 1, len(tree), g)


# Bytes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODES),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(2, 4)),
    st.integers(1, 3),
    st.integers(1, 12).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows - 1))),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.none() | st.integers(12, 20),
    st.integers(1, 4),
)
def test_the_specification_says_what_is_allocated_to_the_byte(
    mode, dims, layers, window, state, inputs, history, count
):
    """Classes 18 and 20: piece by piece, for any dimensions; bytes follow the running requests and nothing else."""
    heads, ratio, dk, dv, width = dims
    gdn = GDNDims(heads, heads * ratio, dk, dv, width)
    spec = StateSpec(gdn, layers, mode, *window, state, inputs, history)
    allocated = RecurrentState(spec, count)
    pieces = spec.bytes_by_piece()
    assert {name: tensor.nbytes for name, tensor in allocated.tensors.items()} == {
        name: count * size for name, size in pieces.items()
    }
    assert allocated.nbytes == count * spec.bytes_per_request == count * sum(pieces.values())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in allocated.tensors.values())


def test_states_kept_per_request():
    """Class 18: one state a request, however large the window; `store_all` keeps one a row."""
    one = SHIPPED.num_v_heads * SHIPPED.head_k_dim * SHIPPED.head_v_dim * 4
    for rows, depth in ((1, 0), (4, 3), (40, 3)):
        for mode in ("reconstruct", "deferred"):
            assert StateSpec(SHIPPED, 6, mode, rows, depth).bytes_by_piece()["checkpoint"] == 6 * one
        assert StateSpec(SHIPPED, 6, "store_all", rows, depth).bytes_by_piece()["snapshots"] == 6 * rows * one


def test_bytes_of_the_shipped_dimensions():
    """Widths (3, 3, 3), six layers, fp32: what a request costs in each mode, and what `store_all` costs more."""
    tree = DraftTree.from_widths((3, 3, 3))
    size = {mode: StateSpec(SHIPPED, 6, mode, len(tree), tree.depth).bytes_per_request for mode in MODES}
    assert size == {"store_all": 31_985_736, "reconstruct": 1_724_640, "deferred": 1_799_136}
    assert size["store_all"] / size["reconstruct"] > 15


def test_the_default_history_holds_three_paths():
    assert StateSpec(SMALL, 1, "deferred", 40, 2).history == 12
    assert StateSpec(SMALL, 1, "deferred", 40, 4).history == 15
    assert StateSpec(SMALL, 1, "deferred", 40, 9).history == 30
    assert StateSpec(SMALL, 1, "deferred", 40, 9, history_rows=12).history == 12
    assert StateSpec(SMALL, 1, "reconstruct", 40, 9).history == 10
    assert StateSpec(SMALL, 1, "store_all", 40, 9).history == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "snapshot"}, "mamba_state_commit is 'snapshot'; it is one of store_all, reconstruct, deferred"),
        ({"num_layers": 0}, "num_layers is 0; there must be at least one GDN layer"),
        ({"max_rows": 0}, "max_rows is 0; a window has 1 to 64 rows, root included"),
        ({"max_rows": 65}, "max_rows is 65; a window has 1 to 64 rows, root included"),
        ({"max_depth": 8}, "max_depth is 8; a window of 8 rows is 0 to 7 deep"),
        ({"max_depth": -1}, "max_depth is -1; a window of 8 rows is 0 to 7 deep"),
        ({"history_rows": 3}, "history_rows is 3; the longest path of a window has 4 rows and must fit; give at least"),
        ({"history_rows": 0}, "the longest path of a window has 4 rows and must fit; give at least 4"),
    ],
)
def test_a_specification_that_cannot_work_is_refused(change, message):
    good = {"layers": SMALL, "num_layers": 1, "mode": "deferred", "max_rows": 8, "max_depth": 3}
    StateSpec(**good)
    with pytest.raises(ValueError, match=re.escape(message)):
        StateSpec(**good | change)


def test_no_requests_is_refused():
    with pytest.raises(ValueError, match="num_requests is 0; there must be at least one"):
        RecurrentState(StateSpec(SMALL, 1, "deferred", 1, 0), 0)


@pytest.mark.parametrize(
    ("mode", "impl", "message"),
    [
        ("store_all", "triton", "impl is 'triton', but the mode store_all is there in torch only: choose another mode"),
        ("deferred", "numpy", "impl is 'numpy'; it is one of torch, triton, cuda"),
    ],
)
def test_an_implementation_that_there_is_not(mode, impl, message):
    with pytest.raises(ValueError, match=message):
        RecurrentState(StateSpec(SMALL, 1, mode, 1, 0), 1, impl=impl)


# Load, read, fold


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_state_goes_on_from_where_the_prompt_ended(mode):
    """Class 17 too: whatever the slot held before, pending rows and infinities included, is gone."""
    state, oracle, g = new_state(SMALL, mode, requests=2), Oracle(LAYER), torch.Generator().manual_seed(0)
    for tree, path, inputs in rounds(3, seed=1):
        run(state, 1, tree, path, inputs)
    for name, tensor in state.tensors.items():
        if tensor.is_floating_point() and name != "conv":
            tensor[:, 1] = float("inf")
    oracle.state, oracle.conv = normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim)
    state.load(0, 1, oracle.state, oracle.conv)
    for tree, path, inputs in rounds(4, seed=2):
        expected = oracle.verify(*(tensor[0] for tensor in inputs), tree.parents)
        oracle.commit(path)
        assert error(run(state, 1, tree, path, inputs)[0], expected) < 1e-12
        assert error(state.read(0, 1)[0], oracle.state) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_read_gives_back_what_load_was_given_as_copies(mode):
    state, g = new_state(SMALL, mode, layers=2, requests=2), torch.Generator().manual_seed(0)
    S, conv = normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim)
    state.load(1, 0, S, conv)
    read = state.read(1, 0)
    assert same_bits(read[0], S)
    assert same_bits(read[1], conv)
    before = contents(state)
    for tensor in read:
        tensor.fill_(7)
    assert changed(state, before) == set()
    assert not state.read(0, 0)[0].count_nonzero()
    assert not state.read(1, 1)[0].count_nonzero()


@pytest.mark.parametrize("mode", MODES)
def test_fold_changes_neither_what_is_read_nor_what_follows(mode):
    """Class 22: anything that reads the block finds everything in it; folding at any time is only a matter of bytes."""
    folded, left = (new_state(SMALL, mode, layers=2, requests=2) for _ in range(2))
    for number, (tree, path, inputs) in enumerate(rounds(8)):
        request = number % 2
        assert error(run(folded, request, tree, path, inputs), run(left, request, tree, path, inputs)) < 1e-12
        folded.fold([0, 1] if number % 3 else [request])
        if mode != "store_all":
            assert not folded.tensors["pending"][:, request].count_nonzero()
            assert same_bits(folded.read(1, request)[0], folded.tensors["checkpoint"][1, request])
        for layer in range(2):
            assert error(folded.read(layer, request)[0], left.read(layer, request)[0]) < 1e-12
    before = contents(folded)
    folded.fold([])
    folded.fold([0, 1])
    assert changed(folded, before) == set()


@pytest.mark.parametrize(("mode", "pending"), [("reconstruct", [0, 0, 0]), ("deferred", [0, 2, 4])])
def test_the_next_verify_folds_the_accepted_path_only_in_the_mode_reconstruct(mode, pending):
    """The switch between the two modes: when the history reaches the checkpoint."""
    state, found = new_state(SMALL, mode), []
    for _ in range(3):
        committed = state.read(0, 0)[0]
        run(state, 0, BUSHY, None, random_inputs(SMALL, 1, 6, torch.Generator().manual_seed(0)))
        found += state.tensors["pending"][0].tolist()
        if mode == "reconstruct":
            assert error(state.tensors["checkpoint"][0, 0], committed) < 1e-12
        run(state, 0, BUSHY, (0, 2), random_inputs(SMALL, 1, 6, torch.Generator().manual_seed(0)))
    assert found == [[rows, rows] for rows in pending]


@pytest.mark.parametrize("mode", ["reconstruct", "deferred"])
def test_a_fold_between_verify_and_commit_is_harmless(mode):
    folded, left = (new_state(SMALL, mode) for _ in range(2))
    for tree, path, inputs in rounds(5):
        for state in (folded, left):
            window = state.plan(batch_of([tree]), torch.tensor([0]))
            state.verify(0, window, *inputs, LAYER.params())
            if state is folded:
                state.fold([0])
            state.commit(window, *padded_paths([path]))
        assert error(folded.read(0, 0)[0], left.read(0, 0)[0]) < 1e-12


# Forks and snapshots


@pytest.mark.parametrize("mode", MODES)
def test_a_fork_goes_its_own_way(mode):
    """Class 22: `copy` at token b, on with drafts across b, back to the copy: equals a run that never left."""
    state, cold = new_state(SMALL, mode, requests=3, layers=2), new_state(SMALL, mode, layers=2)
    for tree, path, inputs in rounds(3, seed=1):
        run(state, 0, tree, path, inputs)
        run(cold, 0, tree, path, inputs)
    snapshot = 2
    state.copy(0, snapshot)
    kept = [state.read(layer, snapshot) for layer in range(2)]
    for tree, path, inputs in rounds(5, seed=2):
        run(state, 0, tree, path, inputs)
    for layer in range(2):
        for now, then in zip(state.read(layer, snapshot), kept[layer], strict=True):
            assert same_bits(now, then), "the original did not write into the copy"
        assert error(state.read(layer, 0)[0], kept[layer][0]) > 1e-3
    state.copy(snapshot, 1)
    for tree, path, inputs in rounds(5, seed=3):
        assert same_bits(run(state, 1, tree, path, inputs), run(cold, 0, tree, path, inputs))
    for layer in range(2):
        for mine, theirs in zip(state.read(layer, 1), cold.read(layer, 0), strict=True):
            assert same_bits(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_reject_all_and_restore_repeats_the_run(mode):
    """Class 6: a sentinel state, a snapshot, a run, everything rejected, the snapshot back: the run repeats exactly.

    A snapshot of zero bytes would repeat something else: the copy moves every byte that a request has.
    """
    state, g = new_state(SMALL, mode, requests=2), torch.Generator().manual_seed(0)
    state.load(0, 0, normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim))
    before = contents(state)
    state.copy(0, 1)
    assert changed(state, before) >= {"conv", "snapshots" if mode == "store_all" else "checkpoint"}
    outs = []
    for _ in range(2):
        outs.append([run(state, 0, tree, (0,), inputs) for tree, _, inputs in rounds(4)])
        state.copy(1, 0)
    assert all(same_bits(*pair) for pair in zip(*outs, strict=True))
    assert all(same_bits(tensor[:, 0], tensor[:, 1]) for tensor in state.tensors.values())
    assert sum(tensor[:, 1].nbytes for tensor in state.tensors.values()) == state.spec.bytes_per_request > 0


@pytest.mark.parametrize("mode", ["reconstruct", "deferred"])
def test_a_fork_inside_a_window_is_a_fork_of_what_is_committed(mode):
    """Class 22: a window that waits for its commit belongs to the request that ran it, not to the copy."""
    state = new_state(SMALL, mode, requests=2)
    for tree, path, inputs in rounds(3):
        run(state, 0, tree, path, inputs)
    committed = state.read(0, 0)
    tree, path, inputs = BUSHY, (0, 2), random_inputs(SMALL, 1, 6, torch.Generator().manual_seed(9))
    run(state, 0, tree, None, inputs)
    state.copy(0, 1)
    for mine, before in zip(state.read(0, 1), committed, strict=True):
        assert error(mine, before) < 1e-12
    out = run(state, 1, tree, path, inputs)
    assert error(out, run(state, 0, tree, path, inputs)) < 1e-12
    assert error(state.read(0, 1)[0], state.read(0, 0)[0]) < 1e-12


def test_store_all_has_no_committed_state_inside_a_window():
    """Class 22: reading and forking are refused there, among states of draft rows; load and reset mend it."""
    state, g = new_state(SMALL, "store_all", requests=2, layers=2), torch.Generator().manual_seed(0)
    inputs = random_inputs(SMALL, 1, 6, g)
    run(state, 0, BUSHY, (0, 2), inputs)
    run(state, 0, BUSHY, None, inputs)
    before = contents(state)
    for call in (lambda: state.read(1, 0), lambda: state.copy(0, 1)):
        with pytest.raises(ValueError, match=r"request 0 is between verify and commit.*commit first"):
            call()
    assert changed(state, before) == set()
    state.copy(1, 0)
    run(state, 0, BUSHY, None, inputs)
    state.reset(0)
    run(state, 0, BUSHY, None, inputs)
    for layer in range(2):
        state.load(layer, 0, normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim))
    run(state, 0, BUSHY, (0,), inputs)


@pytest.mark.parametrize("mode", MODES)
def test_a_window_ends_with_the_request_it_belongs_to(mode):
    """Its commit, after a load or a reset took the request's place, is refused instead of committed to the new one."""
    state, g = new_state(SMALL, mode), torch.Generator().manual_seed(0)
    window = state.plan(batch_of([BUSHY]), torch.tensor([0]))
    for begin in (lambda: state.reset(0), lambda: state.load(0, 0, normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim))):
        state.verify(0, window, *random_inputs(SMALL, 1, 6, g), LAYER.params())
        begin()
        before = contents(state)
        with pytest.raises(ValueError, match="verify it in every layer"):
            state.commit(window, torch.tensor([[0]]), torch.tensor([1]))
        assert changed(state, before) == set()


# Others


@pytest.mark.parametrize("mode", MODES)
def test_whatever_happens_to_one_request_the_others_stay_as_they_are(mode):
    """Class 21: 10 000 random loads, resets, copies, rounds and aborted windows over the three modes.

    After each of them every tensor of every other request is the same, bit for bit.
    """
    rng, g = random.Random(0), torch.Generator().manual_seed(0)
    state = new_state(SMALL, mode, requests=4, layers=1, rows=6, history=7)
    ready = list(rounds(20))
    ready = [entry for entry in ready if len(entry[0]) <= 6]
    flat = {name: tensor.view(4, -1) for name, tensor in state.tensors.items()}
    happened = dict.fromkeys(["load", "reset", "copy", "round", "abort"], 0)
    for _ in range(10_000 // 3 + 1):
        request, other = rng.sample(range(4), 2)
        before = {name: tensor.clone() for name, tensor in flat.items()}
        what = rng.choice(list(happened))
        is_open = mode == "store_all" and bool(state.tensors["window_rows"][:, request].any())
        if what in ("round", "abort") and not is_open:
            tree, path, inputs = rng.choice(ready)
            run(state, request, tree, path if what == "round" else None, inputs)
        elif what == "copy" and not (mode == "store_all" and bool(state.tensors["window_rows"][:, other].any())):
            state.copy(other, request)
        elif what == "load":
            state.load(0, request, normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim))
        else:
            what = "reset"
            state.reset(request)
        happened[what] += 1
        for name, tensor in flat.items():
            tensor_before = before[name]
            tensor_before[request] = tensor[request]
            assert torch.equal(tensor, tensor_before), (what, name)
    assert min(happened.values()) > 200


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_does_not_exist_is_refused(mode):
    """Class 15: neither clipped nor counted from the end."""
    state, g = new_state(SMALL, mode, requests=2), torch.Generator().manual_seed(0)
    for tensor in state.tensors.values():
        if tensor.is_floating_point():
            tensor.normal_(generator=g)
    S, conv = normal(g, 2, 3, 4), normal(g, 3, SMALL.conv_dim)
    before = contents(state)
    for bad in (2, -1):
        calls = (
            lambda bad=bad: state.read(0, bad),
            lambda bad=bad: state.load(0, bad, S, conv),
            lambda bad=bad: state.reset(bad),
            lambda bad=bad: state.fold([0, bad]),
            lambda bad=bad: state.copy(0, bad),
            lambda bad=bad: state.copy(bad, 0),
        )
        for call in calls:
            with pytest.raises(IndexError, match=re.escape(f"request {bad} is outside the 2 that exist (0 .. 1)")):
                call()
    with pytest.raises(IndexError, match=r"slot 2 is outside the 2 that exist \(0 .. 1\)"):
        state.plan(batch_of([BUSHY]), torch.tensor([2]))
    for wrong in ((S[:1], conv), (S, conv[1:]), (S.transpose(1, 2), conv)):
        with pytest.raises(ValueError, match=r"do not fit \(2, 3, 4\) and \(3, 14\)"):
            state.load(0, 0, *wrong)
    assert changed(state, before) == set()


def test_the_state_of_another_device_is_allocated_there():
    """`meta` stands for any device: nothing is allocated anywhere else."""
    state = RecurrentState(StateSpec(SMALL, 2, "deferred", 8, 7), 2, device="meta")
    assert {tensor.device.type for tensor in state.tensors.values()} == {"meta"}
