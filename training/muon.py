"""Muon for matrices, done shape by shape: all matrices of one shape are orthogonalised in one batch.

The update is that of Jordan et al., 2024 (momentum, then five Newton-Schulz steps in bfloat16).  The learning rate is
a tensor on the parameters' device and nothing here waits for the GPU, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix of a stack ``[n, rows, columns]`` towards one."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for two-dimensional parameters."""

    def __init__(self, params: Iterable[Tensor], lr: Tensor, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
            lr, momentum = group["lr"], group["momentum"]
            for (rows, columns), params in by_shape.items():
                grads = [p.grad for p in params]
                buffers = [self.state[p]["momentum"] for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - momentum)
                ahead = torch._foreach_lerp(grads, buffers, momentum)
                update = orthogonalise(torch.stack(ahead)).float() * (-lr * max(1.0, rows / columns) ** 0.5)
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                torch._foreach_add_(params, list(update.unbind()))
