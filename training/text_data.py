"""The training text: packed token files and the order in which windows of them are read."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT_TOKENS = 1_000_000
END_OF_TEXT = 0


def load_tokens(folder: Path, device: str, limit: int = 0) -> tuple[Tensor, Tensor]:
    """Unpack ``tokens_100M_u16.bin.xz``; returns training and held-out tokens as int32 on ``device``."""
    raw = lzma.decompress((folder / "tokens_100M_u16.bin.xz").read_bytes())
    tokens = np.frombuffer(raw, np.uint16)
    held_out = tokens[-HELD_OUT_TOKENS:]
    train = tokens[:-HELD_OUT_TOKENS][: limit or None]
    return tuple(torch.from_numpy(x.astype(np.int32)).to(device) for x in (train, held_out))  # type: ignore[return-value]


def load_held_out_documents(folder: Path) -> list[str]:
    """The documents of ``heldout.txt.xz``, which no training token comes from."""
    text = lzma.decompress((folder / "heldout.txt.xz").read_bytes()).decode()
    return [d for d in text.split("\0") if d]


def gather(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """Windows ``[len(starts), length]`` of the token stream, as int64."""
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()


class Windows:
    """Every window of the stream once per pass, in a new order and at a new offset each pass.

    The batch of a step depends on nothing but the seed and the step, so that resuming needs no saved state.
    """

    def __init__(self, tokens: Tensor, batch: int, length: int, seed: int) -> None:
        self.tokens, self.batch, self.length, self.seed = tokens, batch, length, seed
        self.per_pass = (tokens.numel() - length) // length // batch
        if self.per_pass < 1:
            raise ValueError("too few tokens for one batch")
        self._pass, self._starts = -1, np.empty(0, np.int64)

    def __call__(self, step: int) -> Tensor:
        """The batch of a step, ``[batch, length]``."""
        current, i = divmod(step, self.per_pass)
        if current != self._pass:
            rng = np.random.default_rng((self.seed, current))
            offset = int(rng.integers(self.length))
            order = rng.permutation((self.tokens.numel() - self.length) // self.length)
            self._pass, self._starts = current, offset + self.length * order.astype(np.int64)
        starts = torch.from_numpy(self._starts[i * self.batch : (i + 1) * self.batch]).to(self.tokens.device)
        return gather(self.tokens, starts, self.length)
