"""The operations in plain torch: any device, any dtype, the implementation that the others are held to.

Per value head, with the committed state S_0 and P pending rows of history (ancestors of all rows, solved already):

    S_P k = g_P S_0 k + sum over pending i of (g_P / g_i) (k_i . k) u_i        likewise for q
    (I + diag(beta) G) U = beta (v - g S_P k)                                  by forward substitution
    o_t = g_t S_P q_t + sum over i, ancestor or self, of (g_t / g_i) (k_i . q_t) u_i

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

from treewy.ops.api import GDNParams, LayerState, SnapshotState, Window

_LOWEST_DECAY = -1e4
"""exp of it is 0 in every dtype; a log decay of -inf would turn differences into NaN."""


class _Rows(NamedTuple):
    """Rows of a window after convolution, gates and norms. n is B less the padding requests, G = HV / H."""

    raw_keys: Tensor
    """[n, T, H, dk] in the input dtype, as the convolution gave them."""
    key_scale: Tensor
    """[n, T, H, 1] fp32, inverse norms."""
    both: Tensor
    """[n, H, T, 2, dk] fp32, queries and keys, normalised. The factor dk^-0.5 of the queries is left to the outputs."""
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

    The state itself is written only where the history is folded into it: when it could not hold the longest path of
    this window besides what is pending, or always (`fold_always`, the mode `reconstruct`). Running the same window
    again gives the same result, and another window may take its place: what counts is the last one before `commit`.

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
        ValueError: shapes or dtypes that do not fit, more rows than the stash holds, or a tree deeper than the history
            can take. Nothing is written then.
    """
    _check_window(state, window, x, a, b, params)
    capacity = state.history_keys.shape[1]
    if window.trees.max_depth + 1 > capacity:
        raise ValueError(
            f"a tree of depth {window.trees.max_depth} can commit {window.trees.max_depth + 1} rows at once, but the "
            f"history holds {capacity}: use a shallower tree or more history rows"
        )
    x, a, b = _active_inputs(window, x, a, b)
    rows = _prepare(state.conv.index_select(0, window.slots), window, x, a, b, params)
    S, waiting = _load(state, window, fold_always)

    n, H, G, dv, dk = S.shape
    T = x.shape[1]
    both = rows.both.reshape(n, H, T * 2, dk)
    # Queries and keys side by side, [n, H, G, T, 2, …], from here on.
    read = (both @ S.view(n, H, G * dv, dk).mT).view(n, H, T, 2, G, dv).permute(0, 1, 4, 2, 3, 5)
    if waiting is not None:
        scores = (both @ waiting.keys.mT)[:, :, None] * waiting.weights  # [n, H, G, 2T, P]
        read = torch.addcmul((scores @ waiting.values).view(n, H, G, T, 2, dv), waiting.total[..., None], read)
    g = (window.path_sums @ rows.decays.double()).transpose(1, 2)  # [n, HV, 1 + T], 0 for the state
    ratio = (g[:, :, 1:, None] - g[:, :, None]).masked_fill_(window.unrelated, float("-inf"))
    ratio = ratio.to(rows.decays.dtype).exp_().view(n, H, G, T, 1, 1 + T)
    from_state = ratio[..., :1] * read
    weighted = ratio[..., 1:] * (both @ rows.both[:, :, :, 1].mT).view(n, H, 1, T, 2, T)

    u = rows.betas * (rows.values - from_state[..., 1, :])
    if window.trees.max_depth:
        L = rows.betas * weighted[..., 1, :]  # its diagonal is not read
        u = torch.linalg.solve_triangular(L, u, upper=False, unitriangular=True)
    out = (from_state[..., 0, :] + weighted[..., 0, :] @ u) * dk**-0.5

    u = u.permute(0, 3, 1, 2, 4) * rows.key_scale[..., None]
    for stash, value in (
        (state.window_inputs, x),
        (state.window_keys, rows.raw_keys),
        (state.window_values, u.flatten(2, 3)),
        (state.window_decays, rows.decays),
    ):
        stash[:, :T].index_copy_(0, window.requests, value)
    state.window_rows.index_copy_(0, window.requests, window.trees.rows)
    return _outputs(window, out.permute(0, 3, 1, 2, 4).flatten(2, 3), x.dtype)


