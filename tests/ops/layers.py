"""Random GDN layers, and what they compute by the float64 walk over the tree: the oracle of the tests of operations."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy import ops
from treewy import reference as ref
from treewy.ops import GDNDims, GDNParams, LayerState, Window
from treewy.state import CommitMode, RecurrentState, StateSpec
from treewy.tree import DraftTree, TreeBatch

MODES: tuple[CommitMode, ...] = ("store_all", "reconstruct", "deferred")
SMALL = GDNDims(num_k_heads=1, num_v_heads=2, head_k_dim=4, head_v_dim=3)
# Bias of the decay gate: the log decay of a token is about -exp(bias) for negative bias, and -bias for positive.
DECAYS = {"faint": -12.0, "weak": -5.0, "middle": 0.0, "strong": 20.0}


@dataclass(frozen=True)
class Layer:
    """Weights of one layer in float64, as a checkpoint holds them."""

    dims: GDNDims
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    beta_scale: float

    @staticmethod
    def random(
        dims: GDNDims = SMALL, *, seed: int = 0, decay: str = "middle", bias: bool = True, beta_scale: float = 1.0
    ) -> Layer:
        g = torch.Generator().manual_seed(seed)
        return Layer(
            dims,
            normal(g, dims.conv_dim, dims.conv_width),
            normal(g, dims.conv_dim) if bias else None,
            0.1 * normal(g, dims.num_v_heads),
            DECAYS[decay] + 0.1 * normal(g, dims.num_v_heads),
            beta_scale,
        )

    def params(self, dtype: torch.dtype = torch.float64) -> GDNParams:
        weights = (self.conv_weight, self.A_log, self.dt_bias)
        bias = None if self.conv_bias is None else self.conv_bias.to(dtype)
        return GDNParams.of(self.dims, *(weight.to(dtype) for weight in weights), bias, self.beta_scale)

    def to(self, dtype: torch.dtype) -> Layer:
        """The same layer with every weight rounded to `dtype`, still in float64."""
        weights = (self.conv_weight, self.conv_bias, self.A_log, self.dt_bias)
        return Layer(self.dims, *(None if w is None else w.to(dtype).double() for w in weights), self.beta_scale)

    def rows(
        self, x: Tensor, a: Tensor, b: Tensor, conv: Tensor, parents, rounded: torch.dtype = torch.float64
    ) -> tuple[Tensor, ...]:
        """q, k, v, log alpha and beta of a window; the convolution's output is rounded to `rounded`."""
        dims = self.dims
        mixed = ref.causal_conv(x, conv, self.conv_weight.to(x.dtype), parents, _to(self.conv_bias, x.dtype))
        mixed = mixed.to(rounded).to(x.dtype)
        q, k, v = mixed.split([dims.key_dim, dims.key_dim, dims.value_dim], dim=1)
        return (
            ref.l2_normalize(q.unflatten(1, (dims.num_k_heads, -1))) * dims.head_k_dim**-0.5,
            ref.l2_normalize(k.unflatten(1, (dims.num_k_heads, -1))),
            v.unflatten(1, (dims.num_v_heads, -1)),
            ref.log_decay(a, self.A_log.to(a.dtype), self.dt_bias.to(a.dtype)),
            ref.write_strength(b, self.beta_scale),
        )

    def shard(self, part: int, parts: int) -> tuple[Layer, Tensor]:
        """The layer with one part of its heads, and the channels that it keeps."""
        dims = self.dims
        mine = GDNDims(
            dims.num_k_heads // parts, dims.num_v_heads // parts, dims.head_k_dim, dims.head_v_dim, dims.conv_width
        )
        pieces = torch.arange(dims.conv_dim).split([dims.key_dim, dims.key_dim, dims.value_dim])
        channels = torch.cat([piece.chunk(parts)[part] for piece in pieces])
        return Layer(
            mine,
            self.conv_weight[channels],
            None if self.conv_bias is None else self.conv_bias[channels],
            self.A_log.chunk(parts)[part],
            self.dt_bias.chunk(parts)[part],
            self.beta_scale,
        ), channels


class Oracle:
    """One request of one layer in float64: state[row] = step(state[parent[row]]), nothing else."""

    def __init__(self, layer: Layer) -> None:
        dims = layer.dims
        self.layer = layer
        self.state = torch.zeros(dims.num_v_heads, dims.head_v_dim, dims.head_k_dim, dtype=torch.float64)
        self.conv = torch.zeros(dims.conv_width - 1, dims.conv_dim, dtype=torch.float64)

    def verify(self, x: Tensor, a: Tensor, b: Tensor, parents) -> Tensor:
        """Outputs [T, HV, dv] of a window."""
        self._x = x.double()
        out, self._states = ref.walk(
            self.state, *self.layer.rows(self._x, a.double(), b.double(), self.conv, parents), parents
        )
        return out

    def commit(self, path) -> None:
        self.state = self._states[path[-1]]
        self.conv = ref.committed_inputs(self._x, self.conv, path)


