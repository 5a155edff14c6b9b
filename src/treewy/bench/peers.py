"""Kernels of other packages as subjects: called as their engines call them, imported where they are installed.

| impl | a round |
|---|---|
| vllm store_all cuda | `torch.ops._C.fused_gdn_decode_post_conv_mtp`: a state a row, gated norm inside; the yardstick |
| vllm store_all triton | `fused_sigmoid_gating_delta_rule_update`, then the gated norm; a chain, however many rows |
| vllm decode | `fused_recurrent_gated_delta_rule_packed_decode`, then the gated norm |
| sglang store_all | `fused_sigmoid_gating_delta_rule_update` with a state a row, chain or tree; commit copies one |
| sglang replay | `gdn_replayssm_spec_decode`; 16-bit states fold in every commit, fp32 when the ring is full |
| sglang decode | `fused_recurrent_gated_delta_rule_packed_decode` |
| flashinfer ucache | `gated_delta_rule_mtp_ucache`: 8 rows in its ring, nothing folds |
| flashinfer ucache flush | `gated_delta_rule_mtp_ucache_flush`: mixed fill, a fold where the ring is full |

Slot 0 of a pool is nobody's: vLLM's kernels take it for padding.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from treewy.bench.floors import fill_cycle, ring_row_bytes, state_bytes, store_all_bytes
from treewy.bench.workload import NORM_EPS, PENDING, Inputs, Setting, Subject
from treewy.tree import DraftTree


@lru_cache
def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@lru_cache
def _why_not(module: str, name: str) -> str | None:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    try:
        _function(module, name)
    except Exception as error:  # another package's import may raise anything
        return f"{package} is installed, but {module}.{name} cannot be imported: {type(error).__name__}: {error}"
    return None


class Peer(Subject):
    """A kernel of another package."""

    needs: ClassVar[tuple[str, str]]
    """Module and name of its entry point."""
    rows: ClassVar[tuple[int, ...]] = (4,)
    state_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float32)
    convolves: ClassVar[bool] = False
    """It can be timed with its convolution."""

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        """Why not: the setting, or the package."""
        if setting.rows not in cls.rows:
            return f"it is timed at {' and '.join(map(str, cls.rows))} rows, not at {setting.rows}"
        if setting.state_dtype not in cls.state_dtypes:
            return f"it takes no {setting.state_dtype} state"
        if setting.with_conv and not cls.convolves:
            return "it is timed without a convolution"
        return cls.not_installed()

    @classmethod
    def not_installed(cls) -> str | None:
        """Why the package cannot be used; None where it can."""
        return _why_not(*cls.needs)

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        self.tokens = setting.batch * setting.rows
        self.mixed: list[Tensor] = [x.flatten(0, 1) for x in inputs.x]
        self.a, self.b = ([t.flatten(0, 1) for t in both] for both in (inputs.a, inputs.b))
        self.z = [t.flatten(0, 1) for t in inputs.z]
        self.starts = self.int32(range(0, self.tokens + 1, setting.rows))
        self.order = torch.randperm(setting.batch)
        """Slot of each request, from 0."""
        self.layer_numbers = range(self.layers)

    def int32(self, values: Any) -> Tensor:
        """A tensor of indices on the device."""
        made: Tensor = torch.as_tensor(list(values), dtype=torch.int32).to(self.device)
        return made

    def pool(self, slots: int) -> Tensor:
        """[layers, slots, HV, dv, dk] states, not filled."""
        dims = self.setting.dims
        shape = (self.layers, slots, dims.num_v_heads, dims.head_v_dim, dims.head_k_dim)
        return torch.empty(shape, dtype=self.setting.state_dtype, device=self.device)

    def heads(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the convolution's outputs: q, k [1, B T, H, dk], v [1, B T, HV, dv]."""
        q, k, v = (t.flatten(0, 1)[None] for t in self.inputs.split(layer))
        return q, k, v

    def mixed_of(self, layer: int) -> Tensor:
        """[B T, C] outputs of the convolution."""
        return self.mixed[layer]


# vLLM

_VLLM_OPS = "vllm.third_party.flash_linear_attention.ops"


