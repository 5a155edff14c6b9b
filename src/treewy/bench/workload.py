"""What is timed: a setting, inputs of many layers, a subject that runs them, and the float64 check that comes first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from treewy import reference as ref
from treewy.bench.floors import fill_cycle, ring_row_bytes, state_bytes, verify_bytes
from treewy.ops import DeviceWindow, GatedNorm, GDNDims, GDNParams, LayerState
from treewy.state import CommitMode, StateSpec
from treewy.tree import DraftTree, TreeBatch

Timed = Literal["verify", "deferred", "reconstruct", "decode"]

WIDTHS: dict[int, tuple[int, ...]] = {1: (), 4: (1, 1, 1), 15: (2, 2, 2), 40: (3, 3, 3)}
"""Trees by their rows."""
CAPACITY = 12
"""Pending rows that the mode `deferred` may hold."""
PENDING = 8
"""Pending rows of the case `verify`."""
ACCEPTED = 3
"""Rows that a round accepts, where its tree is that deep."""
CONV_WIDTH = 4
TOLERANCE = 0.02
"""Of the outputs' error beside float64: about ten roundings to bf16."""


@dataclass(frozen=True)
class Setting:
    """One point of a table.

    Args:
        case: what a round does with pending rows.
        batch: requests.
        rows: of each window; one of `WIDTHS`.
        heads: key heads and value heads.
        state_dtype: of the checkpoint.
        with_conv: time the convolution too.
        head_dim: dk = dv.
    """

    case: Timed
    batch: int
    rows: int
    heads: tuple[int, int] = (16, 32)
    state_dtype: torch.dtype = torch.bfloat16
    with_conv: bool = False
    head_dim: int = 128

    @cached_property
    def dims(self) -> GDNDims:
        """Of the layer."""
        return GDNDims(*self.heads, self.head_dim, self.head_dim, CONV_WIDTH)

    @cached_property
    def tree(self) -> DraftTree:
        """Of every request."""
        return DraftTree.from_widths(WIDTHS[self.rows])

    @cached_property
    def path(self) -> tuple[int, ...]:
        """Rows that a round accepts: towards the last row, so that the rows of a tree have to move."""
        return self.tree.path(self.rows - 1)[:ACCEPTED]

    @cached_property
    def fills(self) -> list[int]:
        """Pending rows before each verify of a cycle."""
        if self.case in ("deferred", "decode"):
            return fill_cycle(len(self.path), self.tree.depth + 1, CAPACITY)
        return [PENDING if self.case == "verify" else len(self.path)]

    def layers(self, bytes_per_request: int, most: int = 48 << 30) -> int:
        """Layers of a replay: 30, or so many that the L2 holds none, as far as `most` bytes go; at least 2."""
        each = self.batch * bytes_per_request
        cold = -(-(256 << 20) // (self.batch * state_bytes(self.dims, self.state_dtype)))
        return max(2, min(max(30, cold), most // each))


class Weights(NamedTuple):
    """Of a layer, exact in bf16 wherever some kernel takes them as such."""

    conv: Tensor
    """[C, width] bf16."""
    A_log: Tensor
    """[HV] fp32."""
    dt_bias: Tensor
    """[HV] fp32."""
    norm: Tensor
    """[dv] bf16."""


NORM_EPS = 1e-6


@dataclass
class Inputs:
    """Random inputs of all layers, distinct in each, bf16.

    x is what enters the convolution where that is part of the work, and what leaves it otherwise.
    """

    setting: Setting
    layers: int
    device: torch.device
    x: Tensor = field(init=False)
    """[layers, B, T, C]."""
    a: Tensor = field(init=False)
    """[layers, B, T, HV]."""
    b: Tensor = field(init=False)
    z: Tensor = field(init=False)
    """[layers, B, T, HV, dv]."""
    weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        dims, at = self.setting.dims, self.device
        shape = (self.layers, self.setting.batch, self.setting.rows)

        def empty(*rest: int) -> Tensor:
            return torch.empty(*shape, *rest, dtype=torch.bfloat16, device=at)

        self.x, self.z = empty(dims.conv_dim), empty(dims.num_v_heads, dims.head_v_dim)
        self.a, self.b = empty(dims.num_v_heads), empty(dims.num_v_heads)
        heads = torch.arange(dims.num_v_heads, device=at)
        self.weights = Weights(
            conv=(0.4 * torch.randn(dims.conv_dim, dims.conv_width, device=at)).bfloat16(),
            A_log=(heads % 5 / 4 - 1.0).float(),
            dt_bias=(-3 + heads % 7 / 2).float(),
            norm=(0.5 + torch.rand(dims.head_v_dim, device=at)).bfloat16(),
        )
        self.draw()

    def draw(self) -> None:
        """New inputs in the same place."""
        for tensor in (self.x, self.a, self.b, self.z):
            tensor.normal_()

    def split(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of x after the convolution: q, k [B, T, H, dk], v [B, T, HV, dv]."""
        dims = self.setting.dims
        q, k, v = self.x[layer].split([dims.key_dim, dims.key_dim, dims.value_dim], dim=2)
        return (
            q.unflatten(2, (dims.num_k_heads, dims.head_k_dim)),
            k.unflatten(2, (dims.num_k_heads, dims.head_k_dim)),
            v.unflatten(2, (dims.num_v_heads, dims.head_v_dim)),
        )


class Subject:
    """Something that runs windows through layers, ours or a peer's. `begin`, then rounds of `verify` and `commit`.

    Args:
        inputs: of all layers; subjects may hold on to views of them.
    """

    impl: ClassVar[str]
    with_norm = True
    """The gated norm is part of `verify`."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.setting, self.layers, self.device = inputs, inputs.setting, inputs.layers, inputs.device

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        """Why this cannot run here or does not take such a setting; None where it can."""
        return None

    @classmethod
    def bytes_per_request(cls, setting: Setting) -> int:
        """Of one layer, roughly: decides how many layers fit."""
        return state_bytes(setting.dims, setting.state_dtype)

    @property
    def tree(self) -> DraftTree:
        """Of every request."""
        return self.setting.tree

    @property
    def path(self) -> tuple[int, ...]:
        """Rows that a round accepts."""
        return self.tree.path(self.setting.rows - 1)[:ACCEPTED]

    @property
    def rounds(self) -> int:
        """Of a cycle."""
        return 1

    @property
    def mean_pending(self) -> float:
        """Pending rows of a request when its window is verified."""
        return 0.0

    def floor_bytes(self) -> float | None:
        """Bytes that must move per layer in a verify, the mean of a cycle; None where they are not counted."""
        return None

    def load(self, states: Tensor, conv: Tensor) -> None:
        """Committed states [layers, B, HV, dv, dk] and inputs [layers, B, width - 1, C]; nothing pending."""
        raise NotImplementedError

    def begin(self) -> None:
        """Puts the requests where a cycle of the case begins."""

    def arrive(self) -> None:
        """Before a verify of a check: inputs have changed."""

    def verify(self) -> list[Tensor]:
        """All layers: [B, T, HV, dv] each, or any shape of as many elements."""
        raise NotImplementedError

    def commit(self) -> None:
        """Accepts `path` of every request in all layers."""

    def between(self) -> None:
        """After a round, before the next verify."""

    def check(self) -> None:
        """Raises what a kernel refused.

        Raises:
            ValueError: a kernel's own complaint.
        """


class Ours(Subject):
    """The operations of this package; a subclass says whose kernels."""

    kernels: ClassVar[Literal["triton", "cuda"]]

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        dims, batch = setting.dims, setting.batch
        mode: CommitMode = "reconstruct" if setting.case == "reconstruct" else "deferred"
        history = CAPACITY if mode == "deferred" else None
        spec = StateSpec(
            dims, 1, mode, setting.rows, setting.tree.depth, setting.state_dtype, torch.bfloat16, history
        )  # fmt: skip
        tensors = {
            name: torch.zeros(self.layers, batch, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in spec.pieces().items()
        }
        self.all = LayerState(**tensors)
        self.all.checkpoint.normal_(0, 0.05)
        for tensor in (self.all.conv, self.all.window_inputs, self.all.keys, self.all.values):
            tensor.normal_()
        self.all.gates[..., 0].uniform_(-0.3, -0.01)
        self.all.gates[..., 1].uniform_(0.1, 0.9)
        self.each = [LayerState(*(tensor[layer] for tensor in tensors.values())) for layer in range(self.layers)]
        self.window = DeviceWindow.empty(
            batch, setting.rows, num_slots=batch, num_requests=batch, device=self.device, impl=self.kernels
        )
        self.order = torch.randperm(batch)
        self.window.update(TreeBatch.of([setting.tree] * batch), self.order, self.order)
        weights = inputs.weights
        self.params = GDNParams.of(dims, weights.conv.float(), weights.A_log, weights.dt_bias)
        self.queries = [inputs.split(layer)[0].contiguous() for layer in range(self.layers)]
        self.accepted_path = torch.tensor([setting.path] * batch, dtype=torch.int64, device=self.device)
        self.accepted = torch.full((batch,), len(setting.path), dtype=torch.int64, device=self.device)
        phase = torch.randperm(batch) % len(setting.fills)
        fills = torch.tensor(setting.fills, dtype=torch.int32)[phase].to(self.device)
        self.first_fills = fills[None, :, None].expand_as(self.all.pending).contiguous()

    @classmethod
    def bytes_per_request(cls, setting: Setting) -> int:
        """Checkpoint and ring."""
        ring = (CAPACITY + setting.rows) * (ring_row_bytes(setting.dims) + 8 * setting.dims.num_v_heads)
        return state_bytes(setting.dims, setting.state_dtype) + ring

    @property
    def rounds(self) -> int:
        """Rounds from fold to fold."""
        return len(self.setting.fills)

    @property
    def mean_pending(self) -> float:
        """The mean of a cycle."""
        return sum(self.setting.fills) / len(self.setting.fills)

    def floor_bytes(self) -> float:
        """The mean of a cycle, which visits every fill once and folds once."""
        setting = self.setting
        folds = 0 if setting.case == "verify" else setting.batch
        fills = [fill for fill in setting.fills for _ in range(setting.batch)]
        return verify_bytes(
            setting.dims, setting.rows, fills, folds, setting.state_dtype, with_conv=setting.with_conv
        ) / len(setting.fills)  # fmt: skip

    def load(self, states: Tensor, conv: Tensor) -> None:
        """Committed states and convolution inputs; nothing pending."""
        self.all.checkpoint[:, self.order] = states.to(self.all.checkpoint.dtype)
        self.all.conv[:, self.order] = conv.to(self.all.conv.dtype)
        for counter in (self.all.end, self.all.pending, self.all.window_rows):
            counter.zero_()

    def begin(self) -> None:
        """Requests at every fill of the cycle, evenly mixed."""
        self.all.pending.copy_(self.first_fills)
        self._wait_for_commit()

    def arrive(self) -> None:
        """Puts the window's keys and values into the ring, which the convolution would do."""
        self._wait_for_commit()
        if self.setting.with_conv:
            return
        rows = torch.arange(self.setting.rows, device=self.device)
        for layer, state in enumerate(self.each):
            q, k, v = self.inputs.split(layer)
            self.queries[layer].copy_(q)
            requests = self.order.to(self.device)[:, None]
            places = (state.end.long()[requests] + rows) % state.keys.shape[1]
            state.keys[requests, places] = k
            state.values[requests, places] = v
            self.window.places[:, 0] = state.end[requests[:, 0]]
            self.window.places[:, 1] = state.pending[requests[:, 0]].amax(1)

    def _wait_for_commit(self) -> None:
        self.all.window_rows.fill_(self.setting.rows)

    def verify(self) -> list[Tensor]:
        """One launch a layer; Triton's kernels have one more for the convolution."""
        kernels = import_module(f"treewy.ops.{self.kernels}")
        inputs, out = self.inputs, []
        fold_always = self.setting.case == "reconstruct"
        for layer, state in enumerate(self.each):
            run, x = (
                (kernels.verify, inputs.x[layer])
                if self.setting.with_conv
                else (kernels.verify_mixed, self.queries[layer])
            )
            norm = GatedNorm(inputs.z[layer], inputs.weights.norm, NORM_EPS)
            out.append(
                run(
                    state, self.window, x, inputs.a[layer], inputs.b[layer], self.params,
                    fold_always=fold_always, norm=norm,
                )
            )  # fmt: skip
        return out

    def commit(self) -> None:
        """One launch for all layers."""
        from treewy.ops.triton import commit

        commit(self.all, self.window, self.accepted_path, self.accepted)

    def between(self) -> None:
        """After a round whose convolution was not run: the next window waits for its commit."""
        self._wait_for_commit()

    def check(self) -> None:
        """Raises what a kernel refused."""
        self.window.check()


class OursTriton(Ours):
    """Triton kernels."""

    impl = kernels = "triton"


class OursCuda(Ours):
    """CUDA C++ kernels; convolution and commit are Triton's."""

    impl = kernels = "cuda"


# The check


class Oracle:
    """One request in float64: the walk over the tree.

    Args:
        subject: whose tree, path and weights.
        state: [HV, dv, dk].
        conv: [width - 1, C].
    """

    def __init__(self, subject: Subject, state: Tensor, conv: Tensor) -> None:
        self._setting, self._weights = subject.setting, subject.inputs.weights
        self._parents, self._path = subject.tree.parents, subject.path
        self._state, self._conv = state.double(), conv.double()

    def verify(self, x: Tensor, a: Tensor, b: Tensor, z: Tensor | None) -> Tensor:
        """[T, HV, dv] outputs of a window; with z the gated norm follows."""
        dims, weights, parents = self._setting.dims, self._weights, self._parents
        self._x = mixed = x.double()
        if self._setting.with_conv:
            mixed = ref.causal_conv(mixed, self._conv, weights.conv.double(), parents)
            mixed = mixed.bfloat16().double()  # as every kernel hands it on
        q, k, v = mixed.split([dims.key_dim, dims.key_dim, dims.value_dim], dim=1)
        out, self._states = ref.walk(
            self._state,
            ref.l2_normalize(q.unflatten(1, (dims.num_k_heads, -1))) * dims.head_k_dim**-0.5,
            ref.l2_normalize(k.unflatten(1, (dims.num_k_heads, -1))),
            v.unflatten(1, (dims.num_v_heads, -1)),
            ref.log_decay(a.double(), weights.A_log.double(), weights.dt_bias.double()),
            ref.write_strength(b.double()),
            parents,
        )
        return out if z is None else ref.gated_rms_norm(out, z.double(), weights.norm.double(), NORM_EPS)

    def commit(self) -> None:
        """Accepts the path."""
        self._state = self._states[self._path[-1]]
        self._conv = ref.committed_inputs(self._x, self._conv, self._path)


def output_error(subject: Subject, rounds: int) -> float:
    """Largest error of the outputs in `rounds` rounds of the first layer, beside float64; see `Check.error`."""
    setting, inputs = subject.setting, subject.inputs
    dims = setting.dims
    shape = (subject.layers, setting.batch)
    states = 0.1 * torch.randn(*shape, dims.num_v_heads, dims.head_v_dim, dims.head_k_dim, device=subject.device)
    states = states.to(setting.state_dtype)
    conv = torch.randn(*shape, dims.conv_width - 1, dims.conv_dim, device=subject.device).bfloat16()
    subject.load(states, conv)
    oracles = [Oracle(subject, *pair) for pair in zip(states[0], conv[0], strict=True)]
    worst = 0.0
    for _ in range(rounds):
        inputs.draw()
        subject.arrive()
        exact = torch.stack(
            [
                oracle.verify(
                    inputs.x[0, i], inputs.a[0, i], inputs.b[0, i], inputs.z[0, i] if subject.with_norm else None
                )
                for i, oracle in enumerate(oracles)
            ]
        )
        found = subject.verify()[0].double().reshape(exact.shape)
        error = float((found - exact).norm() / exact.norm())
        worst = max(worst, error if error == error else float("inf"))
        subject.commit()
        for oracle in oracles:
            oracle.commit()
    subject.check()
    return worst
