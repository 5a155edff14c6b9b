"""`treewy bench kernels` behind its options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console

from treewy.bench.kernels import BATCHES, TABLES, Run, TableName, jobs
from treewy.bench.records import Results
from treewy.bench.tables import summary, tables

QUICK_BATCHES = (1, 64)
QUICK_TABLES: tuple[TableName, ...] = ("chain", "trees", "peers")


def measure(
    output: Path | None,
    only: Sequence[str],
    batches: Sequence[int],
    skip: Sequence[str],
    console: Console,
    *,
    quick: bool,
    budget_seconds: float,
    workers: int | None,
) -> Results:
    """Runs the benchmark on this machine's GPU.

    Args:
        output: JSON file, written again and again as the run goes on.
        only: tables; all where empty.
        batches: requests; `BATCHES` where empty.
        skip: beginnings of names of implementations that are left out.
        console: for progress.
        quick: fewer tables and batches by default.
        budget_seconds: nothing further starts after these.
        workers: processes that compile; None takes the machine's cores less two, at most 14.

    Raises:
        ValueError: no GPU, an unknown table, batches below 1, a file that cannot be written, or nothing left to run.
    """
    chosen: tuple[TableName, ...] = tuple(name for name in TABLES if name in only)
    if unknown := set(only) - set(chosen):
        raise ValueError(f"--table {min(unknown)} is unknown; give one of {', '.join(TABLES)}")
    for batch in batches:
        if batch < 1:
            raise ValueError(f"--batch {batch} is out of range; give 1 or more")
    if output is not None and not output.resolve().parent.is_dir():
        raise ValueError(f"{output} cannot be written: its folder does not exist; create it first")
    chosen = chosen or (QUICK_TABLES if quick else TABLES)
    todo = jobs(chosen, tuple(batches) or (QUICK_BATCHES if quick else BATCHES), skip)
    if not todo:
        raise ValueError(f"--skip {' --skip '.join(skip)} leaves nothing to run; leave out less")
    if not torch.cuda.is_available():
        raise ValueError(
            "torch sees no CUDA device here, and kernels are timed on a GPU; run it on one, or give --show FILE for "
            "the results of an earlier run"
        )
    if workers is None:
        workers = min(14, max(1, (os.cpu_count() or 1) - 2))
    torch.manual_seed(0)
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    return Run(todo, output, say, budget_seconds=budget_seconds, workers=workers).run()


def read(path: Path) -> Results:
    """Results of an earlier run.

    Raises:
        ValueError: a file that cannot be read or holds something else.
    """
    try:
        return Results.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give the JSON file of a run") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(
            f"{path} holds no results of this benchmark ({where}: {first['msg']}); give a file that "
            "`treewy bench kernels` wrote"
        ) from error


def check_figure(figure: Path | None) -> None:
    """Before anything is timed or printed for it.

    Raises:
        ValueError: a figure that cannot be drawn or written.
    """
    if figure is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib: pip install 'treewy[plot]'") from error
    from treewy.bench.plot import formats

    if figure.suffix.removeprefix(".") not in formats():
        raise ValueError(f"--plot {figure} cannot be written: no format ends so; end it with .png, .svg or .pdf")
    if not figure.resolve().parent.is_dir():
        raise ValueError(f"--plot {figure} cannot be written: its folder does not exist; create it first")


def show(results: Results, console: Console, figure: Path | None) -> None:
    """Prints the tables and writes the figure.

    Raises:
        ValueError: a figure that cannot be written.
    """
    for table in tables(results):
        # On a narrower terminal lines run on: without the ends of cells, limits or batch sizes would be missing.
        width = console.width
        console.width = max(width, console.measure(table, options=console.options.update(width=1000)).maximum)
        console.print(table)
        console.width = width
        console.print()
    console.print(summary(results), markup=False, highlight=False)
    if figure is None:
        return
    from treewy.bench.plot import plot

    try:
        plot(results, figure)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {figure} cannot be written: {error}; end it with .png, .svg or .pdf") from error
    console.print(f"figure: {figure}", markup=False, highlight=False)


def failed(results: Results) -> bool:
    """An implementation of this package, or whatever else ran, was wrong."""
    return any(not check.passed for check in results.checks)