@lru_cache
def _vllm_library() -> str | None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "the package vllm is not installed"
    library = Path(spec.submodule_search_locations[0]) / "_C_stable_libtorch.abi3.so"
    try:
        torch.ops.load_library(str(library))
        torch.ops._C.fused_gdn_decode_post_conv_mtp  # noqa: B018
    except Exception as error:
        return f"vllm is installed, but its op cannot be loaded: {type(error).__name__}: {error}"
    return None


class _Vllm(Peer):
    convolves = True
    store_all = True

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        dims, batch, rows = setting.dims, setting.batch, setting.rows
        columns = rows if self.store_all else 1
        slots = 1 + torch.randperm(batch * columns).reshape(batch, columns)
        self.state_indices = slots.to(device=self.device, dtype=torch.int32)
        self.states = self.pool(1 + batch * columns).normal_(0, 0.05)
        self.conv = torch.empty(
            self.layers, 1 + batch * columns, dims.conv_width - 2 + rows, dims.conv_dim, dtype=torch.bfloat16,
            device=self.device,
        ).normal_()  # fmt: skip
        self.num_accepted = self.int32([len(setting.path)] * batch)
        self.dt_bias = inputs.weights.dt_bias.bfloat16()
        self.z_out = [torch.empty_like(z) for z in self.z]

    @classmethod
    def bytes_per_request(cls, setting: Setting) -> int:
        """A state a row."""
        return (setting.rows if cls.store_all else 1) * state_bytes(setting.dims, setting.state_dtype)

    def floor_bytes(self) -> float:
        """A state read and one a row written."""
        s = self.setting
        return store_all_bytes(
            s.dims, s.rows, s.batch, s.state_dtype, with_norm=self.with_norm, with_conv=s.with_conv
        )  # fmt: skip

    def load(self, states: Tensor, conv: Tensor) -> None:
        """Into the first slot of each request."""
        first = self.state_indices[:, 0].long()
        self.states[:, first] = states
        self.conv[:, first, : conv.shape[2]] = conv
        self.num_accepted.fill_(1)

    def commit(self) -> None:
        """The next verify starts from the accepted row's slot."""
        self.num_accepted.fill_(len(self.path))

    def mixed_of(self, layer: int) -> Tensor:
        """Through vLLM's convolution where that is part of the work."""
        if not self.setting.with_conv:
            return super().mixed_of(layer)
        update = _function("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_update")
        extra: dict[str, Any] = {}
        if self.store_all:
            extra = {
                "num_accepted_tokens": self.num_accepted,
                "query_start_loc": self.starts,
                "max_query_len": self.setting.rows,
            }
        mixed: Tensor = update(
            self.mixed[layer], self.conv[layer].transpose(-1, -2), self.inputs.weights.conv, None, "silu",
            conv_state_indices=self.state_indices[:, 0], validate_data=False,
            out=torch.empty_like(self.mixed[layer]), **extra,
        )  # fmt: skip
        return mixed

    def normed(self, layer: int, out: Tensor) -> Tensor:
        """The gated norm as a launch of its own."""
        norm = _function(f"{_VLLM_OPS}.layernorm_guard", "layer_norm_fwd")
        flat = out.reshape(-1, out.shape[-1])
        norm(
            flat, self.inputs.weights.norm, None, NORM_EPS, z=self.z[layer].reshape(flat.shape), out=flat,
            group_size=flat.shape[-1], norm_before_gate=True, is_rms_norm=True, activation="silu",
        )  # fmt: skip
        return out


class VllmStoreAllCuda(_Vllm):
    """The fused CUDA op."""

    impl = "vllm store_all cuda"

    @classmethod
    def not_installed(cls) -> str | None:
        """Why the op cannot be loaded."""
        return _vllm_library()

    def verify(self) -> list[Tensor]:
        """One launch a layer."""
        out = []
        for layer in self.layer_numbers:
            out.append(self.z_out[layer])
            torch.ops._C.fused_gdn_decode_post_conv_mtp(
                self.mixed_of(layer), self.a[layer], self.b[layer], self.inputs.weights.A_log, self.dt_bias,
                self.state_indices, self.starts, self.num_accepted, self.states[layer], self.z[layer],
                self.inputs.weights.norm, out[-1], self.setting.head_dim**-0.5, NORM_EPS, "silu",
            )  # fmt: skip
        return out


