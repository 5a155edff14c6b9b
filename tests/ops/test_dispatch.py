"""Which implementation runs: what `plan` was asked for, said once a round, and never another one.

Without a CUDA device the Triton kernels run in Triton's interpreter. The CUDA ones are replaced by a note of the call.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from tests.ops.layers import Layer, batch_of, contents, error, padded_paths, random_inputs, random_path, same_bits
from treewy import ops
from treewy.ops import GatedNorm, GDNDims
from treewy.state import RecurrentState, StateSpec
from treewy.tree import DraftTree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIMS = GDNDims(1, 2, 16, 16)
SPEC = StateSpec(DIMS, 2, "deferred", 6, 5, history_rows=7)


def on_device(params):
    return params._replace(**{n: getattr(params, n).to(DEVICE) for n in ("taps", "conv_bias", "neg_A", "dt_bias")})


def test_a_state_with_kernels_is_used_as_one_without():
    """`RecurrentState` with Triton beside torch: rounds of trees, forks, folds; errors are raised at the commit."""
    layer, rng, g = Layer.random(DIMS), random.Random(0), torch.Generator().manual_seed(0)
    params, norm_weight = on_device(layer.params(torch.float32)), torch.ones(16, device=DEVICE)
    states = [RecurrentState(SPEC, 3, DEVICE, impl) for impl in ("torch", "triton")]
    for number in range(5):
        trees = [DraftTree.random(rng.randint(1, 6), rng) for _ in range(2)]
        path, accepted = (t.to(DEVICE) for t in padded_paths([random_path(tree, rng) for tree in trees]))
        x, a, b = (0.5 * t.to(DEVICE) for t in random_inputs(DIMS, 2, 6, g, torch.float32))
        norm = GatedNorm(torch.randn(2, 6, 2, 16, generator=g).to(DEVICE), norm_weight) if number % 2 else None
        outs = []
        for state in states:
            window = state.plan(batch_of(trees, 6).to(DEVICE), torch.tensor([2, 0], device=DEVICE))
            outs.append([state.verify(i, window, x, a, b, params, norm=norm) for i in range(2)])
            state.commit(window, path, accepted)
        assert all(error(*pair) < 1e-5 for pair in zip(*outs, strict=True))
        for state in states:
            state.copy(2, 1)
            state.fold([0] if number == 2 else [])
        for request in range(3):
            assert error(states[0].read(1, request)[0], states[1].read(1, request)[0]) < 1e-5
    kernels, before = states[1], contents(states[1])
    with pytest.raises(ValueError, match="verified in every layer, or is committed already"):
        kernels.commit(window, path, accepted)
    assert all(same_bits(tensor, before[name]) for name, tensor in kernels.tensors.items())


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_outputs_go_where_they_are_wanted(impl):
    layer, g = Layer.random(DIMS), torch.Generator().manual_seed(0)
    params = on_device(layer.params(torch.float32))
    state = RecurrentState(SPEC, 2, DEVICE, impl)
    window = state.plan(batch_of([DraftTree.chain(2)] * 2, 3).to(DEVICE), torch.tensor([0, 1], device=DEVICE))
    inputs = [t.to(DEVICE) for t in random_inputs(DIMS, 2, 3, g, torch.float32)]

    def run(out):
        return ops.verify(state._layers[0], window, *inputs, params, fold_always=False, out=out)

    wide = torch.full((3, 3, 2, 16), 7.0, device=DEVICE)
    expected = run(None)
    assert run(wide[:2]).data_ptr() == wide.data_ptr()
    assert same_bits(wide[:2], expected)
    assert (wide[2] == 7).all()
    if impl == "triton":
        before = contents(state)
        for out in (wide, wide[:2].double(), wide[:2].mT.contiguous().mT):
            with pytest.raises(ValueError, match=r"this plan takes \(2, 3, 2, 16\) of torch.float32 on"):
                run(out)
        assert all(same_bits(tensor, before[name]) for name, tensor in state.tensors.items())


def test_cuda_kernels_verify_and_fold_and_tritons_commit(monkeypatch):
    calls = []

    def note(impl):
        return SimpleNamespace(
            **{
                name: lambda *_, name=name, **options: calls.append((impl, name, options))
                for name in ("verify", "commit", "fold")
            }
        )

    monkeypatch.setattr("treewy.ops.dispatch._kernels", note)
    where, norm = torch.tensor([0]), GatedNorm(torch.zeros(1, 1, 2, 16), torch.ones(16))
    state = RecurrentState(SPEC, 1, impl="cuda")
    window = state.plan(batch_of([DraftTree.chain(0)]), where)
    assert window.impl == "cuda"
    state.verify(0, window, None, None, None, None, norm=norm)
    state.commit(window, torch.tensor([[0]]), torch.tensor([1]))
    ops.fold(state._layers[0], where, where, impl="cuda")
    verify = ("cuda", "verify", {"fold_always": False, "norm": norm, "out": None})
    assert calls == [verify, ("triton", "commit", {}), ("cuda", "fold", {})]


def test_packages_that_are_missing(monkeypatch):
    dims = GDNDims(1, 2, 128, 128)
    state = RecurrentState(StateSpec(dims, 1, "deferred", 4, 3), 1)._layers[0]
    for package, name in (("triton", "triton"), ("cuda", "cuda-bindings")):
        monkeypatch.setattr("treewy.ops.support._installed", lambda found, missing=package: found != missing)
        assert ops.unsupported_reason(dims, state, 4, "cuda") == f"the package {name} is not installed"
