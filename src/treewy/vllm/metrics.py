"""Pending rows and folds, sampled now and then on the device and read when they have arrived: no step waits for them.

They appear beside vLLM's own metrics where those of worker processes are exposed: with PROMETHEUS_MULTIPROC_DIR set,
and in engines that run in one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from treewy.ops.device_window import refused
from treewy.vllm.running import IN_BLOCK, RunningState

logger = init_logger("vllm.treewy")

EVERY = 32
"""Steps between samples."""
_GAUGES = {
    "vllm:treewy_state_bytes_per_request": "Bytes of recurrent state that a running request holds on this rank, window "
    "and pending rows included.",
    "vllm:treewy_pending_rows": "Committed rows a running request has pending, mean of the last sampled step.",
    "vllm:treewy_folds_per_window": "Windows whose history was folded into the state before them, share of the last "
    "sampled step.",
    "vllm:treewy_refusals": "Samples that found requests whose round the kernels refused: a fault, named in the log.",
}


class Meter:
    """Samples the first layer's counters; one a worker.

    Args:
        running: state of the running requests.
    """

    def __init__(self, running: RunningState) -> None:
        self.running = running
        self._pending = running.pieces["pending"][0, :, 0]
        self._before: Tensor | None = None
        self._steps = self._refusals = 0
        self._arriving: tuple[Tensor, Any] | None = None
        self._gauges: dict[str, Any] = {}

    def before_step(self) -> None:
        """Before the windows of a step are verified."""
        arrived = self._arriving is None or self._arriving[1].query()
        self._before = self._pending.clone() if self._steps % EVERY == 0 and arrived else None
        self._steps += 1

    def after_commit(self, requests: Tensor, accepted: Tensor, slots: Tensor) -> None:
        """After the step's commit.

        Args:
            requests: [B] request slots.
            accepted: [B] rows.
            slots: [B] blocks, negative for padding.
        """
        if self._before is None:
            return
        real = slots >= 0
        before, now = self._before[requests], self._pending[requests]
        folded = real & (now < before + accepted)
        sample = torch.stack([(now * real).sum(), folded.sum(), real.sum(), self.running.errors[0].long()])
        self.running.errors.zero_()
        self._before = None
        if not sample.is_cuda:
            self._report(sample)
            return
        if self._arriving is not None:
            self._report(self._arriving[0])
        on_host = sample.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._arriving = on_host, arrived

    def _report(self, counts: Tensor) -> None:
        rows, folds, windows, errors = counts.tolist()
        if not self._gauges:
            self._gauges = {name: _gauge(name, text) for name, text in _GAUGES.items()}
            self._gauges["vllm:treewy_state_bytes_per_request"].set(self.running.spec.bytes_per_request)
        if windows:
            self._gauges["vllm:treewy_pending_rows"].set(rows / windows)
            self._gauges["vllm:treewy_folds_per_window"].set(folds / windows)
        if errors:
            self._refusals += 1
            logger.error("treewy: %s; please report this", refused(errors))
        self._gauges["vllm:treewy_refusals"].set(self._refusals)


def _gauge(name: str, text: str) -> Any:
    from prometheus_client import REGISTRY, Gauge

    # An engine that this process ran before has left its own.
    old = getattr(REGISTRY, "_names_to_collectors", {}).get(name)
    if old is not None:
        REGISTRY.unregister(old)
    return Gauge(name, text, multiprocess_mode="mostrecent")


def summary(running: RunningState) -> str:
    """One line for the log at start."""
    spec = running.spec
    pieces = spec.bytes_by_piece()
    block = sum(pieces[name] for name in IN_BLOCK)
    beside = spec.bytes_per_request - block
    return (
        f"treewy: mamba_state_commit={spec.mode}, windows of {spec.max_rows} rows; a request holds one state, "
        f"{_mib(block)} in {spec.num_layers} layers, and {_mib(beside)} of window and history ({spec.history} rows), "
        f"{_mib(running.nbytes)} for {running.num_requests} requests"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
