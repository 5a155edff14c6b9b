"""The operations in plain torch: any device, any dtype, the implementation that the others are held to.

Per value head, with the checkpoint S and N rows, the pending ones in a chain and the window's tree below it:

    (I + diag(beta) G) U = beta (v - g S k)                                    by forward substitution
    o_t = g_t S q_t + sum over i, ancestor or self, of (g_t / g_i) (k_i . q_t) u_i
    fold: S <- g_P S + sum over pending i of (g_P / g_i) u_i k_i^T

Arithmetic is fp32 (fp64 where the inputs are). Logarithms of decays are summed along the path and subtracted, then
exponentiated, in fp64: strong decays above two rows make both sums large and their difference small, and fp32 would
leave it few digits. Masked entries become exp(-inf) = 0 before anything is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from treewy.ops.api import KEY_EPS, GatedNorm, GDNParams, LayerState, Lineage, SnapshotState, Window, check_paths

_LOWEST_DECAY = -1e3
"""exp of it is 0 in every dtype. Differences of sums with -inf would be NaN, and with larger ones would lose digits."""


class _Rows(NamedTuple):
    """What the recurrence is given of N rows: the pieces of a ring. n is B less the padding requests."""

    keys: Tensor
    """[n, N, H, dk]."""
    values: Tensor
    """[n, N, HV, dv]."""
    gates: Tensor
    """[n, N, HV, 2] fp32."""


class _Solved(NamedTuple):
    """N rows and the outputs of the last T of them; G = HV / H."""

    keys: Tensor
    """[n, H, N, dk] fp32, normalised."""
    ratio: Tensor
    """[n, H, G, N, 1 + N] decay from the state and from each row down to each row; 0 where it is no ancestor."""
    u: Tensor
    """[n, H, G, N, dv] pseudo-values."""
    out: Tensor
    """[n, H, G, T, dv] without the factor dk^-0.5."""


def verify(
    state: LayerState,
    window: Window,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    *,
    fold_always: bool,
    norm: GatedNorm | None = None,
) -> Tensor:
    """Runs a window through a layer. Arguments, result and errors as `treewy.ops.verify`."""
    _check_window(state, window, x, a, b, params, norm)
    capacity = state.capacity
    if window.trees.max_depth + 1 > capacity:
        raise ValueError(
            f"a tree of depth {window.trees.max_depth} can commit {window.trees.max_depth + 1} rows at once, but the "
            f"history holds {capacity}: use a shallower tree or more history rows"
        )
    x, a, b = _active_inputs(window, x, a, b)
    slots, requests, T = window.slots, window.requests, x.shape[1]
    queries, rows = _window_rows(state.conv.index_select(0, slots), window, x, a, b, params)
    S, at = _checkpoints(state, slots), _locate(state, requests, T)
    for ring, row in zip((state.keys, state.values, state.gates), rows, strict=True):
        ring[at.requests, at.places[:, at.pending :]] = row
    state.window_inputs[:, :T].index_copy_(0, requests, x)
    state.window_rows.index_copy_(0, requests, window.trees.rows)
    solved = _solve(S, queries, _take(state, at), window.lineage(at.pending))
    more = window.longest_path
    due = [n for n, count in enumerate(at.counts) if count and (fold_always or count + more[n] > capacity)]
    if due:
        _fold(state, slots, requests, S, solved, at.pending, due)
    return _outputs(window, solved.out.flatten(1, 2).transpose(1, 2) * queries.shape[3] ** -0.5, x.dtype, norm)


def commit(state: LayerState, window: Window, path: Tensor, accepted: Tensor) -> None:
    """Accepts a path. Arguments and errors as `treewy.ops.commit`."""
    if state.checkpoint.dim() == 4:
        commit(LayerState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    paths = _accepted_paths(window, path, accepted)
    if not paths:
        return
    _check_verified(state.window_rows, window)
    capacity, requests = state.capacity, window.requests
    pending, end = state.pending[:, requests], state.end[:, requests]
    for request, rows, used in zip(requests.tolist(), paths, pending.amax((0, 2)).tolist(), strict=True):
        if used + len(rows) > capacity:
            raise ValueError(
                f"request {request} accepts {len(rows)} rows, but {used} of the {capacity} rows of its history are "
                "pending: verify the window with this history, which makes room for it"
            )
    _commit_inputs(state.conv, state.window_inputs, window, window.slots, paths)
    size = state.keys.shape[2]
    moves = [(n, row, step) for n, rows in enumerate(paths) for step, row in enumerate(rows) if row != step]
    if moves:
        n, row, step = _indices(moves, end).unbind(1)
        layer = torch.arange(len(end), device=end.device)[:, None]
        source, target = (end[:, n] + row) % size, (end[:, n] + step) % size
        for ring in (state.keys, state.values, state.gates):
            ring[layer, requests[n], target] = ring[layer, requests[n], source]
    lengths = torch.tensor([len(rows) for rows in paths]).to(end)
    state.end[:, requests] = (end + lengths) % size
    state.pending[:, requests] = pending + lengths[:, None]
    state.window_rows[:, requests] = 0


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints. Arguments as `treewy.ops.fold`."""
    S, at = _checkpoints(state, slots), _locate(state, requests, 0)
    if at.pending:
        due = [n for n, count in enumerate(at.counts) if count]
        _fold(state, slots, requests, S, _solve_pending(state, S, at), at.pending, due)


