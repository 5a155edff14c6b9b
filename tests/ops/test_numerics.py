"""Rounding: the error of the operations beside the error of the plain recurrence in the same dtypes.

Both are measured against the float64 walk over the same inputs, as root mean square relative to that of the result. The
plain recurrence (`layers.Plain`) is what an engine without speculation computes: arithmetic in fp32, the convolution's
output and the outputs in the dtype of the inputs, the state rounded after every token. Speculation may not cost
accuracy: the ratio of the two errors stays below 2, for any pair of dtypes, after hundreds of rounds, and where strong
decays stand before weak ones.
"""

import random

import pytest
import torch

from tests.ops.layers import (
    MODES,
    SMALL,
    Layer,
    Oracle,
    Plain,
    batch_of,
    error,
    new_state,
    padded_paths,
    random_inputs,
    random_path,
)
from treewy.ops import GDNDims
from treewy.tree import DraftTree

DIMS = GDNDims(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=8)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# The bound on the error is that of the coarser of the two dtypes: about one unit in the last place.
BOUNDS = {FP32: 1e-6, FP16: 1e-3, BF16: 8e-3}
MOST = 2.0


def rms(actual, expected):
    difference, expected = actual.double() - expected.double(), expected.double()
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


class Race:
    """The same rounds in several modes and dtypes, beside the plain recurrence and the oracle."""

    def __init__(self, layer, runners, *, rows=8, history=16):
        layer = layer.to(FP32)
        self.layer, self.rows = layer, rows
        self.states = {
            (mode, state, inputs): new_state(layer.dims, mode, rows=rows, history=history, dtype=state, inputs=inputs)
            for mode, state, inputs in runners
        }
        self.plain = {(state, inputs): Plain(layer, state, inputs) for _, state, inputs in runners}
        self.oracle = Oracle(layer)
        self.outs = {name: [] for name in ["oracle", *self.states, *self.plain]}

    def round(self, tree, path, inputs):
        """Inputs in the coarsest input dtype of the runners, so that all compute on the same numbers."""
        x, a, b = inputs
        window = (x[0], a[0], b[0], tree.parents)
        self.outs["oracle"].append(self.oracle.verify(*window))
        self.oracle.commit(path)
        for dtypes, plain in self.plain.items():
            self.outs[dtypes].append(plain.verify(*window))
            plain.commit(path)
        for name, state in self.states.items():
            mine = (tensor.to(name[2]) for tensor in inputs)
            planned = state.plan(batch_of([tree]), torch.tensor([0]))
            self.outs[name].append(state.verify(0, planned, *mine, self.layer.params(FP32))[0])
            state.commit(planned, *padded_paths([path]))

    def errors(self, since=0):
        """Errors of outputs (from a round on) and of the state now, per runner and per pair of dtypes."""
        expected = torch.cat(self.outs["oracle"][since:])
        result = {
            name: [rms(torch.cat(outs[since:]), expected)] for name, outs in self.outs.items() if name != "oracle"
        }
        for name, state in self.states.items():
            result[name].append(rms(state.read(0, 0)[0], self.oracle.state))
        for name, plain in self.plain.items():
            result[name].append(rms(plain.state, self.oracle.state))
        return result

    def check(self, since=0):
        errors = self.errors(since)
        for name in self.states:
            for mine, plain, what in zip(errors[name], errors[name[1:]], ("outputs", "state"), strict=True):
                assert mine < MOST * plain, f"{what} of {name}: error {mine:.1e}, plain recurrence {plain:.1e}"
        return errors


