"""Recurrent state of the running requests: what is allocated, what it costs, and its life in the three commit modes.

store_all     one state a row of the window; a commit points at the accepted row's
reconstruct   one state; the accepted path stays pending and is folded in by the next verify
deferred      one state; accepted paths stay pending and are folded in when the next window might not fit besides them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from treewy import ops
from treewy.ops import DeviceWindow, GatedNorm, GDNDims, GDNParams, Impl, LayerState, SnapshotState, Window
from treewy.tree import MAX_ROWS, TreeBatch

CommitMode = Literal["store_all", "reconstruct", "deferred"]
"""`mamba_state_commit`."""


@dataclass(frozen=True)
class StateSpec:
    """Layout of the recurrent state of all GDN layers, per request.

    Args:
        layers: dimensions of each GDN layer; all layers have the same.
        num_layers: GDN layers.
        mode: when and how the accepted path reaches the state.
        max_rows: rows of the largest window, root included.
        max_depth: depth of the deepest window; a round commits at most max_depth + 1 rows.
        state_dtype: of checkpoints and snapshots.
        input_dtype: of convolution inputs, keys and values, the model's.
        history_rows: rows that may be pending in the mode `deferred`; more rows fold less often. Default: three of the
            longest paths, at least 12.

    Raises:
        ValueError: an unknown mode, window sizes out of range, or a history that cannot hold one path.
    """

    layers: GDNDims
    num_layers: int
    mode: CommitMode
    max_rows: int
    max_depth: int
    state_dtype: torch.dtype = torch.float32
    input_dtype: torch.dtype = torch.float32
    history_rows: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(CommitMode):
            raise ValueError(f"mamba_state_commit is {self.mode!r}; it is one of {', '.join(get_args(CommitMode))}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}; there must be at least one GDN layer")
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows is {self.max_rows}; a window has 1 to {MAX_ROWS} rows, root included")
        if not 0 <= self.max_depth < self.max_rows:
            raise ValueError(
                f"max_depth is {self.max_depth}; a window of {self.max_rows} rows is 0 to {self.max_rows - 1} deep"
            )
        if self.history_rows is not None and self.history_rows <= self.max_depth:
            raise ValueError(
                f"history_rows is {self.history_rows}; the longest path of a window has {self.max_depth + 1} rows and "
                f"must fit; give at least {self.max_depth + 1}"
            )

    @property
    def history(self) -> int:
        """L: rows that may be pending; the ring has room for a window besides."""
        longest_path = self.max_depth + 1
        if self.mode == "deferred":
            return self.history_rows or max(12, 3 * longest_path)
        return longest_path if self.mode == "reconstruct" else 0

    def pieces(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape per request and layer, and dtype, of everything that is allocated; names as in `LayerState`."""
        dims, rows = self.layers, self.max_rows
        wide = torch.promote_types(self.state_dtype, torch.float32)
        state = (dims.num_v_heads, dims.head_v_dim, dims.head_k_dim)
        conv = ((dims.conv_width - 1, dims.conv_dim), self.input_dtype)
        inputs = ((rows, dims.conv_dim), self.input_dtype)
        if self.mode == "store_all":
            return {
                "snapshots": ((rows, *state), self.state_dtype),
                "conv": conv,
                "window_inputs": inputs,
                "window_rows": ((), torch.int32),
                "committed": ((), torch.int64),
            }
        ring, heads = self.history + rows, dims.num_v_heads
        return {
            "checkpoint": (state, self.state_dtype),
            "conv": conv,
            "window_inputs": inputs,
            "window_rows": ((), torch.int32),
            "keys": ((ring, dims.num_k_heads, dims.head_k_dim), self.input_dtype),
            "values": ((ring, heads, dims.head_v_dim), self.input_dtype),
            "gates": ((ring, heads, 2), wide),
            "end": ((), torch.int32),
            "pending": ((heads,), torch.int32),
        }

    def bytes_by_piece(self) -> dict[str, int]:
        """Bytes per request over all layers, by piece: exactly what `RecurrentState` allocates."""
        return {name: self.num_layers * prod(shape) * dtype.itemsize for name, (shape, dtype) in self.pieces().items()}

    @property
    def bytes_per_request(self) -> int:
        """Sum of `bytes_by_piece`."""
        return sum(self.bytes_by_piece().values())


