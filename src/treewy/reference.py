"""The mathematics in float64: one function per equation, the paper's symbols, no speed.

Source: S. M. Ghantasala, "TreeWY: Speculative Verification for Gated DeltaNet Hybrids", arXiv 2608.20961 (2026),
section numbers of `docs/mathematics.md`. Everything here is for one request and one layer; T rows in a parent-first
order with `parents` as in `treewy.tree`; H key heads, HV value heads, value head h reads key head h // (HV / H).

    S  [HV, dv, dk]   state                      k, q  [T, H, dk]   keys and queries, l2-normalised, q scaled
    v  [T, HV, dv]    values                     log_alpha, beta  [T, HV]   log decay (<= 0) and write strength, (0, 2)
    g  [T, HV]        log of the path's decay    u  [T, HV, dv]   pseudo-values
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expand_heads(x: Tensor, num_v_heads: int) -> Tensor:
    """[T, H, dk] -> [T, HV, dk]: every key head serves HV / H neighbouring value heads."""
    num_k_heads = x.shape[-2]
    if num_v_heads % num_k_heads:
        raise ValueError(
            f"{num_v_heads} value heads cannot share {num_k_heads} key heads evenly; HV is a multiple of H"
        )
    return x.repeat_interleave(num_v_heads // num_k_heads, dim=-2)


# What comes before the recurrence


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension, as GDN models normalise keys and queries."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log of alpha: -exp(A_log) softplus(a + dt_bias). a [T, HV]; A_log, dt_bias [HV]."""
    return -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)


def write_strength(b: Tensor, beta_scale: float = 1.0) -> Tensor:
    """Beta: beta_scale sigmoid(b). `beta_scale` 2 allows negative eigenvalues (OLMo-Hybrid)."""
    return beta_scale * b.sigmoid()