class Plain(Oracle):
    """The same walk in the dtypes of an engine: what the errors of the operations are measured against.

    Inputs and the convolution's output are in `inputs`, arithmetic in fp32, the state is rounded to `state` after every
    token.
    """

    def __init__(self, layer: Layer, state: torch.dtype, inputs: torch.dtype) -> None:
        super().__init__(layer)
        self.state, self.conv = self.state.float(), self.conv.float()
        self._dtypes = state, inputs

    def verify(self, x: Tensor, a: Tensor, b: Tensor, parents) -> Tensor:
        dtype, inputs = self._dtypes
        self._x = x.float()
        q, k, v, log_alpha, beta = self.layer.rows(self._x, a.float(), b.float(), self.conv, parents, inputs)
        hv = v.shape[1]
        q, k = ref.expand_heads(q, hv), ref.expand_heads(k, hv)
        out, states = [], []
        for row, parent in enumerate(parents):
            S = ref.step(self.state if parent < 0 else states[parent], k[row], v[row], log_alpha[row], beta[row])
            out.append(torch.einsum("hvk,hk->hv", S, q[row]).to(inputs))
            states.append(S.to(dtype).float())
        self._states = torch.stack(states)
        return torch.stack(out)


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def random_inputs(dims: GDNDims, batch: int, rows: int, g: torch.Generator, dtype=torch.float64) -> tuple[Tensor, ...]:
    """x, a, b of a round."""
    hv = dims.num_v_heads
    return tuple(normal(g, batch, rows, size).to(dtype) for size in (dims.conv_dim, hv, hv))


def new_state(
    dims: GDNDims,
    mode: CommitMode,
    *,
    requests: int = 1,
    layers: int = 1,
    rows: int = 8,
    depth: int | None = None,
    history: int | None = None,
    dtype: torch.dtype = torch.float64,
    inputs: torch.dtype | None = None,
) -> RecurrentState:
    depth = rows - 1 if depth is None else depth
    return RecurrentState(
        StateSpec(dims, layers, mode, rows, depth, dtype, inputs or dtype, history if mode == "deferred" else None),
        requests,
    )


class Pool:
    """One layer whose requests live in scattered blocks of a larger pool, as in an engine with paged memory.

    Offers what the rounds of these tests need of a `RecurrentState`. Blocks of nobody and everything that is not yet
    written hold NaN, so that reading them shows.
    """

    def __init__(
        self,
        dims: GDNDims,
        *,
        slots: list[int],
        fold_always: bool = False,
        num_slots: int = 0,
        rows: int = 8,
        history: int = 16,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.slots, self.fold_always = torch.tensor(slots), fold_always
        spec = StateSpec(dims, 1, "deferred", rows, min(rows, history) - 1, dtype, dtype, history)
        blocks = {"checkpoint", "conv"}
        self.num_slots = num_slots or max(slots) + 2
        self.layer = LayerState(
            **{
                name: torch.full((self.num_slots if name in blocks else len(slots), *shape), float("nan")).to(kind)
                if kind.is_floating_point
                else torch.zeros(len(slots), *shape, dtype=kind)
                for name, (shape, kind) in spec.pieces().items()
            }
        )
        self.layer.checkpoint[self.slots] = 0
        self.layer.conv[self.slots] = 0

    def plan(self, trees: TreeBatch, requests: Tensor) -> Window:
        slots = torch.where(requests < 0, -1, self.slots[requests])
        return ops.plan(trees, slots, requests, num_slots=self.num_slots, num_requests=len(self.slots))

    def verify(self, layer: int, window: Window, x: Tensor, a: Tensor, b: Tensor, params: GDNParams) -> Tensor:
        return ops.verify(self.layer, window, x, a, b, params, fold_always=self.fold_always)

    def commit(self, window: Window, path: Tensor, accepted: Tensor) -> None:
        ops.commit(self.layer, window, path, accepted)

    def read(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        slot = self.slots[request : request + 1]
        return ops.folded_state(self.layer, slot, torch.tensor([request]))[0], self.layer.conv[slot[0]].clone()

    def free_blocks_untouched(self) -> bool:
        free = [slot for slot in range(self.num_slots) if slot not in self.slots.tolist()]
        return bool(self.layer.checkpoint[free].isnan().all() and self.layer.conv[free].isnan().all())


def batch_of(trees, rows: int | None = None, dims: GDNDims = SMALL) -> TreeBatch:
    return TreeBatch.of(trees, rows=rows, conv_width=dims.conv_width)


def padded_paths(paths) -> tuple[Tensor, Tensor]:
    """[B, P] rows, what stands past a path's end is no row at all, and [B] lengths."""
    lengths = [len(path) for path in paths]
    rows = [[*path, *[-9] * (max(lengths) - len(path))] for path in paths]
    return torch.tensor(rows), torch.tensor(lengths)


def random_path(tree: DraftTree, rng: random.Random) -> tuple[int, ...]:
    return tree.path(rng.randrange(len(tree)))


def contents(state) -> dict[str, Tensor]:
    """A copy of every tensor of a state."""
    tensors = state.tensors if isinstance(state, RecurrentState) else state._asdict()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def changed(state, before: dict[str, Tensor]) -> set[str]:
    """Names of the tensors of a state that differ by any bit from a copy that `contents` made."""
    return {name for name, tensor in contents(state).items() if not same_bits(tensor, before[name])}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that a NaN equals itself."""
    one, other = (torch.cat([tensor.flatten()]).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry, or to 0.01 where all are smaller and have cancelled."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=0.01))


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