def folded_state(state: LayerState, slots: Tensor, requests: Tensor) -> Tensor:
    """The committed state with the pending rows folded in, [n, HV, dv, dk] fp32; nothing is written.

    S_a = g_a S_0 + sum over the path of (g_a / g_i) u_i k_i^T (arXiv 2608.20961).
    """
    S, at = _checkpoints(state, slots), _locate(state, requests, 0)
    return (_with_rows(S, _solve_pending(state, S, at), at.pending) if at.pending else S).flatten(1, 2)


def verify_store_all(
    state: SnapshotState,
    window: Window,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    *,
    norm: GatedNorm | None = None,
) -> Tensor:
    """The baseline: walks the tree row by row and keeps the state of every row. Arguments and result as `verify`.

    The state of a row may take the place of the committed one, as in engines that keep N + 1 states. So a window cannot
    be run again before its commit.

    Raises:
        ValueError: as `verify`, or a request whose last window still waits for its commit. Nothing is written then.
    """
    dims = params.dims
    _check_window(state, window, x, a, b, params, norm)
    for request, waiting in zip(window.requests.tolist(), state.window_rows[window.requests].tolist(), strict=True):
        if waiting:
            raise ValueError(
                f"request {request} has a window of {waiting} rows that waits for its commit, and their states may "
                "stand where the committed one stood: commit it, or load the state anew"
            )
    x, a, b = _active_inputs(window, x, a, b)
    raw, rows = _window_rows(state.conv.index_select(0, window.requests), window, x, a, b, params)
    wide = rows.gates.dtype
    queries, keys = (_normalized(t.to(wide)).repeat_interleave(dims.group, dim=2) for t in (raw, rows.keys))
    values, decays, betas = rows.values.to(wide), rows.gates[..., 0].exp()[..., None, None], rows.gates[..., 1:]
    out = torch.zeros_like(values)
    depths = (
        window.trees.depths if window.padding_rows is None else window.trees.depths.masked_fill(window.padding_rows, -1)
    )
    state.window_rows.index_copy_(0, window.requests, window.trees.rows)
    for depth in range(window.trees.max_depth + 1):
        place, row = (depths == depth).nonzero(as_tuple=True)
        request = window.requests[place]
        before = window.trees.parents[place, row] if depth else state.committed[request]
        S = state.snapshots[request, before].to(wide).mul_(decays[place, row])
        k = keys[place, row][..., None]
        u = betas[place, row][..., None] * (values[place, row][..., None] - S @ k)
        S.flatten(0, 1).baddbmm_(u.flatten(0, 1), k.flatten(0, 1).mT)
        out[place, row] = (S @ queries[place, row][..., None]).squeeze(-1)
        state.snapshots[request, row] = S.to(state.snapshots.dtype)
    state.window_inputs[:, : x.shape[1]].index_copy_(0, window.requests, x)
    return _outputs(window, out * dims.head_k_dim**-0.5, x.dtype, norm)


