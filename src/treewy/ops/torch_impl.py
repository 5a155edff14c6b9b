"""The operations in plain torch: any device, any dtype, the implementation that the others are held to.

Per value head, with the committed state S_0 and P pending rows of history (ancestors of the whole window, already solved):

    S_P k = g_P S_0 k + sum over pending i of (g_P / g_i) (k_i . k) u_i        likewise for q
    (I + diag(beta) G) U = beta (v - g S_P k)                                   solved level by level
    o_t = g_t S_P q_t + sum over i, ancestor or self, of (g_t / g_i) (k_i . q_t) u_i

Arithmetic is fp32 (fp64 where the inputs are). Logarithms of decays are summed along the path in its order, subtracted,
then exponentiated; masked entries become exp(-inf) = 0 before anything is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from treewy.ops.api import GDNParams, LayerState, SnapshotState, Window


class _Rows(NamedTuple):
    """Rows of a window after convolution, gates and norms. n is B less the padding requests, G = HV / H."""

    raw_keys: Tensor
    """[n, T, H, dk] in the input dtype, as the convolution gave them."""
    key_scale: Tensor
    """[n, T, H] fp32, inverse norms."""
    keys: Tensor
    """[n, H, T, dk] fp32, normalised."""
    queries: Tensor
    """[n, H, T, dk] fp32, normalised and scaled by dk^-0.5."""
    values: Tensor
    """[n, H, G, T, dv] fp32."""
    decays: Tensor
    """[n, T, HV] fp32 log decays."""
    betas: Tensor
    """[n, H, G, T, 1] fp32."""


def verify(
    state: LayerState, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, *, fold_always: bool
) -> Tensor:
    """Runs a window through a layer: outputs of every row, and the stash from which `commit` takes the accepted ones.

    The state itself is written only where the history is folded into it: when it could not hold the longest path of this
    window besides what is pending, or always (`fold_always`, the mode `reconstruct`). Running the same window again gives
    the same result.

    Args:
        state: of this layer; the stash is overwritten, history and checkpoint change in a fold.
        window: from `plan`.
        x: [B, T, C] inputs of the convolution (q, k, v side by side), in the dtype of `state.conv`.
        a: [B, T, HV] decay gate before softplus.
        b: [B, T, HV] write gate before the sigmoid.
        params: of this layer.
        fold_always: fold whatever is pending.

    Returns:
        [B, T, HV, dv] in the dtype of x; zero in padding requests and padding rows.

    Raises:
        ValueError: shapes that do not fit, more rows than the stash holds, or a tree deeper than the history can take.
    """
    dims = params.dims
    _check_window(window, x, a, b, params, state.window_inputs.shape[1])
    capacity = state.history_keys.shape[1]
    if window.trees.max_depth + 1 > capacity:
        raise ValueError(
            f"a tree of depth {window.trees.max_depth} can commit {window.trees.max_depth + 1} rows at once, but the "
            f"history holds {capacity}: use a shallower tree or more history rows"
        )
    x, a, b = _active_inputs(window, x, a, b)
    rows = _prepare(state.conv[window.slots], window, x, a, b, params)
    count, length = rows.decays.shape[:2]

    S, waiting = _load(state, window, dims.num_k_heads, rows.decays.dtype, fold_always)
    both = torch.cat([rows.keys, rows.queries], dim=2)  # [n, H, 2T, dk]
    read = (both @ S.flatten(2, 3).transpose(2, 3)).unflatten(3, (dims.group, dims.head_v_dim)).transpose(2, 3)
    if waiting is not None:
        scores = (both @ waiting.keys.transpose(2, 3))[:, :, None] * waiting.weights  # [n, H, G, 2T, P]
        read = waiting.total * read + scores @ waiting.values
    g = _path_sums(rows.decays, window).transpose(1, 2).unflatten(1, (dims.num_k_heads, dims.group))  # [n, H, G, T]
    decay = g.exp()[..., None]
    difference = g[..., :, None] - g[..., None, :]
    products = (both @ rows.keys.transpose(2, 3))[:, :, None]  # [n, H, 1, 2T, T]

    u = right = rows.betas * (rows.values - decay * read[..., :length, :])
    if window.trees.max_depth:
        strict = difference.masked_fill(~window.strict, float("-inf")).exp()
        L = rows.betas * strict * products[..., :length, :]
        for _ in range(window.trees.max_depth):
            u = right - L @ u
    ratio = difference.masked_fill(~window.ancestor_or_self, float("-inf")).exp()
    out = decay * read[..., length:, :] + (ratio * products[..., length:, :]) @ u

    u = u.flatten(1, 2).transpose(1, 2) * rows.key_scale.repeat_interleave(dims.group, dim=2)[..., None]
    for stash, value in (
        (state.window_inputs, x),
        (state.window_keys, rows.raw_keys),
        (state.window_values, u),
        (state.window_decays, rows.decays),
    ):
        stash[window.requests, :length] = value.to(stash.dtype)
    return _outputs(window, out.flatten(1, 2).transpose(1, 2), x.dtype)


def commit(state: LayerState, window: Window, path: Tensor, accepted: Tensor) -> None:
    """Accepts a path: its solved rows join the pending history, its inputs become the convolution's committed ones.

    Args:
        state: of one layer, or of all layers with a leading dimension on every tensor.
        window: the plan that `verify` ran.
        path: [B, P] integer, accepted rows, root first; entries past `accepted` are ignored.
        accepted: [B] integer, length of each path, at least 1: the root is always accepted.

    Raises:
        ValueError: a length outside 1 .. P, a path that does not start at the root and go from parent to child, or a
            history without room (a commit without its verify).
    """
    if state.checkpoint.dim() == 4:
        commit(LayerState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    path, accepted = _accepted_path(window, path, accepted)
    capacity = state.history_keys.shape[2]
    pending = state.pending[:, window.requests]
    if bool((pending + accepted > capacity).any()):
        raise ValueError(
            f"the history holds {capacity} rows, of which {int(pending.max())} are pending: verify makes room for one window, "
            "so commit once after each verify"
        )
    _commit_inputs(state.conv, state.window_inputs, window, window.slots, path, accepted)
    place, step = (torch.arange(path.shape[1], device=path.device) < accepted[:, None]).nonzero(as_tuple=True)
    request, row = window.requests[place], path[place, step]
    layer = torch.arange(pending.shape[0], device=path.device)[:, None]
    target = pending[:, place].long() + step
    for history, stash in (
        (state.history_keys, state.window_keys),
        (state.history_values, state.window_values),
        (state.history_decays, state.window_decays),
    ):
        history[layer, request, target] = stash[layer, request, row]
    state.pending[:, window.requests] = pending + accepted.to(pending.dtype)


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints: before anything else reads the block.

    Args:
        state: of one layer.
        slots: [n] integer blocks of the requests.
        requests: [n] integer indices of the running requests.
    """
    state.checkpoint[slots] = folded_state(state, slots, requests).to(state.checkpoint.dtype)
    state.pending[requests] = 0


