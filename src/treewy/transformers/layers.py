"""GDN layers of the model families: from hidden states to what `treewy.ops` reads, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treewy.ops import GDNDims, GDNParams


class Projected(NamedTuple):
    """Projections of a window's hidden states."""

    x: Tensor
    """[B, T, C] convolution inputs."""
    a: Tensor
    """[B, T, HV] decay gate."""
    b: Tensor
    """[B, T, HV] write gate."""
    z: Tensor
    """[B, T, HV * dv] output gate."""


class GDNLayer:
    """One GDN module of a Hugging Face model; its parameters are read, never changed.

    Args:
        module: `linear_attn` of a decoder layer of Qwen3-Next, Qwen3.5 (dense or MoE) or OLMo-Hybrid.

    Raises:
        ValueError: a module of another family, or a convolution whose activation is not SiLU.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        family = next((family for family in _FAMILIES if hasattr(module, family.mark)), None)
        if family is None:
            raise ValueError(
                f"{type(module).__name__} is no GDN layer that is known here; known are those of Qwen3-Next, Qwen3.5 "
                "and OLMo-Hybrid"
            )
        if module.activation not in ("silu", "swish"):
            raise ValueError(
                f"the convolution of {type(module).__name__} uses {module.activation!r}; only SiLU is supported"
            )
        self._family = family
        self.dims = GDNDims(
            num_k_heads=int(module.num_k_heads),  # type: ignore[arg-type]
            num_v_heads=int(module.num_v_heads),  # type: ignore[arg-type]
            head_k_dim=int(module.head_k_dim),  # type: ignore[arg-type]
            head_v_dim=int(module.head_v_dim),  # type: ignore[arg-type]
            conv_width=int(module.conv_kernel_size),  # type: ignore[arg-type]
        )
        conv: nn.Conv1d = module.conv1d  # type: ignore[assignment]
        self.params = GDNParams.of(
            self.dims,
            conv.weight,
            module.A_log,  # type: ignore[arg-type]
            module.dt_bias,  # type: ignore[arg-type]
            conv.bias,
            beta_scale=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        )

    def project(self, hidden: Tensor) -> Projected:
        """Everything the recurrence is given, from hidden states [B, T, D]."""
        return self._family.project(self.module, hidden)

    def finish(self, out: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output projection: [B, T, HV, dv] and z to [B, T, D]."""
        norm = getattr(self.module, self._family.norm)
        normed = norm(out.reshape(-1, self.dims.head_v_dim), z.reshape(-1, self.dims.head_v_dim))
        projected: Tensor = getattr(self.module, self._family.out)(normed.view(*out.shape[:2], -1))
        return projected


def _project_qwen3_next(module: nn.Module, hidden: Tensor) -> Projected:
    q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))  # type: ignore[operator]
    return Projected(torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1), a, b, z.flatten(2))


def _project_qwen3_5(module: nn.Module, hidden: Tensor) -> Projected:
    names = ("in_proj_qkv", "in_proj_a", "in_proj_b", "in_proj_z")
    return Projected(*(getattr(module, name)(hidden) for name in names))


def _project_olmo_hybrid(module: nn.Module, hidden: Tensor) -> Projected:
    x = torch.cat([getattr(module, name)(hidden) for name in ("q_proj", "k_proj", "v_proj")], dim=-1)
    return Projected(x, *(getattr(module, name)(hidden) for name in ("a_proj", "b_proj", "g_proj")))


class _Family(NamedTuple):
    mark: str
    """A submodule that only this family's layer has."""
    project: Callable[[nn.Module, Tensor], Projected]
    norm: str
    out: str


_FAMILIES = (
    _Family("in_proj_qkvz", _project_qwen3_next, "norm", "out_proj"),
    _Family("in_proj_qkv", _project_qwen3_5, "norm", "out_proj"),
    _Family("g_proj", _project_olmo_hybrid, "o_norm", "o_proj"),
)