def causal_conv(
    x: Tensor, committed: Tensor, weight: Tensor, parents: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """Causal depthwise convolution on a tree, then SiLU: a row sees itself, its nearest ancestors, committed inputs.

    Args:
        x: [T, C] inputs of the rows.
        committed: [width - 1, C] last committed inputs, oldest first.
        weight: [C, width], the last column meets the row itself.
        parents: parent row of each row.
        bias: [C] or None.
    """
    width = weight.shape[1]
    out = []
    for row in range(len(parents)):
        window = [*committed, *(x[i] for i in _path(row, parents))][-width:]
        total = sum((weight[:, j] * window[j] for j in range(width)), start=torch.zeros_like(x[row]))
        out.append(torch.nn.functional.silu(total if bias is None else total + bias))
    return torch.stack(out)


def committed_inputs(x: Tensor, committed: Tensor, path: Sequence[int]) -> Tensor:
    """[width - 1, C]: the last committed inputs once `path` (rows, root first) is accepted."""
    return torch.cat([committed, x[list(path)]])[len(path) :]


# The recurrence, row by row


def step(S: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor) -> Tensor:
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T. k [HV, dk], v [HV, dv], log_alpha, beta [HV]."""
    decayed = log_alpha.exp()[:, None, None] * S
    u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", decayed, k))
    return decayed + torch.einsum("hv,hk->hvk", u, k)


def walk(
    S_0: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, parents: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The oracle: state[row] = step(state[parent[row]]) and o_t = S_t q_t.

    Returns:
        o [T, HV, dv] and all states [T, HV, dv, dk].
    """
    q, k = expand_heads(q, v.shape[1]), expand_heads(k, v.shape[1])
    states: list[Tensor] = []
    for row, parent in enumerate(parents):
        states.append(step(states[parent] if parent >= 0 else S_0, k[row], v[row], log_alpha[row], beta[row]))
    S = torch.stack(states)
    return torch.einsum("thvk,thk->thv", S, q), S


# The closed form


def path_log_decay(log_alpha: Tensor, parents: Sequence[int]) -> Tensor:
    """log g_t: the sum of log alpha from the root of the window down to t, added in the order of the path. [T, HV]"""
    g: list[Tensor] = []
    for row, parent in enumerate(parents):
        g.append(g[parent] + log_alpha[row] if parent >= 0 else log_alpha[row])
    return torch.stack(g)


def ancestor_or_self(parents: Sequence[int]) -> Tensor:
    """[T, T] bool, entry [t, i]: i is an ancestor of t or t itself."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row in range(len(parents)):
        mask[row, _path(row, parents)] = True
    return mask


def decay_ratio(g: Tensor, mask: Tensor) -> Tensor:
    """g_t / g_i where `mask` [T, T] allows it, 0 elsewhere, from logarithms: never a division. [HV, T, T]"""
    difference = g.T[:, :, None] - g.T[:, None, :]
    return difference.masked_fill(~mask, float("-inf")).exp()


def interaction(k: Tensor, beta: Tensor, g: Tensor, parents: Sequence[int]) -> Tensor:
    """diag(beta) G with G[t, i] = (g_t / g_i) (k_t . k_i) for strict ancestors i of t. [HV, T, T]"""
    strict = ancestor_or_self(parents) & ~torch.eye(len(parents), dtype=torch.bool)
    k = expand_heads(k, beta.shape[1])
    return beta.T[:, :, None] * decay_ratio(g, strict) * torch.einsum("thk,ihk->hti", k, k)


def right_hand_side(S_0: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """R[t] = beta_t v_t - beta_t g_t (S_0 k_t). [T, HV, dv]"""
    read = torch.einsum("hvk,thk->thv", S_0, expand_heads(k, v.shape[1]))
    return beta[:, :, None] * (v - g.exp()[:, :, None] * read)


def solve_forward(L: Tensor, R: Tensor) -> Tensor:
    """U of (I + L) U = R by forward substitution. L [HV, T, T] strictly lower, R [T, HV, dv]."""
    U = R.clone()
    for row in range(R.shape[0]):
        U[row] = R[row] - torch.einsum("hi,ihv->hv", L[:, row, :row], U[:row])
    return U


def solve_by_level(L: Tensor, R: Tensor, depth: int) -> Tensor:
    """U of (I + L) U = R by `depth` steps X <- R - L X: L of a tree of that depth is nilpotent, so this is exact."""
    X = R
    for _ in range(depth):
        X = R - torch.einsum("hti,ihv->thv", L, X)
    return X


def outputs(S_0: Tensor, q: Tensor, k: Tensor, u: Tensor, g: Tensor, parents: Sequence[int]) -> Tensor:
    """o_t = g_t S_0 q_t + sum over ancestors-or-self i of (g_t / g_i) (k_i . q_t) u_i. [T, HV, dv]"""
    q, k = expand_heads(q, u.shape[1]), expand_heads(k, u.shape[1])
    from_state = g.exp()[:, :, None] * torch.einsum("hvk,thk->thv", S_0, q)
    scores = decay_ratio(g, ancestor_or_self(parents)) * torch.einsum("thk,ihk->hti", q, k)
    return from_state + torch.einsum("hti,ihv->thv", scores, u)


def commit_state(S_0: Tensor, k: Tensor, u: Tensor, log_alpha: Tensor, path: Sequence[int]) -> Tensor:
    """S_a = g_a S_0 + sum over the path of (g_a / g_i) u_i k_i^T, the state of the last row of `path`. [HV, dv, dk]"""
    rows = list(path)
    k = expand_heads(k, u.shape[1])[rows]
    after = torch.stack([log_alpha[rows[i + 1 :]].sum(0) for i in range(len(rows))])
    total = log_alpha[rows].sum(0)
    written = torch.einsum("ih,ihv,ihk->hvk", after.exp(), u[rows], k)
    return total.exp()[:, None, None] * S_0 + written


def closed_form(
    S_0: Tensor, q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, parents: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The whole window at once: (I + diag(beta) G) U = R, then the outputs.

    Returns:
        o [T, HV, dv] and the pseudo-values u [T, HV, dv], from which `commit_state` makes the state of any row.
    """
    g = path_log_decay(log_alpha, parents)
    u = solve_forward(interaction(k, beta, g, parents), right_hand_side(S_0, k, v, beta, g))
    return outputs(S_0, q, k, u, g, parents), u


# What comes after it


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """weight * o / sqrt(mean o^2 + eps) * silu(z), over the last dimension."""
    return weight * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * torch.nn.functional.silu(z)


def _path(row: int, parents: Sequence[int]) -> list[int]:
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