def folded_state(state: LayerState, slots: Tensor, requests: Tensor) -> Tensor:
    """The committed state with the pending rows folded in, [n, HV, dv, dk] fp32; nothing is written.

    S_a = g_a S_0 + sum over the path of (g_a / g_i) u_i k_i^T (arXiv 2608.20961).
    """
    num_k_heads = state.history_keys.shape[2]
    wide = state.history_values.dtype
    S = state.checkpoint[slots].to(wide).unflatten(1, (num_k_heads, -1))
    waiting = _pending_rows(state, requests, state.pending[requests])
    if waiting is None:
        return S.flatten(1, 2)
    return _fold(S, waiting).flatten(1, 2)


def verify_store_all(state: SnapshotState, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams) -> Tensor:
    """The baseline: walks the tree row by row and keeps the state of every row. Arguments and result as `verify`."""
    dims = params.dims
    _check_window(window, x, a, b, params, state.window_inputs.shape[1])
    x, a, b = _active_inputs(window, x, a, b)
    rows = _prepare(state.conv[window.requests], window, x, a, b, params)
    count, length = rows.decays.shape[:2]
    wide = rows.decays.dtype
    keys, queries = (t.transpose(1, 2).repeat_interleave(dims.group, dim=2) for t in (rows.keys, rows.queries))
    values, betas = (t.flatten(1, 2).transpose(1, 2) for t in (rows.values, rows.betas))
    out = x.new_zeros(count, length, dims.num_v_heads, dims.head_v_dim, dtype=wide)
    depths = window.trees.depths.masked_fill(window.padding_rows, -1) if window.padding_rows is not None else window.trees.depths
    for depth in range(window.trees.max_depth + 1):
        place, row = (depths == depth).nonzero(as_tuple=True)
        request = window.requests[place]
        before = window.parent_rows[place, row, 0] if depth else state.committed[request]
        S = state.snapshots[request, before].to(wide) * rows.decays[place, row].exp()[:, :, None, None]
        k = keys[place, row]
        u = betas[place, row] * (values[place, row] - (S @ k[..., None]).squeeze(-1))
        S = S + u[..., None] * k[:, :, None]
        out[place, row] = (S @ queries[place, row][..., None]).squeeze(-1)
        state.snapshots[request, row] = S.to(state.snapshots.dtype)
    state.window_inputs[window.requests, :length] = x
    return _outputs(window, out, x.dtype)