class RecurrentState:
    """State of `num_requests` requests in all GDN layers, behind one interface for the three modes.

    A round is `plan`, then `verify` in every layer, then one `commit`. Pool slot and running index of a request are the
    same number here; an engine with a paged pool of its own calls `treewy.ops` directly.

    Args:
        spec: layout.
        num_requests: running requests; all start from the zero state.
        device: where the state lives.
        impl: what runs; the mode `store_all` has "torch" only.

    Raises:
        ValueError: no requests, or an implementation that there is not.
    """

    def __init__(
        self, spec: StateSpec, num_requests: int, device: torch.device | str = "cpu", impl: Impl = "torch"
    ) -> None:
        if num_requests < 1:
            raise ValueError(f"num_requests is {num_requests}; there must be at least one")
        ops.check_impl(impl)
        if spec.mode == "store_all" and impl != "torch":
            raise ValueError(f"impl is {impl!r}, but the mode store_all is there in torch only: choose another mode")
        self.spec = spec
        self.num_requests = num_requests
        self.impl: Impl = impl
        tensors = {
            name: torch.zeros(spec.num_layers, num_requests, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in spec.pieces().items()
        }
        self._all: LayerState | SnapshotState
        self._all = SnapshotState(**tensors) if spec.mode == "store_all" else LayerState(**tensors)
        self._layers = [type(self._all)(*(tensor[layer] for tensor in self._all)) for layer in range(spec.num_layers)]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Everything that is allocated, each [layers, num_requests, …]."""
        return self._all._asdict()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self._all)

    def plan(self, trees: TreeBatch, requests: Tensor) -> Window | DeviceWindow:
        """Plans a round for these requests ([B] integer, negative for padding). Errors as `treewy.ops.plan`."""
        size = self.num_requests
        return ops.plan(trees, requests, requests, num_slots=size, num_requests=size, impl=self.impl)

    def verify(
        self,
        layer: int,
        window: Window | DeviceWindow,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        params: GDNParams,
        *,
        norm: GatedNorm | None = None,
    ) -> Tensor:
        """Runs a window through a layer. Arguments, result and errors as `treewy.ops.verify`."""
        state = self._layers[layer]
        if isinstance(state, SnapshotState):
            assert isinstance(window, Window)
            return ops.verify_store_all(state, window, x, a, b, params, norm=norm)
        return ops.verify(state, window, x, a, b, params, fold_always=self.spec.mode == "reconstruct", norm=norm)

    def commit(self, window: Window | DeviceWindow, path: Tensor, accepted: Tensor) -> None:
        """Accepts a path in all layers. Arguments and errors as `treewy.ops.commit`; waits for the device."""
        if isinstance(self._all, SnapshotState):
            assert isinstance(window, Window)
            ops.commit_store_all(self._all, window, path, accepted)
        else:
            ops.commit(self._all, window, path, accepted)
        if isinstance(window, DeviceWindow):
            window.check()

    def load(self, layer: int, request: int, state: Tensor, conv: Tensor) -> None:
        """Prefill hand-over: the state after a prompt becomes the committed one, whatever was there before.

        Args:
            layer: GDN layer.
            request: index.
            state: [HV, dv, dk].
            conv: [width - 1, C] last convolution inputs, oldest first, zeros before the start of the text.

        Raises:
            ValueError: shapes that do not fit.
            IndexError: a request that does not exist.
        """
        mine = self._layers[layer]
        if state.shape != mine[0].shape[-3:] or conv.shape != mine.conv.shape[1:]:
            raise ValueError(
                f"state {tuple(state.shape)} and conv {tuple(conv.shape)} do not fit {tuple(mine[0].shape[-3:])} and "
                f"{tuple(mine.conv.shape[1:])}"
            )
        self._check(request)
        mine.window_rows[request] = 0
        if isinstance(mine, SnapshotState):
            mine.committed[request] = 0
            mine.snapshots[request, 0] = state
        else:
            mine.pending[request] = 0
            mine.checkpoint[request] = state
        mine.conv[request] = conv

    def read(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """The committed state with everything folded in, [HV, dv, dk], and convolution inputs [width - 1, C]; a copy.

        Raises:
            ValueError: in the mode `store_all`, between a verify and its commit: see `treewy.ops.verify_store_all`.
            IndexError: a request that does not exist.
        """
        self._check_committed(request)
        mine = self._layers[layer]
        if isinstance(mine, SnapshotState):
            return mine.snapshots[request, mine.committed[request]].clone(), mine.conv[request].clone()
        where = torch.tensor([request], device=mine.conv.device)
        return ops.folded_state(mine, where, where)[0], mine.conv[request].clone()

    def fold(self, requests: Sequence[int]) -> None:
        """Folds pending rows of these requests into their checkpoints, before anything else reads the blocks."""
        for request in requests:
            self._check(request)
        where = torch.tensor(list(requests), dtype=torch.int64, device=self._all.conv.device)
        for mine in self._layers:
            if isinstance(mine, LayerState):
                ops.fold(mine, where, where, impl=self.impl)

    def reset(self, request: int) -> None:
        """Back to the state before any token, whatever was there, infinities included."""
        self._check(request)
        for tensor in self._all:
            tensor[:, request] = 0

    def copy(self, source: int, target: int) -> None:
        """Forks a request: `target` continues from where `source` is, and neither sees the other any more.

        Raises:
            ValueError: as `read`.
            IndexError: a request that does not exist.
        """
        self._check_committed(source)
        self._check(target)
        for tensor in self._all:
            tensor[:, target] = tensor[:, source]

    def _check(self, request: int) -> None:
        if not 0 <= request < self.num_requests:
            raise IndexError(
                f"request {request} is outside the {self.num_requests} that exist (0 .. {self.num_requests - 1})"
            )

    def _check_committed(self, request: int) -> None:
        self._check(request)
        if isinstance(self._all, SnapshotState) and bool(self._all.window_rows[:, request].any()):
            raise ValueError(
                f"request {request} is between verify and commit, where store_all has no committed state: commit first"
            )
