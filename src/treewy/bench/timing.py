"""How work is timed: captured once in a CUDA graph, replayed, the median replay counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Protocol

import torch

CLOCK_HZ = 2e9
"""No GPU here is faster."""


class Timer(Protocol):
    """A way to time work."""

    def prepare(self, work: Callable[[], object], begin: Callable[[], None]) -> Callable[[], float]:
        """A function that does the work once more and gives its seconds; `begin` goes before each trial of it."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """Where everything else runs that the work depends on."""
        ...


class GraphTimer:
    """CUDA graphs on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def prepare(self, work: Callable[[], object], begin: Callable[[], None]) -> Callable[[], float]:
        """Captures the work, after running it once."""
        with torch.cuda.stream(self.stream):
            begin()
            work()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            kept: list[object] = []
            graph.capture_begin()  # `torch.cuda.graph` would collect all garbage first, hundreds of times
            try:
                kept.append(work())  # outputs live as long as the graph, so each layer writes to memory of its own
            finally:
                graph.capture_end()

            launch = []
            for _ in range(2):
                begin()
                self.stream.synchronize()
                began = perf_counter()
                graph.replay()
                launch.append(perf_counter() - began)
                self.stream.synchronize()
        # The GPU spins before a timed replay until the host's launch is over, so that none of it is in the time.
        ahead = int((1.5 * min(launch) + 1e-4) * CLOCK_HZ)

        def replay() -> float:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(ahead)
                self._start.record(self.stream)
                graph.replay()
                self._end.record(self.stream)
            self._end.synchronize()
            return float(self._start.elapsed_time(self._end)) * 1e-3

        replay.kept = kept  # type: ignore[attr-defined]
        return replay

    def scope(self) -> AbstractContextManager[object]:
        """On the stream of the replays, after what was asked for before."""
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)


class WallTimer:
    """The host's clock, for a CPU and for tests of the benchmark itself."""

    def prepare(self, work: Callable[[], object], begin: Callable[[], None]) -> Callable[[], float]:
        """Runs the work itself."""

        def run() -> float:
            began = perf_counter()
            work()
            return max(perf_counter() - began, 1e-9)

        return run

    def scope(self) -> AbstractContextManager[object]:
        """Anywhere."""
        return nullcontext()


def median_of_cycles(
    replay: Callable[[], float],
    rounds: int,
    *,
    begin: Callable[[], None],
    between: Callable[[], None],
    repeats: int,
    seconds: float,
) -> float:
    """Seconds of one replay: the median over cycles of the mean over the rounds of a cycle.

    Args:
        replay: does the work and gives its seconds.
        rounds: of a cycle.
        begin: before each cycle, not timed.
        between: after each replay, not timed.
        repeats: replays to make; cycles are whole, and at least three.
        seconds: no further cycle starts after these.
    """
    means: list[float] = []
    began = perf_counter()
    while len(means) < 3 or (len(means) * rounds < repeats and perf_counter() - began < seconds):
        begin()
        times = []
        for _ in range(rounds):
            times.append(replay())
            between()
        means.append(statistics.mean(times))
    return statistics.median(means)


def copy_bandwidth(size: int = 2 << 30) -> float:
    """Bytes read and written per second by a large copy, made by a kernel: a captured copy goes to a copy engine."""
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    timer = GraphTimer()
    with timer.scope():
        replay = timer.prepare(lambda: torch.mul(source, 1.0, out=target), lambda: None)
    return 2 * size / statistics.median(replay() for _ in range(7))