def commit(state: LayerState, window: Window, path: Tensor, accepted: Tensor) -> None:
    """Accepts a path: its solved rows join the pending history, its inputs become the convolution's committed ones.

    Args:
        state: of one layer, or of all layers with a leading dimension on every tensor.
        window: the plan that `verify` ran last for these requests, in every layer.
        path: [B, P] integer, accepted rows, root first; entries past `accepted` are ignored.
        accepted: [B] integer, length of each path, at least 1: the root is always accepted.

    Raises:
        ValueError: a length outside 1 .. P, a path that does not start at the root and go from parent to child, a
            window that was not verified or is committed already, or a history without room. Nothing is written then.
    """
    if state.checkpoint.dim() == 4:
        commit(LayerState(*(tensor[None] for tensor in state)), window, path, accepted)
        return
    paths = _accepted_paths(window, path, accepted)
    if not paths:
        return
    _check_verified(state.window_rows, window)
    capacity = state.history_keys.shape[2]
    pending = state.pending[:, window.requests]
    for request, rows, used in zip(window.requests.tolist(), paths, pending.amax(0).tolist(), strict=True):
        if used + len(rows) > capacity:
            raise ValueError(
                f"request {request} accepts {len(rows)} rows, but {used} of the {capacity} rows of its history are "
                "pending: verify the window with this history, which makes room for it"
            )
    _commit_inputs(state.conv, state.window_inputs, window, window.slots, paths)
    layer = torch.arange(pending.shape[0], device=pending.device)[:, None]
    steps = [(place, step, row) for place, rows in enumerate(paths) for step, row in enumerate(rows)]
    place, step, row = _indices(steps, pending).view(-1, 3).unbind(1)
    request, target = window.requests[place], pending[:, place] + step
    for history, stash in (
        (state.history_keys, state.window_keys),
        (state.history_values, state.window_values),
        (state.history_decays, state.window_decays),
    ):
        history[layer, request, target] = stash[layer, request, row]
    state.pending[:, window.requests] = pending + torch.tensor([len(rows) for rows in paths]).to(pending)
    state.window_rows[:, window.requests] = 0


def fold(state: LayerState, slots: Tensor, requests: Tensor) -> None:
    """Folds all pending rows of these requests into their checkpoints: before anything else reads the block.

    Args:
        state: of one layer.
        slots: [n] integer blocks of the requests.
        requests: [n] integer indices of the running requests.
    """
    _write_folded(state, slots, requests, _folded(state, slots, requests))


def folded_state(state: LayerState, slots: Tensor, requests: Tensor) -> Tensor:
    """The committed state with the pending rows folded in, [n, HV, dv, dk] fp32; nothing is written.

    S_a = g_a S_0 + sum over the path of (g_a / g_i) u_i k_i^T (arXiv 2608.20961).
    """
    return _folded(state, slots, requests).flatten(1, 2)


