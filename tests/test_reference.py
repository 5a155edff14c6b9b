"""The mathematics against itself and against Hugging Face transformers.

Everything is judged by the float64 walk over the tree, `state[row] = step(state[parent[row]])`, which is nothing but
the layer's recurrence. The closed form must equal it to 1e-12 (relative to the largest entry) on random trees up to 64
rows, with decays from almost none to exp(-20) per token, write strengths over the whole of (0, 2), and every ratio of
value to key heads. The recurrence, the gates, the convolution and the gated norm are then held against the untouched
layer of transformers, along each path of a tree as if it were flat text; that layer computes in float32, which sets
the tolerance.
"""

import random
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from treewy import reference as ref
from treewy.tree import DraftTree

DK, DV = 4, 5
RATIOS = [1, 2, 3, 4, 8]
DECAYS = {"weak": (0.0, 0.02), "middle": (0.0, 3.0), "strong": (19.0, 21.0)}


def make_window(rows, *, ratio=2, decay="middle", seed=0, k_heads=2, dtype=torch.float64):
    """S_0, q, k, v, log_alpha, beta of one random window."""
    g = torch.Generator().manual_seed(seed)
    hv = k_heads * ratio

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    low, high = DECAYS[decay]
    log_alpha = -(low + (high - low) * torch.rand(rows, hv, generator=g, dtype=torch.float64))
    beta = 2 * torch.rand(rows, hv, generator=g, dtype=torch.float64).clamp(1e-3, 1 - 1e-3)
    q = ref.l2_normalize(normal(rows, k_heads, DK)) * DK**-0.5
    k = ref.l2_normalize(normal(rows, k_heads, DK))
    values = normal(hv, DV, DK), q, k, normal(rows, hv, DV), log_alpha, beta
    return tuple(value.to(dtype) for value in values)


def random_parents(rows, seed):
    return DraftTree.random(rows, random.Random(seed), depth_bias=random.Random(seed).choice([0, 0.5, 0.9])).parents