def commit_store_all(state: SnapshotState, window: Window, path: Tensor, accepted: Tensor) -> None:
    """Points each request at the snapshot of its last accepted row. Arguments and errors as `commit`."""
    if state.conv.dim() == 3:
        commit_store_all(SnapshotState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    paths = _accepted_paths(window, path, accepted)
    if not paths:
        return
    _check_verified(state.window_rows, window)
    _commit_inputs(state.conv, state.window_inputs, window, window.requests, paths)
    state.committed[:, window.requests] = _indices([rows[-1] for rows in paths], window.requests)
    state.window_rows[:, window.requests] = 0


# Parts


def _window_rows(
    committed: Tensor, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams
) -> tuple[Tensor, _Rows]:
    """Tree convolution and gates: queries [n, T, H, dk] as the convolution gave them, and the rows.

    committed [n, width - 1, C].
    """
    dims, wide = params.dims, params.taps.dtype
    n, T, C = x.shape
    inputs = torch.cat([committed, x], dim=1).view(-1, C)
    met = inputs.index_select(0, window.conv_rows).view(n, T, dims.conv_width, C)
    mixed = (met.to(wide) * params.taps).sum(2)
    if params.conv_bias is not None:
        mixed = mixed + params.conv_bias
    mixed = F.silu(mixed).to(x.dtype)
    queries, keys, values = mixed.split([dims.key_dim, dims.key_dim, dims.value_dim], dim=2)
    decays = (params.neg_A * F.softplus(a.to(wide) + params.dt_bias)).clamp(min=_LOWEST_DECAY)
    gates = torch.stack([decays, params.beta_scale * b.to(wide).sigmoid()], dim=3)
    heads = (dims.num_k_heads, dims.head_k_dim)
    return queries.unflatten(2, heads), _Rows(
        keys.unflatten(2, heads), values.unflatten(2, (dims.num_v_heads, dims.head_v_dim)), gates
    )


class _Places(NamedTuple):
    """Where in the ring the pending rows of n requests are, and the T rows of a window after them: N = pending + T."""

    requests: Tensor
    """[n, 1]."""
    places: Tensor
    """[n, N]."""
    counts: list[int]
    """[n] pending rows of each."""
    pending: int
    """The most that one has."""
    stale: Tensor | None
    """[n, N, HV] bool, places before a head's own pending rows; None where there are none."""


def _locate(state: LayerState, requests: Tensor, rows: int) -> _Places:
    pending, end = state.pending.index_select(0, requests), state.end.index_select(0, requests)
    heads, ring = pending.tolist(), state.keys.shape[1]
    counts = [max(head) for head in heads]
    most = max(counts, default=0)
    places = [[(last + row) % ring for row in range(-most, rows)] for last in end.tolist()]
    stale = None
    if any(min(head) < most for head in heads):
        stale = torch.arange(most, -rows, -1, device=requests.device)[:, None] > pending[:, None]
    where = _indices(places, requests).view(len(places), most + rows)
    return _Places(requests[:, None], where, counts, most, stale)


def _take(state: LayerState, at: _Places) -> _Rows:
    """Rows of the ring. What is stale may be infinite: zeros take its place, rows that forget and write nothing."""
    rows = _Rows(*(ring[at.requests, at.places] for ring in (state.keys, state.values, state.gates)))
    if at.stale is not None:
        rows.keys.masked_fill_(at.stale.all(2)[..., None, None], 0.0)
        rows.values.masked_fill_(at.stale[..., None], 0.0)
        rows.gates.masked_fill_(at.stale[..., None], 0.0)
    return rows


def _checkpoints(state: LayerState, slots: Tensor) -> Tensor:
    """[n, H, G, dv, dk] fp32, a copy."""
    S = state.checkpoint.index_select(0, slots).to(state.gates.dtype)
    H = state.keys.shape[2]
    return S.view(len(S), H, S.shape[1] // H, *S.shape[2:])


def _normalized(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + KEY_EPS)


def _solve(S: Tensor, queries: Tensor, rows: _Rows, lineage: Lineage) -> _Solved:
    """Pseudo-values of the rows, and outputs of the last of them: those that have queries, [n, T, H, dk]."""
    n, H, G, dv, dk = S.shape
    T, N, wide = queries.shape[1], rows.keys.shape[1], S.dtype
    both = _normalized(torch.cat([queries, rows.keys], dim=1).to(wide)).transpose(1, 2)  # [n, H, T + N, dk]
    keys = both[:, :, T:]
    values = rows.values.to(wide).view(n, N, H, G, dv).permute(0, 2, 3, 1, 4)
    beta = rows.gates[..., 1].view(n, N, H, G, 1).permute(0, 2, 3, 1, 4)
    g = (lineage.path_sums @ rows.gates[..., 0].double()).transpose(1, 2)  # [n, HV, 1 + N], 0 for the state
    ratio = (g[:, :, 1:, None] - g[:, :, None]).masked_fill_(lineage.unrelated, float("-inf"))
    ratio = ratio.to(wide).exp_().view(n, H, G, N, 1 + N)

    # Of queries and keys [n, H, G, T + N, …]: what they read of the state, and of each row.
    read = (both @ S.view(n, H, G * dv, dk).mT).view(n, H, T + N, G, dv).transpose(2, 3)
    scores = (both @ keys.mT)[:, :, None]
    u = beta * torch.addcmul(values, ratio[..., :1], read[..., T:, :], value=-1)
    if N > 1:
        L = beta * ratio[..., 1:] * scores[..., T:, :]  # its diagonal is not read
        u = torch.linalg.solve_triangular(L, u, upper=False, unitriangular=True)
    down = ratio[..., N - T :, :]
    out = torch.addcmul((down[..., 1:] * scores[..., :T, :]) @ u, down[..., :1], read[..., :T, :])
    return _Solved(keys, ratio, u, out)


def _solve_pending(state: LayerState, S: Tensor, at: _Places) -> _Solved:
    rows = _take(state, at)
    return _solve(S, rows.keys[:, :0], rows, _chain(at.pending, S.device))


@lru_cache(maxsize=128)
def _chain(rows: int, device: torch.device) -> Lineage:
    return Lineage.of(torch.ones(1, 0, 0, dtype=torch.bool, device=device), rows)


def _with_rows(S: Tensor, solved: _Solved, rows: int) -> Tensor:
    """g_P S + sum of (g_P / g_i) u_i k_i^T over the first rows, a chain; in place."""
    n, H, G, dv, dk = S.shape
    weights = solved.ratio[..., rows - 1, None, : 1 + rows]
    values = (solved.u[..., :rows, :].mT * weights[..., 1:]).reshape(n * H, G * dv, rows)
    S.mul_(weights[..., :1]).view(n * H, G * dv, dk).baddbmm_(values, solved.keys[:, :, :rows].flatten(0, 1))
    return S


def _fold(
    state: LayerState, slots: Tensor, requests: Tensor, S: Tensor, solved: _Solved, rows: int, due: list[int]
) -> None:
    """Writes checkpoints of the requests at the places `due`."""
    if len(due) < len(S):
        chosen = _indices(due, S)
        slots, requests, S = slots[chosen], requests[chosen], S[chosen]
        solved = _Solved(*(tensor[chosen] for tensor in solved))
    folded = _with_rows(S, solved, rows).flatten(1, 2).to(state.checkpoint.dtype)
    state.checkpoint.index_copy_(0, slots, folded)
    state.pending.index_fill_(0, requests, 0)


def _commit_inputs(conv: Tensor, window_inputs: Tensor, window: Window, blocks: Tensor, paths: list[list[int]]) -> None:
    """Moves the convolution's committed inputs on along the paths. conv [layers, blocks, width - 1, C]."""
    kept = conv.shape[2]
    tails = _indices([([0] * kept + rows)[-kept:] for rows in paths], conv)
    inputs = torch.cat([conv[:, blocks], window_inputs[:, window.requests[:, None], tails]], dim=2)
    # Committed inputs move up by the length of the path; what the path filled is in its place already.
    moved = _indices(
        [[i + len(rows) if i + len(rows) < kept else i + kept for i in range(kept)] for rows in paths], conv
    )
    conv[:, blocks] = inputs[:, torch.arange(len(paths), device=conv.device)[:, None], moved]


def _accepted_paths(window: Window, path: Tensor, accepted: Tensor) -> list[list[int]]:
    """Checks paths and brings them to lists of rows, without padding requests."""
    check_paths(window.batch, path, accepted)
    if window.active is not None:
        path, accepted = path[window.active], accepted[window.active]
    lengths = accepted.tolist()
    if lengths and not 1 <= min(lengths) <= max(lengths) <= path.shape[1]:
        raise ValueError(
            f"accepted is {lengths}; a round accepts the root at least and at most the {path.shape[1]} rows of the path"
        )
    paths = [rows[:length] for rows, length in zip(path.tolist(), lengths, strict=True)]
    for rows, parents in zip(paths, window.trees.parents.tolist(), strict=True):
        followed = all(0 < row < len(parents) and parents[row] == above for above, row in pairwise(rows))
        if rows[0] != 0 or not followed:
            raise ValueError(
                f"path {rows} is none of the tree with parents {parents}: it starts at row 0, the root, and goes from "
                "parent to child"
            )
    return paths


def _check_verified(window_rows: Tensor, window: Window) -> None:
    """window_rows [layers, R]."""
    rows = window.trees.rows.tolist()
    for layer, verified in enumerate(window_rows[:, window.requests].tolist()):
        if verified != rows:
            raise ValueError(
                f"requests {window.requests.tolist()} of layer {layer} have verified windows of {verified} rows, "
                f"but this one has {rows}: verify it in every layer, then commit it once"
            )


def _check_window(
    state: LayerState | SnapshotState,
    window: Window,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    params: GDNParams,
    norm: GatedNorm | None,
) -> None:
    dims = params.dims
    batch, length, max_rows = window.batch, window.trees.parents.shape[1], state.window_inputs.shape[1]
    gates = (batch, length, dims.num_v_heads)
    if x.shape != (batch, length, dims.conv_dim) or a.shape != gates or b.shape != gates:
        raise ValueError(
            f"x {tuple(x.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)} do not fit {batch} windows of {length} rows: "
            f"x is [{batch}, {length}, {dims.conv_dim}], a and b are {list(gates)}"
        )
    if length > max_rows:
        raise ValueError(
            f"a window of {length} rows does not fit a state for {max_rows}: truncate the trees or allocate more"
        )
    planned, kept = window.trees.conv_ancestors.shape[2], state.conv.shape[1]
    if not planned == kept == dims.conv_width - 1:
        raise ValueError(
            f"the window was planned for a convolution of width {planned + 1}, the state for {kept + 1}, the layer has "
            f"width {dims.conv_width}: build trees and state with this conv_width"
        )
    if x.dtype != state.conv.dtype:
        raise ValueError(
            f"x is {x.dtype} and the state keeps inputs in {state.conv.dtype}: convert x, or allocate in its dtype"
        )
    if isinstance(state, LayerState) and params.taps.dtype != state.gates.dtype:
        raise ValueError(
            f"parameters are {params.taps.dtype} and the state keeps gates in {state.gates.dtype}: make both of one "
            "dtype"
        )
    if norm is not None and (norm.z.shape != (*gates, dims.head_v_dim) or norm.weight.shape != (dims.head_v_dim,)):
        raise ValueError(
            f"z {tuple(norm.z.shape)} and weight {tuple(norm.weight.shape)} of the norm do not fit: z is "
            f"{[*gates, dims.head_v_dim]}, weight [{dims.head_v_dim}]"
        )


def _active_inputs(window: Window, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drops padding requests and clears padding rows, whatever they hold."""
    if window.active is not None:
        x, a, b = x[window.active], a[window.active], b[window.active]
    if window.padding_rows is not None:
        x, a, b = (t.masked_fill(window.padding_rows[:, :, None], 0.0) for t in (x, a, b))
    return x, a, b


def _outputs(window: Window, out: Tensor, dtype: torch.dtype, norm: GatedNorm | None) -> Tensor:
    """[B, T, HV, dv] in `dtype` from [n, T, HV, dv] fp32, after the norm."""
    if norm is not None:
        z = norm.z if window.active is None else norm.z[window.active]
        scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + norm.eps)
        out = norm.weight.to(out.dtype) * out * scale * F.silu(z.to(out.dtype))
    out = out.to(dtype)
    if window.padding_rows is not None:
        out = out.masked_fill(window.padding_rows[:, :, None, None], 0.0)
    if window.active is None:
        return out
    everything = out.new_zeros(window.batch, *out.shape[1:])
    everything[window.active] = out
    return everything


def _indices(values: Sequence[object], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