def verify_store_all(
    state: SnapshotState, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams
) -> Tensor:
    """The baseline: walks the tree row by row and keeps the state of every row. Arguments and result as `verify`.

    The state of a row may take the place of the committed one, as in engines that keep N + 1 states. So a window cannot
    be run again before its commit.

    Raises:
        ValueError: as `verify`, or a request whose last window still waits for its commit. Nothing is written then.
    """
    dims = params.dims
    _check_window(state, window, x, a, b, params)
    for request, waiting in zip(window.requests.tolist(), state.window_rows[window.requests].tolist(), strict=True):
        if waiting:
            raise ValueError(
                f"request {request} has a window of {waiting} rows that waits for its commit, and their states may "
                "stand where the committed one stood: commit it, or load the state anew"
            )
    x, a, b = _active_inputs(window, x, a, b)
    rows = _prepare(state.conv.index_select(0, window.requests), window, x, a, b, params)
    wide = rows.decays.dtype
    # [n, T, HV, …], a row's heads together.
    queries, keys = rows.both.permute(3, 0, 2, 1, 4).repeat_interleave(dims.group, dim=3)
    values, betas = (t.flatten(1, 2).transpose(1, 2) for t in (rows.values, rows.betas))
    out = torch.zeros_like(values)
    depths = (
        window.trees.depths if window.padding_rows is None else window.trees.depths.masked_fill(window.padding_rows, -1)
    )
    state.window_rows.index_copy_(0, window.requests, window.trees.rows)
    for depth in range(window.trees.max_depth + 1):
        place, row = (depths == depth).nonzero(as_tuple=True)
        request = window.requests[place]
        before = window.trees.parents[place, row] if depth else state.committed[request]
        S = state.snapshots[request, before].to(wide).mul_(rows.decays[place, row].exp()[:, :, None, None])
        k = keys[place, row][..., None]
        u = betas[place, row][..., None] * (values[place, row][..., None] - S @ k)
        S.flatten(0, 1).baddbmm_(u.flatten(0, 1), k.flatten(0, 1).mT)
        out[place, row] = (S @ queries[place, row][..., None]).squeeze(-1)
        state.snapshots[request, row] = S.to(state.snapshots.dtype)
    state.window_inputs[:, : x.shape[1]].index_copy_(0, window.requests, x)
    return _outputs(window, out * dims.head_k_dim**-0.5, x.dtype)


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


def _prepare(committed: Tensor, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams) -> _Rows:
    """Tree convolution, gates and norms. committed [n, width - 1, C]."""
    dims = params.dims
    wide = params.taps.dtype
    n, T, C = x.shape
    H, G, dk, dv = dims.num_k_heads, dims.group, dims.head_k_dim, dims.head_v_dim
    inputs = torch.cat([committed, x], dim=1).view(-1, C)
    met = inputs.index_select(0, window.conv_rows).view(n, T, dims.conv_width, C)
    mixed = (met.to(wide) * params.taps).sum(2)
    if params.conv_bias is not None:
        mixed = mixed + params.conv_bias
    mixed = F.silu(mixed).to(x.dtype)
    raw = mixed[:, :, : 2 * dims.key_dim].view(n, T, 2 * H, dk)
    both = raw.to(wide)
    scale = torch.rsqrt(both.square().sum(-1, keepdim=True) + params.eps)
    values = mixed[:, :, 2 * dims.key_dim :].to(wide).view(n, T, H, G, dv)
    return _Rows(
        raw_keys=raw[:, :, H:],
        key_scale=scale[:, :, H:],
        both=(both * scale).view(n, T, 2, H, dk).permute(0, 3, 1, 2, 4),
        values=values.permute(0, 2, 3, 1, 4),
        decays=(params.neg_A * F.softplus(a.to(wide) + params.dt_bias)).clamp(min=_LOWEST_DECAY),
        betas=(params.beta_scale * b.to(wide).sigmoid()).transpose(1, 2).view(n, H, G, T, 1),
    )


class _Pending(NamedTuple):
    """Pending rows of n requests, as ancestors of their windows; P is the longest of them."""

    keys: Tensor
    """[n, H, P, dk] fp32, before normalisation; 0 past a request's own rows."""
    values: Tensor
    """[n, H, G, P, dv] fp32, scaled by the inverse norms; 0 past a request's own rows."""
    weights: Tensor
    """[n, H, G, 1, P] decay from each row to the last."""
    total: Tensor
    """[n, H, G, 1, 1] decay of all rows together."""


def _pending_rows(state: LayerState, requests: Tensor, pending: list[int]) -> _Pending | None:
    longest = max(pending, default=0)
    if longest == 0:
        return None
    wide = state.history_values.dtype
    n, H = len(pending), state.history_keys.shape[2]
    keys, values, decays = (
        history[:, :longest].index_select(0, requests)
        for history in (state.history_keys, state.history_values, state.history_decays)
    )
    if min(pending) < longest:
        # Past a request's own rows stands what is stale, possibly infinite: it is cleared, not weighted by zero.
        past = torch.arange(longest, device=keys.device) >= _indices(pending, keys)[:, None]
        keys, values = (t.masked_fill(past[:, :, None, None], 0.0) for t in (keys, values))
        decays = decays.masked_fill(past[:, :, None], 0.0)
    # Sums of what comes after each row, [n, 1 + P, HV]; first that of all rows.
    weights = (_suffix_sums(longest, keys.device) @ decays.double()).exp().to(wide)
    weights = weights.transpose(1, 2).view(n, H, -1, 1, 1 + longest)
    return _Pending(
        keys.to(wide).transpose(1, 2),
        values.view(n, longest, H, -1, values.shape[3]).permute(0, 2, 3, 1, 4),
        weights[..., 1:],
        weights[..., :1],
    )