def commit_store_all(state: SnapshotState, window: Window, path: Tensor, accepted: Tensor) -> None:
    """Points each request at the snapshot of its last accepted row. Arguments and errors as `commit`."""
    if state.conv.dim() == 3:
        commit_store_all(SnapshotState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    path, accepted = _accepted_path(window, path, accepted)
    _commit_inputs(state.conv, state.window_inputs, window, window.requests, path, accepted)
    state.committed[:, window.requests] = path.gather(1, accepted[:, None] - 1).squeeze(1)


# Parts


def _prepare(committed: Tensor, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams) -> _Rows:
    """Tree convolution, gates and norms. committed [n, width - 1, C]."""
    dims = params.dims
    wide = params.taps.dtype
    inputs = torch.cat([committed, x], dim=1)
    met = inputs.flatten(0, 1)[window.conv_rows].view(*x.shape[:2], dims.conv_width, dims.conv_dim)
    mixed = (met.to(wide) * params.taps).sum(2)
    if params.conv_bias is not None:
        mixed = mixed + params.conv_bias
    mixed = F.silu(mixed).to(x.dtype)
    q, k, v = mixed.split([dims.key_dim, dims.key_dim, dims.value_dim], dim=2)
    raw_keys = k.unflatten(2, (dims.num_k_heads, dims.head_k_dim))
    queries = q.unflatten(2, (dims.num_k_heads, dims.head_k_dim)).to(wide)
    keys = raw_keys.to(wide)
    key_scale = torch.rsqrt(keys.square().sum(-1) + params.eps)
    query_scale = torch.rsqrt(queries.square().sum(-1) + params.eps) * dims.head_k_dim**-0.5
    betas = params.beta_scale * b.to(wide).sigmoid()
    return _Rows(
        raw_keys=raw_keys,
        key_scale=key_scale,
        keys=(keys * key_scale[..., None]).transpose(1, 2),
        queries=(queries * query_scale[..., None]).transpose(1, 2),
        values=v.to(wide).unflatten(2, (dims.num_k_heads, dims.group, dims.head_v_dim)).permute(0, 2, 3, 1, 4),
        decays=params.neg_A * F.softplus(a.to(wide) + params.dt_bias),
        betas=betas.unflatten(2, (dims.num_k_heads, dims.group)).permute(0, 2, 3, 1)[..., None],
    )


def _path_sums(decays: Tensor, window: Window) -> Tensor:
    """log g: sums of [n, T, HV] log decays from the root of the window, in the order of the path."""
    g = decays
    for depth in range(1, window.trees.max_depth + 1):
        summed = g.gather(1, window.parent_rows.expand_as(g)) + decays
        g = torch.where((window.trees.depths == depth)[:, :, None], summed, g)
    return g


class _Pending(NamedTuple):
    """Pending rows of n requests, as ancestors of their windows; P is the longest of them."""

    keys: Tensor
    """[n, H, P, dk] fp32, before normalisation."""
    values: Tensor
    """[n, H, G, P, dv] fp32, scaled by the inverse norms."""
    weights: Tensor
    """[n, H, G, 1, P] decay from each row to the last; 0 past a request's own rows."""
    total: Tensor
    """[n, H, G, 1, 1] decay of all rows together."""


def _pending_rows(state: LayerState, requests: Tensor, pending: Tensor) -> _Pending | None:
    longest = int(pending.max()) if pending.numel() else 0
    if longest == 0:
        return None
    wide = state.history_values.dtype
    num_k_heads = state.history_keys.shape[2]
    keys = state.history_keys[requests, :longest]
    values = state.history_values[requests, :longest]
    past = (torch.arange(longest, device=pending.device) >= pending[:, None])[..., None]
    decays = state.history_decays[requests, :longest].masked_fill(past, 0.0)
    sums = decays.cumsum(1)
    total = sums[:, -1:]
    weights = (total - sums).exp().masked_fill(past, 0.0)
    # What stands past a request's own rows is stale and may hold anything, so it is cleared rather than weighted by zero.
    return _Pending(
        keys.masked_fill(past[..., None], 0.0).to(wide).transpose(1, 2),
        values.masked_fill(past[..., None], 0.0).transpose(1, 2).unflatten(1, (num_k_heads, -1)),
        weights.transpose(1, 2).unflatten(1, (num_k_heads, -1))[:, :, :, None],
        total.exp().transpose(1, 2).unflatten(1, (num_k_heads, -1))[..., None],
    )


def _fold(S: Tensor, waiting: _Pending) -> Tensor:
    """g_a S_0 + sum of (g_a / g_i) u_i k_i^T. S [n, H, G, dv, dk]."""
    written = (waiting.values.transpose(3, 4) * waiting.weights) @ waiting.keys[:, :, None]
    return waiting.total * S + written


def _load(
    state: LayerState, window: Window, num_k_heads: int, wide: torch.dtype, fold_always: bool
) -> tuple[Tensor, _Pending | None]:
    """Committed states [n, H, G, dv, dk] and what of the history is still pending, after folding where it is due."""
    S = state.checkpoint[window.slots].to(wide).unflatten(1, (num_k_heads, -1))
    pending = state.pending[window.requests]
    waiting = _pending_rows(state, window.requests, pending)
    if waiting is None:
        return S, None
    capacity = state.history_keys.shape[1]
    due = pending > 0 if fold_always else pending + window.longest_path > capacity
    chosen = due.nonzero().squeeze(1)
    if chosen.numel():
        S[chosen] = _fold(S[chosen], _Pending(*(tensor[chosen] for tensor in waiting)))
        state.checkpoint[window.slots[chosen]] = S[chosen].flatten(1, 2).to(state.checkpoint.dtype)
        state.pending[window.requests[chosen]] = 0
        if chosen.numel() == pending.numel():
            return S, None
        waiting = _pending_rows(state, window.requests, pending.masked_fill(due, 0))
    return S, waiting


def _commit_inputs(
    conv: Tensor, window_inputs: Tensor, window: Window, blocks: Tensor, path: Tensor, accepted: Tensor
) -> None:
    """Moves the convolution's committed inputs on along the path. conv [layers, blocks, width - 1, C]."""
    kept = conv.shape[2]
    inputs = torch.cat([conv[:, blocks], window_inputs[:, window.requests[:, None], path]], dim=2)
    last = accepted[:, None] + torch.arange(kept, device=path.device)
    conv[:, blocks] = inputs.gather(2, last[None, :, :, None].expand(conv.shape[0], -1, -1, conv.shape[3]))


def _accepted_path(window: Window, path: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Checks a path and brings it to int64, without padding requests, with 0 past its end."""
    if path.shape[0] != window.batch or accepted.shape != (window.batch,) or path.dim() != 2:
        raise ValueError(
            f"path {tuple(path.shape)} and accepted {tuple(accepted.shape)} do not fit a round of {window.batch} requests: "
            f"[{window.batch}, P] and [{window.batch}]"
        )
    path, accepted = path.long(), accepted.long()
    if window.active is not None:
        path, accepted = path[window.active], accepted[window.active]
    if accepted.numel() and not bool(((accepted >= 1) & (accepted <= path.shape[1])).all()):
        raise ValueError(
            f"accepted is {accepted.tolist()}; a round accepts the root at least and at most the {path.shape[1]} rows of the path"
        )
    path = path.masked_fill(torch.arange(path.shape[1], device=path.device) >= accepted[:, None], 0)
    step = torch.arange(1, path.shape[1], device=path.device)
    inside = (path >= 0) & (path < window.trees.rows[:, None])
    parents = window.parent_rows.squeeze(2).gather(1, path[:, 1:].clamp(0, window.parent_rows.shape[1] - 1))
    follows = (parents == path[:, :-1]) & (path[:, 1:] > 0) | (step >= accepted[:, None])
    if not bool(inside.all() & follows.all() & (path[:, :1] == 0).all()):
        raise ValueError(f"path {path.tolist()} with lengths {accepted.tolist()} does not go from the root from parent to child")
    return path, accepted


def _check_window(window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, max_rows: int) -> None:
    dims = params.dims
    batch, length = window.batch, window.parent_rows.shape[1]
    gates = (batch, length, dims.num_v_heads)
    if x.shape != (batch, length, dims.conv_dim) or a.shape != gates or b.shape != gates:
        raise ValueError(
            f"x {tuple(x.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)} do not fit {batch} windows of {length} rows: "
            f"x is [{batch}, {length}, {dims.conv_dim}], a and b are {list(gates)}"
        )
    if length > max_rows:
        raise ValueError(f"a window of {length} rows does not fit a stash of {max_rows}: truncate the trees or allocate more")


def _active_inputs(window: Window, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drops padding requests and clears padding rows, whatever they hold."""
    if window.active is not None:
        x, a, b = x[window.active], a[window.active], b[window.active]
    if window.padding_rows is not None:
        x, a, b = (t.masked_fill(window.padding_rows[:, :, None], 0.0) for t in (x, a, b))
    return x, a, b


def _outputs(window: Window, out: Tensor, dtype: torch.dtype) -> Tensor:
    out = out.to(dtype)
    if window.padding_rows is not None:
        out = out.masked_fill(window.padding_rows[:, :, None, None], 0.0)
    if window.active is None:
        return out
    everything = out.new_zeros(window.batch, *out.shape[1:])
    everything[window.active] = out
    return everything
