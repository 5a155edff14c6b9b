"""KV of the softmax layers for windows: a tree's rows beside each other, the accepted ones moved up behind the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy.tree import TreeBatch


class TreeKV:
    """Keys and values of all softmax layers for all running requests.

    It stands in for a Hugging Face cache in a forward over windows: attention layers call `update`. The rows of a
    window are written behind the request's committed rows; `commit` keeps the accepted ones.

    Args:
        layer_indices: `layer_idx` of each softmax layer.
        num_requests: running requests.
        device: where keys and values live.
    """

    def __init__(self, layer_indices: Sequence[int], num_requests: int, device: torch.device) -> None:
        self._place = {layer_idx: place for place, layer_idx in enumerate(layer_indices)}
        self._buffer: Tensor | None = None
        """[2, layers, num_requests, kv heads, capacity, head dim]: keys, then values."""
        self.lengths = [0] * num_requests
        """Committed tokens of each request."""
        self._device = device
        self._requests: list[int] = []
        self._indices = self._positions = torch.empty(0, dtype=torch.int64)
        self._end = self._width = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def load(self, request: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes a prompt's keys and values, [kv heads, n, head dim] per layer in order."""
        length = layers[0][0].shape[1]
        for place, pair in enumerate(layers):
            for kind, rows in enumerate(pair):
                if self._buffer is None:
                    self._buffer = self._allocate(rows, length)
                self._reserve(length)
                self._buffer[kind, place, request, :, :length] = rows
        self.lengths[request] = length

    def begin(self, requests: Sequence[int], trees: TreeBatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Prepares a forward over windows, one tree a request.

        Returns:
            Additive attention mask [B, 1, T, S] in `dtype` and position ids [B, T].
        """
        rows = trees.parents.shape[1]
        lengths = torch.tensor([self.lengths[request] for request in requests], device=self._device)
        self._requests = list(requests)
        self._indices = torch.tensor(self._requests, device=self._device)
        self._width = rows
        self._end = max(self.lengths[request] for request in requests) + rows
        self._reserve(self._end)
        self._positions = lengths[:, None] + torch.arange(rows, device=self._device)
        column = torch.arange(self._end, device=self._device) - lengths[:, None]  # of the window; negative: committed
        in_window = (column >= 0) & (column < rows)
        seen = trees.is_ancestor().gather(2, column.clamp(0, rows - 1)[:, None].expand(-1, rows, -1))
        seen = (column < 0)[:, None] | (in_window[:, None] & seen)
        mask = torch.zeros(seen.shape, dtype=dtype, device=self._device).masked_fill_(~seen, torch.finfo(dtype).min)
        return mask[:, None], lengths[:, None] + trees.depths

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Called by the attention layers: writes the window's rows, returns what they attend to, [B, heads, S, dim]."""
        assert self._buffer is not None, "a request is prefilled before its first window"
        found = []
        for rows, cached in zip((keys, values), self._buffer[:, self._place[layer_idx]], strict=True):
            if len(self._requests) == 1:
                start = self.lengths[self._requests[0]]
                cached[self._requests[0], :, start : start + self._width] = rows[0]
                found.append(cached[self._requests[0] : self._requests[0] + 1, :, : self._end])
                continue
            cached[self._indices[:, None], :, self._positions] = rows.transpose(1, 2)
            everyone = self._requests == list(range(len(self.lengths)))
            found.append((cached if everyone else cached[self._indices])[:, :, : self._end])
        return found[0], found[1]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the accepted rows of the windows of the last `begin`, moved to consecutive places."""
        for request, path in zip(self._requests, paths, strict=True):
            start = self.lengths[request]
            if self._buffer is not None and list(path) != list(range(len(path))):
                kept = self._buffer[:, :, request, :, [start + row for row in path]]
                self._buffer[:, :, request, :, start : start + len(path)] = kept
            self.lengths[request] = start + len(path)

    def read(self, layer_idx: int, request: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of a request, [kv heads, length, head dim]; a copy."""
        assert self._buffer is not None, "nothing was prefilled yet"
        keys, values = self._buffer[:, self._place[layer_idx], request, :, : self.lengths[request]].clone()
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """Forks a request."""
        if self._buffer is not None:
            self._buffer[:, :, target] = self._buffer[:, :, source]
        self.lengths[target] = self.lengths[source]

    def _reserve(self, capacity: int) -> None:
        """Doubles the buffer until it holds `capacity` rows a request, keeping what is there."""
        if self._buffer is None or capacity <= self._buffer.shape[4]:
            return
        larger = self._allocate(self._buffer, max(capacity, 2 * self._buffer.shape[4]))
        larger[:, :, :, :, : self._buffer.shape[4]] = self._buffer
        self._buffer = larger

    def _allocate(self, like: Tensor, capacity: int) -> Tensor:
        heads, dim = like.shape[-3], like.shape[-1]
        shape = (2, len(self._place), len(self.lengths), heads, max(capacity, 64), dim)
        return torch.zeros(shape, dtype=like.dtype, device=self._device)
