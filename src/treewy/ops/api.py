"""What the operations are given: dimensions and parameters of a layer, its state, and the plan of a round.

Sizes: B requests of a round, T rows of a window, R running requests, L rows of history, C = conv_dim, H key heads, HV
value heads. A request has two addresses: its **slot** in the engine's paged pool (checkpoint and convolution inputs,
one block) and its **index** among the running requests (window and history rows, which only running requests need).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from treewy.tree import TreeBatch

KEY_EPS = 1e-6
"""Added to the squared norm of keys and queries: GDN models have no other, and folding needs it without a layer."""


@dataclass(frozen=True)
class GDNDims:
    """Dimensions of a GDN layer.

    Raises:
        ValueError: a size below 1, or value heads that are no multiple of the key heads.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads = {self.num_v_heads} is no multiple of num_k_heads = {self.num_k_heads}; every key head "
                "serves the same number of value heads"
            )
        if self.conv_width < 2:
            raise ValueError(f"conv_width is {self.conv_width}; a causal convolution here has width 2 or more")

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def key_dim(self) -> int:
        """Channels of all keys."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Channels of all values."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim


class GDNParams(NamedTuple):
    """Parameters of a GDN layer between its input and output projections, in the form the operations read."""

    dims: GDNDims
    taps: Tensor
    """[width, C] fp32, the tap of the row itself first, then of its nearest ancestor, …"""
    conv_bias: Tensor | None
    """[C] fp32."""
    neg_A: Tensor
    """[HV] fp32, -exp(A_log)."""
    dt_bias: Tensor
    """[HV] fp32."""
    beta_scale: float
    """1, or 2 for layers that allow negative eigenvalues."""

    @property
    def eps(self) -> float:
        """`KEY_EPS`."""
        return KEY_EPS

    @staticmethod
    def of(
        dims: GDNDims,
        conv_weight: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        conv_bias: Tensor | None = None,
        beta_scale: float = 1.0,
    ) -> GDNParams:
        """From a checkpoint's tensors.

        Args:
            dims: dimensions of the layer.
            conv_weight: [C, width] or [C, 1, width] depthwise weight, the last column meets the row itself.
            A_log: [HV].
            dt_bias: [HV].
            conv_bias: [C] or None.
            beta_scale: beta = beta_scale * sigmoid(b).

        Raises:
            ValueError: a tensor whose shape does not fit `dims`.
        """
        weight = conv_weight.squeeze(1) if conv_weight.dim() == 3 else conv_weight
        _expect("conv_weight", weight, (dims.conv_dim, dims.conv_width))
        _expect("A_log", A_log, (dims.num_v_heads,))
        _expect("dt_bias", dt_bias, (dims.num_v_heads,))
        if conv_bias is not None:
            _expect("conv_bias", conv_bias, (dims.conv_dim,))
        wide = torch.promote_types(torch.float32, A_log.dtype)
        return GDNParams(
            dims,
            weight.detach().to(wide).flip(1).T.contiguous(),
            None if conv_bias is None else conv_bias.detach().to(wide).contiguous(),
            -A_log.detach().to(wide).exp().contiguous(),
            dt_bias.detach().to(wide).contiguous(),
            beta_scale,
        )


class LayerState(NamedTuple):
    """State of one layer in the modes `reconstruct` and `deferred`; changed in place.

    Rows of the window and committed rows that the checkpoint does not have yet share one ring a request. The ring holds
    *inputs* of the recurrence, key, value and gates, and no results of it: pseudo-values are solved anew whenever the
    checkpoint is read, in fp32, for the pending rows (a chain, ancestors of everything after them) and the window's
    rows together. So no rounded pseudo-value ever exists, a row costs half of what an fp32 pseudo-value would, and a
    chain commits without moving a row.

    The window's row r is at (end + r) % ring. The `pending` last committed rows are before it, in order.
    """

    checkpoint: Tensor
    """[slots, HV, dv, dk]."""
    conv: Tensor
    """[slots, width - 1, C] last committed convolution inputs, oldest first."""
    window_inputs: Tensor
    """[R, max_rows, C] convolution inputs of the window."""
    window_rows: Tensor
    """[R] int32, rows of the window that waits for its commit; 0 where none does."""
    keys: Tensor
    """[R, ring, H, dk], as the convolution gave them, before normalisation; ring = capacity + max_rows."""
    values: Tensor
    """[R, ring, HV, dv], as the convolution gave them."""
    gates: Tensor
    """[R, ring, HV, 2] fp32, log decay of the row alone (finite) and beta."""
    end: Tensor
    """[R] int32 in 0 .. ring - 1; moved by `commit` alone."""
    pending: Tensor
    """[R, HV] int32, committed rows that this head's checkpoint does not have; a fold sets it to 0, head by head."""

    @property
    def capacity(self) -> int:
        """L: committed rows that may be pending when a window is verified without a fold."""
        return self.keys.shape[-3] - self.window_inputs.shape[-2]


class GatedNorm(NamedTuple):
    """The gated RMS norm that follows the recurrence: weight * o / sqrt(mean o^2 + eps) * silu(z)."""

    z: Tensor
    """[B, T, HV, dv] gate."""
    weight: Tensor
    """[dv]."""
    eps: float = 1e-6


