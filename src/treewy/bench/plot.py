"""The figure of a kernel benchmark: time and bytes per second, against batch and rows, with the floor drawn in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from treewy.bench.records import Record, Results

ROWS_BATCHES = (8, 64)
"""Batches of the panels against rows."""


def plot(results: Results, path: Path) -> None:
    """Writes the figure; the ending of the name decides the format."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    records = [
        r for r in results.records
        if r.heads[1] == 32 and r.state_dtype == "bfloat16" and not r.with_conv and not r.with_commit
    ]  # fmt: skip
    best = best_verify(records)
    rows = sorted({r.rows for r in best})
    for number, count in enumerate(rows):
        line = sorted((r for r in best if r.rows == count), key=lambda r: r.batch)
        _draw(axes[0, 0], axes[0, 1], line, [r.batch for r in line], f"verify, {count} rows", f"C{number}", results)
    chains = {
        "deferred, 4 rows": ([r for r in records if (r.impl, r.case, r.rows) == ("cuda", "deferred", 4)], "C4"),
        "vLLM store-all, 4 rows": ([r for r in records if r.impl == "vllm store_all cuda"], "0.5"),
    }
    for label, (line, color) in chains.items():
        line.sort(key=lambda r: r.batch)
        _draw(axes[0, 0], axes[0, 1], line, [r.batch for r in line], label, color, results)
    for number, batch in enumerate(ROWS_BATCHES):
        line = sorted((r for r in best if r.batch == batch), key=lambda r: r.rows)
        _draw(axes[1, 0], axes[1, 1], line, [r.rows for r in line], f"verify, batch {batch}", f"C{number}", results)
    for row, what in enumerate(("requests", "rows of a window")):
        left, right = axes[row]
        left.set(xlabel=what, ylabel="µs per layer", yscale="log")
        right.set(xlabel=what, ylabel="TB/s", ylim=(0, 1.1 * results.copy_bytes_per_s / 1e12))
        right.axhline(results.copy_bytes_per_s / 1e12, color="black", linewidth=0.8, linestyle="--", label="copy")
        if row == 0:
            left.set_xscale("log", base=2)
            right.set_xscale("log", base=2)
        for axis in (left, right):
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize="small")
    figure.suptitle(f"One GDN layer on {results.machine.gpu}, {results.date}; dotted: bytes that must move / copy")
    figure.savefig(path)


def formats() -> set[str]:
    """Endings of names, without the dot."""
    return set(Figure().canvas.get_supported_filetypes())


def best_verify(records: Sequence[Record]) -> list[Record]:
    """The faster implementation of each verify of this package."""
    best: dict[tuple[int, int], Record] = {}
    for record in records:
        if record.case == "verify":
            place = (record.rows, record.batch)
            best[place] = min(best.get(place, record), record, key=lambda r: r.us)
    return list(best.values())


def _draw(
    time: Axes, rate: Axes, line: Sequence[Record], x: Sequence[int], label: str, color: str, results: Results
) -> None:
    if not line:
        return
    time.plot(x, [r.us for r in line], marker="o", markersize=3, color=color, label=label)
    floors = [(place, r) for place, r in zip(x, line, strict=True) if r.floor_us is not None]
    time.plot([place for place, _ in floors], [r.floor_us or 0 for _, r in floors], color=color, linestyle=":")
    rates = [results.copy_bytes_per_s * (r.floor_us or 0) / r.us / 1e12 for _, r in floors]
    rate.plot([place for place, _ in floors], rates, marker="o", markersize=3, color=color, label=label)