def error(actual, expected):
    """Largest difference, relative to the largest entry."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


windows = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 64),
        "ratio": st.sampled_from(RATIOS),
        "decay": st.sampled_from(sorted(DECAYS)),
        "seed": st.integers(0, 10_000),
    }
)


# The closed form against the walk


@settings(max_examples=40, deadline=None)
@given(windows)
def test_closed_form_equals_the_walk(window):
    parents = random_parents(window["rows"], window["seed"])
    S_0, _, k, v, log_alpha, beta = inputs = make_window(**window)
    o, S = ref.walk(*inputs, parents)
    closed, u = ref.closed_form(*inputs, parents)
    assert error(closed, o) <= 1e-12

    # The pseudo-values are those of the recurrence: u_t = beta_t (v_t - alpha_t S_{t-1} k_t).
    before = torch.stack([S[parent] if parent >= 0 else S_0 for parent in parents])
    read = torch.einsum("thvk,thk->thv", before, ref.expand_heads(k, v.shape[1]))
    assert error(u, beta[:, :, None] * (v - log_alpha.exp()[:, :, None] * read)) <= 1e-12

    # Every row's state can be committed from them.
    for row in range(len(parents)):
        path = DraftTree(parents).path(row)
        assert error(ref.commit_state(S_0, k, u, log_alpha, path), S[row]) <= 1e-12


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("decay", sorted(DECAYS))
@pytest.mark.parametrize("parents", [range(-1, 63), [-1] + [0] * 63, DraftTree.from_widths((3, 3, 3)).parents])
def test_closed_form_on_a_full_chain_a_star_and_the_papers_tree(ratio, decay, parents):
    inputs = make_window(len(parents), ratio=ratio, decay=decay)
    o, _ = ref.walk(*inputs, parents)
    assert error(ref.closed_form(*inputs, parents)[0], o) <= 1e-12


def test_decay_of_exp_minus_20_per_token_over_64_tokens_is_finite_and_right():
    """exp(-20 * 64) underflows and exp(+20 * 64) overflows: only differences of logarithms may be exponentiated."""
    parents = range(-1, 63)
    S_0, q, k, v, log_alpha, beta = make_window(64)
    log_alpha = torch.full_like(log_alpha, -20.0)
    g = ref.path_log_decay(log_alpha, parents)
    assert torch.equal(g[-1], torch.full_like(g[-1], -1280.0))
    o, u = ref.closed_form(S_0, q, k, v, log_alpha, beta, parents)
    assert torch.isfinite(o).all()
    # At such decays every token forgets all before it, but for exp(-20).
    alone = beta[:, :, None] * v * (ref.expand_heads(k, 4) * ref.expand_heads(q, 4)).sum(-1, keepdim=True)
    assert error(o[1:], alone[1:]) < 1e-6
    assert (
        error(
            ref.commit_state(S_0, k, u, log_alpha, range(64)), ref.walk(S_0, q, k, v, log_alpha, beta, parents)[1][-1]
        )
        <= 1e-12
    )


@settings(max_examples=25, deadline=None)
@given(windows)
def test_closed_form_in_float32_stays_within_1e_5(window):
    parents = random_parents(window["rows"], window["seed"])
    single = make_window(**window, dtype=torch.float32)
    exact = [value.double() for value in single]
    o, S = ref.walk(*exact, parents)
    closed, u = ref.closed_form(*single, parents)
    assert closed.dtype == torch.float32
    assert error(closed, o) <= 1e-5
    S_0, _, k, _, log_alpha, _ = single
    assert error(ref.commit_state(S_0, k, u, log_alpha, DraftTree(parents).path(len(parents) - 1)), S[-1]) <= 1e-5


# The solve


@settings(max_examples=30, deadline=None)
@given(windows)
def test_level_wise_solve_equals_forward_substitution_and_the_inverse(window):
    parents = random_parents(window["rows"], window["seed"])
    S_0, _, k, v, log_alpha, beta = make_window(**window)
    g = ref.path_log_decay(log_alpha, parents)
    L = ref.interaction(k, beta, g, parents)
    R = ref.right_hand_side(S_0, k, v, beta, g)
    U = ref.solve_forward(L, R)
    identity = torch.eye(len(parents), dtype=L.dtype)
    assert error(torch.einsum("hti,ihv->thv", identity + L, U), R) <= 1e-12
    assert error(ref.solve_by_level(L, R, DraftTree(parents).depth), U) <= 1e-12


@settings(max_examples=30, deadline=None)
@given(windows)
def test_interaction_matrix_is_nilpotent_with_the_depth_of_the_tree(window):
    tree = DraftTree(random_parents(window["rows"], window["seed"]))
    _, _, k, _, log_alpha, beta = make_window(**window)
    L = ref.interaction(k, beta, ref.path_log_decay(log_alpha, tree.parents), tree.parents)
    power = torch.eye(len(tree), dtype=L.dtype).expand_as(L)
    for _ in range(tree.depth):
        power = power @ L
    # Zero because of the pattern, not because of small numbers: L^(D+1) = 0 exactly, while L^D is not.
    assert torch.count_nonzero(power @ L) == 0
    if window["decay"] == "weak":
        assert torch.count_nonzero(power) > 0


def test_one_step_too_few_does_not_solve_a_chain():
    parents = range(-1, 7)
    S_0, _, k, v, log_alpha, beta = make_window(8, decay="weak")
    g = ref.path_log_decay(log_alpha, parents)
    L, R = ref.interaction(k, beta, g, parents), ref.right_hand_side(S_0, k, v, beta, g)
    U = ref.solve_forward(L, R)
    assert error(ref.solve_by_level(L, R, 7), U) <= 1e-12
    assert error(ref.solve_by_level(L, R, 6), U) > 1e-6


# Order of the rows


def reordered(parents, order):
    place = {old: new for new, old in enumerate(order)}
    return [place[parents[old]] if parents[old] >= 0 else -1 for old in order]


@pytest.mark.parametrize("seed", range(3))
def test_three_orders_of_one_tree_give_the_same_nodes(seed):
    """Level order, depth first, and a random parent-first order: masks must follow ancestry, not the index."""
    tree = DraftTree.random(20, random.Random(seed))
    parents = list(tree.parents)

    depth_first = []
    stack = [0]
    while stack:
        depth_first.append(stack.pop())
        stack += tree.children[depth_first[-1]]
    rng = random.Random(seed)
    random_order, ready = [], [0]
    while ready:
        random_order.append(ready.pop(rng.randrange(len(ready))))
        ready += tree.children[random_order[-1]]
    assert depth_first != random_order != list(range(20))

    S_0, *per_row = make_window(20, decay="middle", seed=seed)
    o, S = ref.walk(S_0, *per_row, parents)
    leaf = tree.path(19)
    for order in list(range(20)), depth_first, random_order:
        q, k, v, log_alpha, beta = (value[order] for value in per_row)
        closed, u = ref.closed_form(S_0, q, k, v, log_alpha, beta, reordered(parents, order))
        assert error(closed, o[order]) <= 1e-12
        path = [order.index(row) for row in leaf]
        assert error(ref.commit_state(S_0, k, u, log_alpha, path), S[19]) <= 1e-12


def test_another_branch_changes_nothing():
    """The rows of one branch get other inputs: outputs and state of the other branch stay, bit for bit."""
    parents = DraftTree.from_widths((2, 1, 1)).parents
    S_0, *per_row = make_window(7)
    o, u = ref.closed_form(S_0, *per_row, parents)
    other = [value.clone() for value in per_row]
    for value in other:
        value[[2, 4, 6]] = value[[6, 2, 4]]
    o_other, u_other = ref.closed_form(S_0, *other, parents)
    assert torch.equal(o[[0, 1, 3, 5]], o_other[[0, 1, 3, 5]])
    assert torch.equal(u[[0, 1, 3, 5]], u_other[[0, 1, 3, 5]])
    assert not torch.equal(o[[2, 4, 6]], o_other[[2, 4, 6]])


def test_value_heads_that_cannot_share_key_heads_are_refused():
    with pytest.raises(ValueError, match="5 value heads cannot share 2 key heads evenly; HV is a multiple of H"):
        ref.expand_heads(torch.zeros(1, 2, DK), 5)


def test_neighbouring_value_heads_share_a_key_head():
    k = torch.arange(2.0)[None, :, None]
    assert ref.expand_heads(k, 6)[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]


# The convolution


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.booleans(), st.integers(0, 1000))
def test_tree_convolution_equals_the_flat_one_along_every_path(rows, width, has_bias, seed):
    tree = DraftTree(random_parents(rows, seed))
    g = torch.Generator().manual_seed(seed)
    x, committed, weight, bias = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in [(rows, 3), (width - 1, 3), (3, width), (3,)]
    )
    bias = bias if has_bias else None
    out = ref.causal_conv(x, committed, weight, tree.parents, bias)
    for row in range(rows):
        path = list(tree.path(row))
        flat = torch.cat([committed, x[path]]).T[None]
        conv = torch.nn.functional.conv1d(flat, weight[:, None], bias, groups=3)
        assert error(out[row], torch.nn.functional.silu(conv)[0, :, -1]) <= 1e-12
        assert torch.equal(ref.committed_inputs(x, committed, path), flat[0].T[len(path) :])


# Against transformers


@pytest.fixture(scope="module")
def layer():
    config = transformers.Qwen3_5TextConfig(
        hidden_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    torch.manual_seed(0)
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.eval()


def test_step_equals_the_recurrence_of_transformers():
    S_0, q, k, v, log_alpha, beta = make_window(12, ratio=2, decay="middle")
    o, S = ref.walk(S_0, q, k, v, log_alpha, beta, range(-1, 11))
    unscaled = ref.expand_heads(q, 4) * DK**0.5  # theirs scales the query
    theirs, state = modeling.torch_recurrent_gated_delta_rule(
        *(value[None].float() for value in (unscaled, ref.expand_heads(k, 4), v, log_alpha, beta)),
        initial_state=S_0.mT[None].float(),
        output_final_state=True,
    )
    assert error(o, theirs[0]) <= 1e-6
    assert error(S[-1], state[0].mT) <= 1e-6


def test_gated_norm_equals_that_of_transformers(layer):
    o, z = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = layer.norm(o.float(), z.float())
    assert error(ref.gated_rms_norm(o, z, layer.norm.weight.double(), layer.norm.variance_epsilon), theirs) <= 1e-6


def reference_layer(layer, hidden, parents):
    """The whole layer in float64 from an empty state, by the equations of the reference. hidden [T, D] -> [T, D]."""
    p = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    x = hidden @ p["in_proj_qkv.weight"].T
    mixed = ref.causal_conv(x, torch.zeros(3, x.shape[1]).double(), p["conv1d.weight"][:, 0], parents)
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q = ref.l2_normalize(q.unflatten(-1, (2, 8))) * 8**-0.5
    k = ref.l2_normalize(k.unflatten(-1, (2, 8)))
    log_alpha = ref.log_decay(hidden @ p["in_proj_a.weight"].T, p["A_log"], p["dt_bias"])
    beta = ref.write_strength(hidden @ p["in_proj_b.weight"].T)
    S_0 = torch.zeros(4, 8, 8, dtype=torch.float64)
    o, _ = ref.closed_form(S_0, q, k, v.unflatten(-1, (4, 8)), log_alpha, beta, parents)
    z = (hidden @ p["in_proj_z.weight"].T).unflatten(-1, (4, 8))
    normed = ref.gated_rms_norm(o, z, p["norm.weight"], layer.norm.variance_epsilon)
    return normed.flatten(-2) @ p["out_proj.weight"].T


def test_the_equations_make_the_layer_of_transformers_along_every_path_of_a_tree(layer):
    """Gates, convolution, normalisation, recurrence, gated norm: a tree of 15 rows after a text of 6 tokens."""
    text, tree = 6, DraftTree.from_widths((2, 2, 2))
    parents = [*range(-1, text - 1), *(text + parent if parent >= 0 else text - 1 for parent in tree.parents)]
    hidden = torch.randn(text + len(tree), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = reference_layer(layer, hidden, parents)
    for row in range(len(tree)):
        flat = [*range(text), *(text + r for r in tree.path(row))]
        with torch.no_grad():
            theirs = layer(hidden[flat].float()[None])[0]
        assert error(ours[flat], theirs) <= 2e-6
    # And the walk of the paths is a real test: neighbouring rows differ by far more than the tolerance.
    assert min(error(a, b) for a, b in pairwise(ours)) > 1e-2


def test_gates_equal_the_formulas_of_transformers(layer, monkeypatch):
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    seen = {}

    def record(query, key, value, g, beta, **options):
        seen.update(g=g, beta=beta)
        return value, None

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", record)
    with torch.no_grad():
        layer(hidden[None])
        a, b = layer.in_proj_a(hidden).double(), layer.in_proj_b(hidden).double()
    assert error(ref.log_decay(a, layer.A_log.detach().double(), layer.dt_bias.detach().double()), seen["g"][0]) <= 1e-6
    assert error(ref.write_strength(b), seen["beta"][0]) <= 1e-6


def test_write_strength_of_two_allows_negative_eigenvalues():
    b = torch.tensor([-30.0, 0.0, 30.0], dtype=torch.float64)
    assert ref.write_strength(b, 2.0).tolist() == pytest.approx([0, 1, 2], abs=1e-12)