class SnapshotState(NamedTuple):
    """State of one layer in the mode `store_all`: a state for every row of the window; changed in place."""

    snapshots: Tensor
    """[R, max_rows, HV, dv, dk]."""
    conv: Tensor
    """[R, width - 1, C]."""
    window_inputs: Tensor
    """[R, max_rows, C]."""
    window_rows: Tensor
    """[R] int32, rows of the window that waits for its commit; 0 where none does."""
    committed: Tensor
    """[R] int64, the row whose snapshot is the committed state."""


class Lineage(NamedTuple):
    """Who descends from whom, among P pending rows and T rows of a window: N = P + T, pending rows first."""

    path_sums: Tensor
    """[B, 1 + N, N] fp64, the matrix that sums log decays along the path to each row; row 0 is the state's, all 0."""
    unrelated: Tensor
    """[B, 1, N, 1 + N] bool, whom each row does not descend from: the state (never so), each row."""

    @staticmethod
    def of(related: Tensor, pending: int) -> Lineage:
        """`pending` rows in a chain, and below the last of them trees with `related` [B, T, T] bool."""
        batch, rows = related.shape[:2]
        joint = related.new_ones(batch, pending + rows, pending + rows).tril_()
        joint[:, pending:, pending:] = related
        return Lineage(F.pad(joint.double(), (0, 0, 1, 0)), F.pad(~joint, (1, 0))[:, None])


class Window(NamedTuple):
    """Plan of one round, shared by all layers: which requests, which rows, who is whose ancestor.

    Made by `plan`. Requests that are padding (slot < 0) are left out of every tensor here but `active`.
    """

    trees: TreeBatch
    slots: Tensor
    """[B] int64."""
    requests: Tensor
    """[B] int64."""
    batch: int
    """Requests of the round, padding included."""
    active: Tensor | None
    """[B] int64, places of the requests in the batch; None where no request is padding."""
    padding_rows: Tensor | None
    """[B, T] bool, rows past a request's tree; None where there are none."""
    conv_rows: Tensor
    """[B * T * width] int64, rows of the [B * (width - 1 + T), C] convolution inputs that each row meets."""
    related: Tensor
    """[B, T, T] bool, entry [b, t, i]: row i is an ancestor of row t, or t itself."""
    longest_path: list[int]
    """[B] rows of the longest path of each tree, root included: the most that one round can commit."""
    lineages: dict[int, Lineage]
    """What `lineage` has made: layers mostly ask for the same."""

    def lineage(self, pending: int) -> Lineage:
        """The trees with `pending` rows above them."""
        if pending not in self.lineages:
            self.lineages[pending] = Lineage.of(self.related, pending)
        return self.lineages[pending]


def plan(trees: TreeBatch, slots: Tensor, requests: Tensor, *, num_slots: int, num_requests: int) -> Window:
    """The plan of a round for the torch implementation; arguments and errors as `treewy.ops.plan`."""
    batch, rows = trees.parents.shape
    if slots.shape != (batch,) or requests.shape != (batch,):
        raise ValueError(
            f"{batch} trees came with slots {tuple(slots.shape)} and requests {tuple(requests.shape)}; "
            f"both are [{batch}]"
        )
    slots, requests = slots.long(), requests.long()
    slot_list = slots.tolist()
    active = None
    if min(slot_list) < 0:
        places = [place for place, slot in enumerate(slot_list) if slot >= 0]
        active = torch.tensor(places, dtype=torch.int64, device=slots.device)
        slots, requests = slots[active], requests[active]
        trees = TreeBatch(*(field[active] if isinstance(field, Tensor) else field for field in trees))  # type: ignore[arg-type]
    _check_addresses("slot", slots.tolist(), num_slots)
    _check_addresses("running request", requests.tolist(), num_requests)
    device = trees.parents.device
    count = slots.numel()
    row = torch.arange(rows, device=device)
    kept = trees.conv_ancestors.shape[2]
    first_input = kept + (kept + rows) * torch.arange(count, device=device)[:, None, None]
    met = torch.cat([row[:, None].expand(count, rows, 1), trees.conv_ancestors], dim=2) + first_input
    has_padding = min(trees.rows.tolist(), default=rows) < rows
    return Window(
        trees=trees,
        slots=slots,
        requests=requests,
        batch=batch,
        active=active,
        padding_rows=row >= trees.rows[:, None] if has_padding else None,
        conv_rows=met.flatten(),
        related=trees.is_ancestor(),
        longest_path=(trees.depths.amax(1) + 1).tolist(),
        lineages={},
    )


def check_paths(batch: int, path: Tensor, accepted: Tensor) -> None:
    """Refuses paths that are not [batch, P] and [batch] integers.

    Raises:
        ValueError: another shape, or a dtype that is no integer.
    """
    if path.dim() != 2 or path.shape[0] != batch or accepted.shape != (batch,):
        raise ValueError(
            f"path {tuple(path.shape)} and accepted {tuple(accepted.shape)} do not fit a round of {batch} requests: "
            f"[{batch}, P] and [{batch}]"
        )
    if path.is_floating_point() or accepted.is_floating_point():
        raise ValueError(f"path is {path.dtype} and accepted {accepted.dtype}; both are integers")


def _check_addresses(what: str, addresses: list[int], size: int) -> None:
    if not addresses:
        return
    if min(addresses) < 0 or max(addresses) >= size:
        bad = next(address for address in addresses if not 0 <= address < size)
        raise IndexError(f"{what} {bad} is outside the {size} that exist (0 .. {size - 1})")
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        raise ValueError(f"{what} {twice} appears twice in one round; a state can be written once a round")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; these dimensions need {shape}")