@pytest.mark.parametrize("decay", ["weak", "middle", "strong"])
@pytest.mark.parametrize("inputs", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("state", [FP32, BF16, FP16], ids=str)
def test_every_pair_of_dtypes_is_as_accurate_as_the_plain_recurrence(state, inputs, decay):
    """Class 29: state dtype x input dtype, all modes, with an absolute bound too."""
    rng, g = random.Random(0), torch.Generator().manual_seed(0)
    race = Race(Layer.random(DIMS, decay=decay), [(mode, state, inputs) for mode in MODES])
    for _ in range(20):
        tree = DraftTree.random(rng.randint(1, 8), rng)
        race.round(tree, random_path(tree, rng), random_inputs(DIMS, 1, len(tree), g, inputs))
    errors = race.check()
    bound = max(BOUNDS[state], BOUNDS[inputs])
    assert all(value < bound for name in race.states for value in errors[name])


def test_500_rounds_drift_no_further_than_the_plain_recurrence():
    """Class 26: the decay is so weak that an error made early lasts; measured after every 125 rounds."""
    rng, g = random.Random(1), torch.Generator().manual_seed(1)
    runners = [(mode, state, FP32) for mode in ("reconstruct", "deferred") for state in (FP32, BF16)]
    race = Race(Layer.random(DIMS, decay="faint"), runners, rows=5)
    for number in range(500):
        tree = DraftTree.random(rng.randint(1, 5), rng)
        race.round(tree, random_path(tree, rng), random_inputs(DIMS, 1, len(tree), g, FP32))
        if number % 125 == 124:
            race.check(since=number - 124)


@pytest.mark.parametrize("strong", [2, 40, 60])
@pytest.mark.parametrize("mode", MODES)
def test_strong_decays_before_weak_ones_cost_no_digits(mode, strong):
    """Class 27: path sums reach -1200 while the ratio of two late rows is near 1, in the window and in the history.

    A difference of fp32 sums would be wrong by 1200 * 2^-24, hundreds of times the error of the plain recurrence.
    """
    g = torch.Generator().manual_seed(1)
    tree = DraftTree.chain(63)
    race = Race(Layer.random(DIMS, decay="weak", seed=3), [(mode, FP32, FP32)], rows=64, history=150)
    for number in range(4):
        x, a, b = random_inputs(DIMS, 1, 64, g, FP32)
        a[:, :strong] += 25
        race.round(tree, tree.path(63 if number % 2 else 31), (x, a, b))
    race.check()


@pytest.mark.parametrize("dtype", [torch.float64, FP32], ids=str)
def test_decays_of_exp_minus_20_a_token_over_64_tokens(dtype):
    """Class 27: exp(-G) would overflow; sums, outputs and state are finite and right."""
    layer = Layer.random(DIMS, decay="strong")
    x, a, b = random_inputs(DIMS, 1, 64, torch.Generator().manual_seed(0), dtype)
    tree = DraftTree.random(64, random.Random(0), depth_bias=0.95)
    oracle = Oracle(layer.to(dtype))
    expected = oracle.verify(x[0], a[0], b[0], tree.parents)
    oracle.commit(tree.path(63))
    for mode in MODES:
        state = new_state(DIMS, mode, rows=64, dtype=dtype)
        window = state.plan(batch_of([tree]), torch.tensor([0]))
        out = state.verify(0, window, x, a, b, layer.params(dtype))
        state.commit(window, *padded_paths([tree.path(63)]))
        assert error(out[0], expected) < (1e-12 if dtype == torch.float64 else 1e-5)
        assert error(state.read(0, 0)[0], oracle.state) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_a_gate_of_infinity_forgets_everything_and_spoils_nothing():
    """Class 27: a decay of exactly 0 has the logarithm -inf; differences of logarithms must not become NaN."""
    layer = Layer.random()
    x, a, b = random_inputs(SMALL, 1, 6, torch.Generator().manual_seed(0))
    a[0, 2], b[0, 3], b[0, 4] = float("inf"), float("inf"), -float("inf")
    tree = DraftTree.chain(5)
    oracle, states = Oracle(layer), {mode: new_state(SMALL, mode, history=16) for mode in MODES}
    for _ in range(4):
        expected = oracle.verify(x[0], a[0], b[0], tree.parents)
        oracle.commit(tree.path(4))
        for mode, state in states.items():
            window = state.plan(batch_of([tree]), torch.tensor([0]))
            assert error(state.verify(0, window, x, a, b, layer.params())[0], expected) < 1e-12, mode
            state.commit(window, *padded_paths([tree.path(4)]))
            assert error(state.read(0, 0)[0], oracle.state) < 1e-12, mode


def test_the_conv_output_is_rounded_to_the_input_dtype_and_nothing_else_is():
    """Class 26: what reaches the state is computed in fp32; with bf16 inputs the ring holds them, and fp32 gates."""
    state = new_state(SMALL, "deferred", dtype=BF16)
    kinds = {name: tensor.dtype for name, tensor in state.tensors.items()}
    assert {name for name, dtype in kinds.items() if dtype == FP32} == {"gates"}
    inputs = random_inputs(SMALL, 1, 6, torch.Generator().manual_seed(0), BF16)
    window = state.plan(batch_of([DraftTree.chain(5)]), torch.tensor([0]))
    assert state.verify(0, window, *inputs, Layer.random().params(FP32)).dtype == BF16
    gates = state.tensors["gates"][0, 0, :6]
    assert (gates != gates.to(BF16).float()).float().mean() > 0.9