class VllmStoreAllTriton(_Vllm):
    """The Triton kernel, which walks rows as a chain: for a tree it stands for what storing all rows costs."""

    impl = "vllm store_all triton"
    needs = (f"{_VLLM_OPS}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update")
    rows = (4, 15, 40)

    @property
    def tree(self) -> DraftTree:
        """A chain, whatever the setting's."""
        return DraftTree.chain(self.setting.rows - 1)

    def verify(self) -> list[Tensor]:
        """Two launches a layer, and copies of q, k and v that the function makes."""
        update = _function(*self.needs)
        dims, out = self.setting.dims, []
        for layer in self.layer_numbers:
            parts = self.mixed_of(layer).split([dims.key_dim, dims.key_dim, dims.value_dim], dim=1)
            q, k = (part.unflatten(1, (dims.num_k_heads, dims.head_k_dim))[None] for part in parts[:2])
            v = parts[2].unflatten(1, (dims.num_v_heads, dims.head_v_dim))[None]
            o, _ = update(
                A_log=self.inputs.weights.A_log, a=self.a[layer], b=self.b[layer], dt_bias=self.dt_bias, q=q, k=k, v=v,
                initial_state=self.states[layer], inplace_final_state=True, cu_seqlens=self.starts,
                ssm_state_indices=self.state_indices, num_accepted_tokens=self.num_accepted,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            out.append(self.normed(layer, o))
        return out


class VllmDecode(_Vllm):
    """Plain decoding, one row."""

    impl = "vllm decode"
    needs = (f"{_VLLM_OPS}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode")
    rows = (1,)
    store_all = False

    def commit(self) -> None:
        """Nothing: the state is written in place."""

    def verify(self) -> list[Tensor]:
        """Two launches a layer."""
        decode = _function(*self.needs)
        dims, out = self.setting.dims, []
        for layer in self.layer_numbers:
            o = torch.empty(self.tokens, 1, dims.num_v_heads, dims.head_v_dim, dtype=torch.bfloat16, device=self.device)
            decode(
                mixed_qkv=self.mixed_of(layer), a=self.a[layer], b=self.b[layer], A_log=self.inputs.weights.A_log,
                dt_bias=self.dt_bias, scale=self.setting.head_dim**-0.5, initial_state=self.states[layer], out=o,
                ssm_state_indices=self.state_indices[:, 0], use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            out.append(self.normed(layer, o))
        return out


# SGLang

_SGLANG = "sglang.kernels.ops"


class _Sglang(Peer):
    with_norm = False

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        batch = self.setting.batch
        self.states = self.pool(1 + batch).normal_(0, 0.05)
        self.slots = self.int32(1 + self.order)

    def load(self, states: Tensor, conv: Tensor) -> None:
        """Into the slot of each request."""
        self.states[:, self.slots.long()] = states


class SglangStoreAll(_Sglang):
    """A state a row in a scratch buffer; a commit copies the accepted row's to the pool, in all layers."""

    impl = "sglang store_all"
    needs = (f"{_SGLANG}.attention.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update")
    rows = (4, 15, 40)

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        dims, batch, rows = setting.dims, setting.batch, setting.rows
        self.scratch = torch.empty(
            self.layers, batch, rows, dims.num_v_heads, dims.head_v_dim, dims.head_k_dim, dtype=setting.state_dtype,
            device=self.device,
        )  # fmt: skip
        self.scratch_rows = self.int32(range(batch))
        self.parents = None
        if setting.tree.depth < rows - 1:
            parents = [max(parent, 0) for parent in setting.tree.parents]
            self.parents = torch.tensor([parents] * batch, dtype=torch.int32, device=self.device)
        self.last = self.int32([setting.path[-1]] * batch)

    @classmethod
    def bytes_per_request(cls, setting: Setting) -> int:
        """A state, and one a row."""
        return (1 + setting.rows) * state_bytes(setting.dims, setting.state_dtype)

    def floor_bytes(self) -> float:
        """A state read and one a row written."""
        s = self.setting
        return store_all_bytes(s.dims, s.rows, s.batch, s.state_dtype, with_norm=False)

    def verify(self) -> list[Tensor]:
        """One launch a layer."""
        update, out = _function(*self.needs), []
        for layer in self.layer_numbers:
            q, k, v = self.heads(layer)
            out.append(
                update(
                    A_log=self.inputs.weights.A_log, dt_bias=self.inputs.weights.dt_bias, q=q, k=k, v=v,
                    a=self.a[layer], b=self.b[layer], initial_state_source=self.states[layer],
                    initial_state_indices=self.slots, cu_seqlens=self.starts, use_qk_l2norm_in_kernel=True,
                    softplus_beta=1.0, softplus_threshold=20.0, is_kda=False, disable_state_update=True,
                    intermediate_states_buffer=self.scratch[layer], intermediate_state_indices=self.scratch_rows,
                    cache_steps=self.setting.rows, retrieve_parent_token=self.parents,
                )
            )  # fmt: skip
        return out

    def commit(self) -> None:
        """One launch for all layers."""
        scatter = _function(f"{_SGLANG}.mamba.mamba_state_scatter_triton", "fused_mamba_state_scatter_with_mask")
        scatter(self.states, self.scratch, self.slots, self.last, self.scratch_rows)


class SglangReplay(_Sglang):
    """A ring of results in two bf16 parts; see the table for its folds."""

    impl = "sglang replay"
    needs = (f"{_SGLANG}.attention.linear.gdn_replayssm_spec_decode", "gdn_replayssm_spec_decode")
    RING = 16

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        dims, batch = setting.dims, setting.batch

        def ring(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(self.layers, 1 + batch, *shape, dtype=dtype, device=self.device)

        self.keys, self.low_keys = (ring(dims.num_k_heads, self.RING, dims.head_k_dim) for _ in range(2))
        self.results, self.low_results = (ring(dims.num_v_heads, self.RING, dims.head_v_dim) for _ in range(2))
        self.decays = ring(dims.num_v_heads, self.RING, dtype=torch.float32)
        for tensor in (self.keys, self.results):
            tensor.normal_(0, 0.1)
        self.decays.uniform_(-0.3, -0.01)
        self.filled, self.base = self.int32([0] * (1 + batch)), self.int32([0] * (1 + batch))
        self.flush = torch.zeros(1 + batch, dtype=torch.int8, device=self.device)
        self.accepted = self.int32([len(setting.path)] * batch)
        self.every = setting.state_dtype != torch.float32
        self.phases = [0]  # after a commit that folds
        if not self.every:
            self.phases += fill_cycle(len(setting.path), 2 * setting.rows, self.RING)[:-1]
        order = torch.randperm(batch).tolist()
        self.first_fills = self.int32([0, *(self.phases[i % len(self.phases)] for i in order)])

    @property
    def rounds(self) -> int:
        """Rounds from fold to fold."""
        return len(self.phases)

    @property
    def mean_pending(self) -> float:
        """The mean of a cycle."""
        return sum(self.phases) / len(self.phases)

    def load(self, states: Tensor, conv: Tensor) -> None:
        """With an empty ring."""
        super().load(states, conv)
        for counter in (self.filled, self.base, self.flush):
            counter.zero_()

    def begin(self) -> None:
        """Requests at every fill of the cycle."""
        self.filled.copy_(self.first_fills)
        self.flush.zero_()

    def verify(self) -> list[Tensor]:
        """One launch a layer."""
        decode, out = _function(*self.needs), []
        for layer in self.layer_numbers:
            q, k, v = (t[0] for t in self.heads(layer))
            o = torch.empty_like(self.z[layer])
            decode(
                q=q, k=k, v=v, a=self.a[layer], b=self.b[layer], A_log=self.inputs.weights.A_log,
                dt_bias=self.inputs.weights.dt_bias, checkpoint_state=self.states[layer], d_cache=self.results[layer],
                k_cache=self.keys[layer], g_cache=self.decays[layer], rawv_cache=self.low_results[layer],
                rawk_cache=self.low_keys[layer], beta_cache=None, out=o, query_start_loc=self.starts,
                ssm_state_indices=self.slots, replay_indices=self.slots, write_pos=self.filled, cache_base=self.base,
                is_flush=self.flush, max_cache_len=self.RING, max_spec_len=self.setting.rows,
                scale=self.setting.head_dim**-0.5, use_qk_l2norm_in_kernel=True, null_block_id=-1,
                launch_mode="verify",
            )  # fmt: skip
            out.append(o)
        return out

    def commit(self) -> None:
        """Cursors, then the folds of all layers."""
        module = self.needs[0]
        shared = {
            "write_pos": self.filled,
            "cache_base": self.base,
            "is_flush": self.flush,
            "replay_indices": self.slots,
            "null_block_id": -1,
        }
        _function(module, "commit_gdn_replayssm_spec")(
            num_accepted=self.accepted, max_cache_len=self.RING, max_spec_len=self.setting.rows,
            fold_every_commit=self.every, **shared,
        )  # fmt: skip
        _function(module, "commit_gdn_replayssm_circular")(
            checkpoint_state=self.states, d_cache=self.results, k_cache=self.keys, g_cache=self.decays,
            d_residual_cache=self.low_results, k_residual_cache=self.low_keys, state_batch_indices=self.slots,
            accept_lens=self.accepted, **shared,
        )  # fmt: skip


class SglangDecode(_Sglang):
    """Plain decoding, one row."""

    impl = "sglang decode"
    needs = (f"{_SGLANG}.attention.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode")
    rows = (1,)

    def verify(self) -> list[Tensor]:
        """One launch a layer."""
        decode, out = _function(*self.needs), []
        for layer in self.layer_numbers:
            o = torch.empty_like(self.z[layer])[:, None]
            decode(
                mixed_qkv=self.mixed[layer], a=self.a[layer], b=self.b[layer], A_log=self.inputs.weights.A_log,
                dt_bias=self.inputs.weights.dt_bias, scale=self.setting.head_dim**-0.5,
                initial_state=self.states[layer], out=o, ssm_state_indices=self.slots, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            out.append(o)
        return out


# FlashInfer

_FLASHINFER = "flashinfer.gdn_kernels"


class FlashinferUcache(Peer):
    """Verify from a ring of results in bf16; nothing folds, and the ring's cursor stays where it is."""

    impl = "flashinfer ucache"
    needs = (f"{_FLASHINFER}.gdn_decode_bf16_wy_ucache", "gated_delta_rule_mtp_ucache")
    state_dtypes = (torch.bfloat16,)
    with_norm = False
    SLOTS: ClassVar[int] = 16
    """Places of the ring."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        dims, batch = setting.dims, setting.batch

        def ring(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(self.layers, batch, *shape, dtype=dtype, device=self.device)

        self.states = self.pool(batch).normal_(0, 0.05)
        self.keys = ring(dims.num_k_heads, self.SLOTS, dims.head_k_dim)
        self.results = ring(dims.num_v_heads, self.SLOTS, dims.head_v_dim)
        self.decays = ring(dims.num_v_heads, self.SLOTS, dtype=torch.float32)
        for tensor in (self.keys, self.results):
            tensor.normal_(0, 0.1)
        self.decays.copy_(-0.1 * torch.arange(1, self.SLOTS + 1, device=self.device))
        self.filled = self.int32([PENDING] * batch)
        self.slots = self.int32(self.order)
        self.A_log, self.dt_bias = inputs.weights.A_log.bfloat16(), inputs.weights.dt_bias.bfloat16()
        self.qkv = [tuple(t.contiguous() for t in inputs.split(layer)) for layer in range(self.layers)]

    @classmethod
    def bytes_per_request(cls, setting: Setting) -> int:
        """State and ring."""
        return state_bytes(setting.dims, setting.state_dtype) + cls.SLOTS * ring_row_bytes(setting.dims)

    @property
    def mean_pending(self) -> float:
        """Rows in the ring."""
        return float(PENDING)

    def load(self, states: Tensor, conv: Tensor) -> None:
        """With an empty ring."""
        self.states[:, self.slots.long()] = states
        self.filled.zero_()
        for tensor in (self.keys, self.results, self.decays):
            tensor.zero_()

    def begin(self) -> None:
        """8 rows in each ring."""
        self.filled.fill_(PENDING)

    def arrive(self) -> None:
        """The kernel takes q, k and v apart; what that costs is not counted."""
        for layer, mine in enumerate(self.qkv):
            for target, source in zip(mine, self.inputs.split(layer), strict=True):
                target.copy_(source)

    def arguments(self, layer: int) -> dict[str, Any]:
        """What both kernels take."""
        q, k, v = self.qkv[layer]
        return {
            "A_log": self.A_log, "dt_bias": self.dt_bias, "a": self.inputs.a[layer], "b": self.inputs.b[layer],
            "q": q, "k": k, "v": v, "initial_state_source": self.states[layer], "initial_state_indices": self.slots,
            "output": torch.empty_like(self.inputs.z[layer]), "k_cache": self.keys[layer],
            "u_cache": self.results[layer], "g_cache": self.decays[layer], "hist_len": self.filled,
        }  # fmt: skip

    def verify(self) -> list[Tensor]:
        """One launch a layer."""
        kernel = _function(*self.needs)
        return [kernel(**self.arguments(layer)) for layer in self.layer_numbers]

    def commit(self) -> None:
        """A cursor moves."""
        self.filled.add_(len(self.setting.path))


class FlashinferUcacheFlush(FlashinferUcache):
    """Verify and, where the ring of a request is full, fold, in one launch."""

    impl = "flashinfer ucache flush"
    needs = (f"{_FLASHINFER}.gdn_decode_bf16_wy_ucache_flush", "gated_delta_rule_mtp_ucache_flush")
    SLOTS = 32
    FULL: ClassVar[int] = 16
    """Rows of the ring that may be filled; the others keep what a fold still reads."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        setting = self.setting
        self.flush_min = self.FULL - setting.rows + 1
        self.phases = fill_cycle(len(setting.path), setting.rows, self.FULL)
        order = torch.randperm(setting.batch).tolist()
        self.first_fills = self.int32(self.phases[i % len(self.phases)] for i in order)
        self.base = torch.zeros_like(self.filled)

    @property
    def rounds(self) -> int:
        """Rounds from fold to fold."""
        return len(self.phases)

    @property
    def mean_pending(self) -> float:
        """The mean of a cycle."""
        return sum(self.phases) / len(self.phases)

    def load(self, states: Tensor, conv: Tensor) -> None:
        """With an empty ring."""
        super().load(states, conv)
        self.base.zero_()

    def begin(self) -> None:
        """Requests at every fill of the cycle."""
        self.filled.copy_(self.first_fills)

    def arguments(self, layer: int) -> dict[str, Any]:
        """And the ring's base; the cursors are this side's to move."""
        return {**super().arguments(layer), "cache_base": self.base, "restart_hist_on_flush": False}

    def commit(self) -> None:
        """The cursors of all requests, shared by all layers."""
        flushed = (self.filled >= self.flush_min).int()
        self.base.copy_((self.base + flushed * self.filled) & (self.SLOTS - 1))
        self.filled.mul_(1 - flushed).add_(len(self.setting.path))


RIVAL: dict[str, str] = {
    VllmStoreAllCuda.impl: "deferred",
    VllmStoreAllTriton.impl: "deferred",
    SglangStoreAll.impl: "deferred",
    SglangReplay.impl: "reconstruct",
    FlashinferUcache.impl: "verify",
    FlashinferUcacheFlush.impl: "deferred",
    VllmDecode.impl: "decode",
    SglangDecode.impl: "decode",
}
"""The case of this package that a peer's is set beside; SGLang's replay with fp32 states is set beside `deferred`."""

CHAIN: tuple[type[Peer], ...] = (
    VllmStoreAllTriton, SglangStoreAll, SglangReplay, FlashinferUcache, FlashinferUcacheFlush,
)  # fmt: skip
TREE: tuple[type[Peer], ...] = (SglangStoreAll, VllmStoreAllTriton)
DECODE: tuple[type[Peer], ...] = (VllmDecode, SglangDecode)
ALL: tuple[type[Peer], ...] = (VllmStoreAllCuda, *CHAIN, *DECODE)
