"""The plan of a round in fixed device buffers: what a captured graph reads, and what a replay fills anew."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from treewy.tree import TreeBatch

_ERRORS = {
    1: "a path that starts elsewhere than at the root, leaves its tree, skips a row, or is longer than it can be",
    2: "a window that was not verified in every layer, or is committed already",
    4: "a history without room for the path",
    8: "a slot or running request outside those that exist",
}


@dataclass(frozen=True)
class DeviceWindow:
    """Plan of one round, shared by all layers, in buffers that keep their place; B requests of up to T rows.

    The kernels read topology, addresses and row counts from here and nowhere else, so a CUDA graph that was captured
    with one of these serves every batch that `update` puts into it. Places without a request have slot -1.
    """

    slots: Tensor
    """[B] int64, negative for padding."""
    requests: Tensor
    """[B] int64."""
    tree_rows: Tensor
    """[B] int32."""
    parents: Tensor
    """[B, T] int32."""
    ancestors: Tensor
    """[B, T] int64 ancestor-or-self masks."""
    conv_ancestors: Tensor
    """[B, T, width - 1] int32."""
    longest: Tensor
    """[B] int32 rows of the longest path, root included."""
    places: Tensor
    """[B, 2] int32, where the window begins in the ring and the most pending rows of a head. The convolution of a layer
    leaves them here for the verify that follows, which would have to look them up one after the other."""
    errors: Tensor
    """[1] int32, bits that kernels set where they refused; read by `check`."""
    num_slots: int
    num_requests: int
    impl: Literal["triton", "cuda"] = "triton"
    """Whose kernels `treewy.ops.verify` runs on it."""

    @staticmethod
    def empty(
        batch: int,
        rows: int,
        *,
        num_slots: int,
        num_requests: int,
        device: torch.device | str,
        conv_width: int = 4,
        impl: Literal["triton", "cuda"] = "triton",
    ) -> DeviceWindow:
        """Buffers for up to `batch` requests of up to `rows` rows, all padding."""

        def buffer(filler: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((batch, *shape), filler, dtype=dtype, device=device)

        return DeviceWindow(
            slots=buffer(-1, torch.int64),
            requests=buffer(-1, torch.int64),
            tree_rows=buffer(0, torch.int32),
            parents=buffer(-1, torch.int32, rows),
            ancestors=buffer(0, torch.int64, rows),
            conv_ancestors=buffer(-1, torch.int32, rows, conv_width - 1),
            longest=buffer(1, torch.int32),
            places=buffer(0, torch.int32, 2),
            errors=torch.zeros(1, dtype=torch.int32, device=device),
            num_slots=num_slots,
            num_requests=num_requests,
            impl=impl,
        )

    @property
    def batch(self) -> int:
        """B."""
        return self.parents.shape[0]

    @property
    def rows(self) -> int:
        """T."""
        return self.parents.shape[1]

    def first(self, count: int) -> DeviceWindow:
        """The first `count` places, in the same memory; `errors` stay common."""
        views: dict[str, Any] = {
            field.name: buffer[:count]
            for field in fields(self)
            if isinstance(buffer := getattr(self, field.name), Tensor) and field.name != "errors"
        }
        return replace(self, **views)

    def update(self, trees: TreeBatch, slots: Tensor, requests: Tensor) -> None:
        """Puts a round into the buffers, without waiting for the device; places that are left over become padding.

        A slot or index past its end is not clipped: the request is left out, and `check` raises.

        Args:
            trees: at most B trees of at most T rows, on any device.
            slots: [at most B] integer.
            requests: [at most B] integer.

        Raises:
            ValueError: more requests or rows than there is room for, or shapes that differ.
        """
        count, rows = trees.parents.shape
        if slots.shape != (count,) or requests.shape != (count,):
            raise ValueError(
                f"{count} trees came with slots {tuple(slots.shape)} and requests {tuple(requests.shape)}; "
                f"both are [{count}]"
            )
        if count > self.batch or rows > self.rows:
            raise ValueError(
                f"{count} requests of {rows} rows do not fit a plan for {self.batch} of {self.rows}: plan a larger one"
            )
        if trees.conv_ancestors.shape[2] != self.conv_ancestors.shape[2]:
            raise ValueError(
                f"the trees were made for a convolution of width {trees.conv_ancestors.shape[2] + 1}, the plan for "
                f"{self.conv_ancestors.shape[2] + 1}"
            )
        self.slots.fill_(-1)
        for buffer, value in (
            (self.tree_rows, trees.rows),
            (self.longest, trees.depths.amax(1) + 1),
            (self.slots, slots),
            (self.requests, requests),
        ):
            buffer[:count].copy_(value, non_blocking=True)
        for square, value in (
            (self.parents, trees.parents),
            (self.ancestors, trees.ancestors),
            (self.conv_ancestors, trees.conv_ancestors),
        ):
            square[:count, :rows].copy_(value, non_blocking=True)
        active = self.slots >= 0
        outside = active & ((self.slots >= self.num_slots) | (self.requests < 0) | (self.requests >= self.num_requests))
        self.slots.masked_fill_(outside, -1)
        self.errors.bitwise_or_(outside.any().to(torch.int32) * 8)

    def update_chains(
        self, starts: Tensor, slots: Tensor, requests: Tensor, *, chosen: Tensor | None = None, padding: int = -1
    ) -> None:
        """Puts windows that are chains into the buffers, in one launch: requests of a batch as an engine keeps it.

        A request without rows, with the padding's slot or without a name in `requests` becomes padding. One past its
        end, or with more than T rows, is left out, and `check` raises.

        Args:
            starts: [n + 1] integer, where the rows of each request of the batch begin.
            slots: [n] integer of any stride.
            requests: [at most n] integer.
            chosen: [B] integer, which requests of the batch take the places; default the first B.
            padding: slot of requests that are padding, besides negative names.
        """
        from treewy.ops.triton.paged import update_chains

        update_chains(self, starts, slots, requests, chosen, padding)

    def check(self) -> None:
        """Raises what a kernel or an update refused since the last check; waits for the device.

        Raises:
            IndexError: a slot or running request past its end.
            ValueError: a path that could not be committed; that request was left as it was.
        """
        bits = int(self.errors.item())
        if not bits:
            return
        self.errors.zero_()
        raise (IndexError if bits & 8 else ValueError)(refused(bits))


def refused(bits: int) -> str:
    """What the bits of `DeviceWindow.errors` say."""
    found = "; ".join(text for bit, text in _ERRORS.items() if bits & bit)
    return f"a round was given {found}. Nothing of these requests changed"