@lru_cache(maxsize=128)
def _suffix_sums(rows: int, device: torch.device) -> Tensor:
    """[1 + rows, rows] fp64: row i sums everything from i on."""
    return torch.ones(1 + rows, rows, dtype=torch.float64, device=device).triu()


def _committed_states(state: LayerState, slots: Tensor) -> Tensor:
    """[n, H, G, dv, dk] without what is pending."""
    S = state.checkpoint.index_select(0, slots).to(state.history_values.dtype)
    n, hv, *matrix = S.shape
    H = state.history_keys.shape[2]
    return S.view(n, H, hv // H, *matrix)


def _fold(S: Tensor, waiting: _Pending) -> Tensor:
    """g_a S_0 + sum of (g_a / g_i) u_i k_i^T, in place. S [n, H, G, dv, dk]."""
    n, H, G, dv, dk = S.shape
    values = (waiting.values.mT * waiting.weights).reshape(n * H, G * dv, waiting.keys.shape[2])
    S.mul_(waiting.total).view(n * H, G * dv, dk).baddbmm_(values, waiting.keys.flatten(0, 1))
    return S


def _folded(state: LayerState, slots: Tensor, requests: Tensor) -> Tensor:
    S = _committed_states(state, slots)
    waiting = _pending_rows(state, requests, state.pending[requests].tolist())
    return S if waiting is None else _fold(S, waiting)


def _write_folded(state: LayerState, slots: Tensor, requests: Tensor, S: Tensor) -> None:
    folded = S.flatten(1, 2).to(state.checkpoint.dtype)
    state.checkpoint.index_copy_(0, slots, folded)
    state.pending.index_fill_(0, requests, 0)


def _load(state: LayerState, window: Window, fold_always: bool) -> tuple[Tensor, _Pending | None]:
    """Committed states [n, H, G, dv, dk] and what of the history is still pending, after folding where it is due."""
    S = _committed_states(state, window.slots)
    pending = state.pending[window.requests].tolist()
    waiting = _pending_rows(state, window.requests, pending)
    if waiting is None:
        return S, None
    capacity = state.history_keys.shape[1]
    more = window.longest_path
    due = [place for place, rows in enumerate(pending) if fold_always or rows + more[place] > capacity]
    if not due:
        return S, waiting
    if len(due) == len(pending):
        _write_folded(state, window.slots, window.requests, _fold(S, waiting))
        return S, None
    chosen = _indices(due, S)
    folded = _fold(S[chosen], _Pending(*(tensor[chosen] for tensor in waiting)))
    _write_folded(state, window.slots[chosen], window.requests[chosen], folded)
    S[chosen] = folded
    left = [0 if place in due else rows for place, rows in enumerate(pending)]
    return S, _pending_rows(state, window.requests, left)


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
    if path.dim() != 2 or path.shape[0] != window.batch or accepted.shape != (window.batch,):
        raise ValueError(
            f"path {tuple(path.shape)} and accepted {tuple(accepted.shape)} do not fit a round of {window.batch} "
            f"requests: [{window.batch}, P] and [{window.batch}]"
        )
    if path.is_floating_point() or accepted.is_floating_point():
        raise ValueError(f"path is {path.dtype} and accepted {accepted.dtype}; both are integers")
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
    state: LayerState | SnapshotState, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams
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
            f"a window of {length} rows does not fit a stash of {max_rows}: truncate the trees or allocate more"
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
    if isinstance(state, LayerState) and params.taps.dtype != state.window_values.dtype:
        raise ValueError(
            f"parameters are {params.taps.dtype} and the stash is {state.window_values.dtype}: make both of one dtype"
        )


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


def _indices(values: Sequence[object], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
