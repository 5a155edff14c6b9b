"""Gated delta rule in chunks, written in plain PyTorch so that it can be trained.

The recurrence, for one head with state ``S`` (key dim x value dim), is::

    S_t = exp(g_t) * S_{t-1}
    S_t = S_t + k_t (beta_t * (v_t - S_t^T k_t))^T
    o_t = S_t^T q_t / sqrt(dk)

Inside a chunk all updates are solved at once with one small triangular inverse; between chunks only the state is
carried.  Everything is batched matrix products, so autograd and ``torch.compile`` handle it without custom kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return ``(I + L)^-1`` where ``L`` is the strictly lower part of ``a`` (last two dims, a power of two).

    Works by doubling: if the diagonal blocks of size ``s`` are already inverted, the blocks of size ``2 s`` follow
    from two products.  This is block forward substitution, so it is as stable as the usual row-by-row one.
    """
    n = a.shape[-1]
    if n & (n - 1):
        raise ValueError(f"chunk size must be a power of two, got {n}")
    index = torch.arange(n, device=a.device)
    inverse = torch.eye(n, dtype=a.dtype, device=a.device).expand_as(a)
    size = 1
    while size < n:
        block = index // size
        below = (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)
        corner = torch.where(below, a, 0.0)
        inverse = inverse - (corner if size == 1 else inverse @ (corner @ inverse))  # it starts as the identity
        size *= 2
    return inverse


class _UnitLowerInverse(torch.autograd.Function):
    """``unit_lower_inverse`` with the short closed-form gradient instead of one through every doubling step."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        inverse = unit_lower_inverse(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 128) -> Tensor:
    """Run the recurrence over a whole sequence from a zero state.

    Args:
        q, k: ``[batch, time, key heads, dk]``; they are L2-normalised here.
        v: ``[batch, time, value heads, dv]``; value head ``j`` uses key head ``j // (value heads / key heads)``.
        g: ``[batch, time, value heads]``, logarithm of the decay (<= 0).
        beta: ``[batch, time, value heads]``, write strength in (0, 1).
        chunk: chunk length, a power of two.

    Returns:
        ``[batch, time, value heads, dv]`` in the dtype of ``q``.  The arithmetic is float32 (float64 for float64
        input) whatever autocast says.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _chunked(q, k, v, g, beta, chunk)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    batch, time, heads, dk = k.shape
    value_heads, dv = v.shape[2:]
    group = value_heads // heads
    out_dtype = q.dtype
    work = torch.promote_types(out_dtype, torch.float32)
    pad = -time % chunk
    count = (time + pad) // chunk

    def split(x: Tensor, head_shape: tuple[int, ...]) -> Tensor:
        """[batch, time, heads, ...] -> [batch, *head_shape, chunks, chunk, ...]"""
        x = x.to(work)
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x
        x = x.reshape(batch, count, chunk, *head_shape, *x.shape[3:])
        return x.movedim((3, 4), (1, 2))

    q = split(_unit(q.to(work)) * dk**-0.5, (heads, 1))
    k = split(_unit(k.to(work)), (heads, 1))
    v = split(v, (heads, group))
    g = split(g, (heads, group)).cumsum(-1)
    beta = split(beta, (heads, group))

    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")))
    keys_t = k.transpose(-1, -2)
    inverse = _UnitLowerInverse.apply((k @ keys_t) * beta[..., None] * decay)
    from_start = g.exp()[..., None]
    to_end = (g[..., -1:] - g).exp()[..., None]
    writes = inverse @ (v * beta[..., None])
    reads = inverse @ (k * (beta[..., None] * from_start))

    flat = batch * value_heads
    scores = ((q @ keys_t) * decay).reshape(flat, count, chunk, chunk).unbind(1)
    looks = torch.cat([reads, q * from_start], -2).reshape(flat, count, 2 * chunk, dk).unbind(1)
    stores = (k * to_end).reshape(flat, count, chunk, dk).transpose(-1, -2).unbind(1)
    writes_by_chunk = writes.reshape(flat, count, chunk, dv).unbind(1)
    chunk_decay = g[..., -1].exp().reshape(flat, count, 1, 1).unbind(1)

    state = torch.zeros(flat, dk, dv, dtype=work, device=q.device)
    outputs = []
    for i in range(count):
        seen, answered = (looks[i] @ state).split(chunk, 1)
        new = writes_by_chunk[i] - seen
        outputs.append(answered + scores[i] @ new)
        state = state * chunk_decay[i] + stores[i] @ new
    out = torch.stack(outputs, 1).reshape(batch, value_heads, count * chunk, dv)
    return out[:, :, :time].transpose(1, 2).to(out_dtype)


def sequential_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same recurrence, one token at a time: the plain reference for tests."""
    group = v.shape[2] // k.shape[2]
    q = (_unit(q) * k.shape[-1] ** -0.5).repeat_interleave(group, 2)
    k = _unit(k).repeat_interleave(group, 2)
    state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=q.dtype, device=q.device)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)
