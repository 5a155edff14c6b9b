"""Times the Triton kernels of a GDN layer on a GPU, after checking them; writes JSON.

    python benchmarks/kernels.py OUTPUT.json [--quick] [--tune] [--seconds N]

Method. First the kernels run six rounds beside float64, and their error must be below twice that of the torch
implementation in the same dtypes. Then each case is captured in a CUDA graph over so many layers, each with its own
state and inputs, that the L2 holds none of it, and replayed; the median replay counts, divided by the layers. Each case
is timed twice. The floor is the bytes that must move over the bandwidth of a large copy, measured in the same run.

Cases, per layer (H = 16, HV = 32, dk = dv = 128, bf16 inputs, fp32 pseudo-values, history of 16 rows):
    verify       8 pending rows, nothing folds; gates, norms and the gated RMS norm inside, after the convolution
    deferred     requests at mixed fill, 3 accepted a round: one in five folds
    reconstruct  3 pending rows, every request folds
    decode       one row, requests at mixed fill: one in sixteen folds
    commit       3 rows of each request, all layers in one launch, divided by the layers
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

import treewy
from treewy.ops import GatedNorm, GDNDims, GDNParams, LayerState
from treewy.ops import triton as kernels
from treewy.ops.triton.launch import Cut, cut
from treewy.state import RecurrentState, StateSpec
from treewy.tree import DraftTree, TreeBatch

HISTORY = 16
COLD_BYTES = 256 << 20
WIDTHS = {1: (), 4: (1, 1, 1), 15: (2, 2, 2), 40: (3, 3, 3)}
BATCHES = (1, 8, 32, 64, 128, 256)
ACCEPTED = 3
DEVICE = torch.device("cuda")


def model_dims(num_v_heads: int = 32) -> GDNDims:
    return GDNDims(16, num_v_heads, 128, 128)


def random_params(dims: GDNDims) -> GDNParams:
    params = GDNParams.of(
        dims,
        0.3 * torch.randn(dims.conv_dim, dims.conv_width),
        torch.rand(dims.num_v_heads).mul(4).log(),
        torch.randn(dims.num_v_heads) - 3,
    )
    return params._replace(**{n: getattr(params, n).to(DEVICE) for n in ("taps", "neg_A", "dt_bias")})


# Correctness


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def check(rows: int, state_dtype: torch.dtype, input_dtype: torch.dtype, dims: GDNDims, mode: str) -> dict[str, Any]:
    """Six rounds beside float64: largest error of outputs and states, and the torch implementation's."""
    torch.manual_seed(rows)
    tree = DraftTree.from_widths(WIDTHS[rows])
    trees = TreeBatch.of([tree, DraftTree.chain(min(rows, 4) - 1), tree], rows=rows, device=DEVICE)
    specs = {
        name: StateSpec(dims, 1, mode, rows, tree.depth, *dtypes, HISTORY if mode == "deferred" else None)
        for name, dtypes in {
            "exact": (torch.float64, torch.float64),
            "torch": (state_dtype, input_dtype),
            "triton": (state_dtype, input_dtype),
        }.items()
    }
    states = {name: RecurrentState(spec, 4, DEVICE) for name, spec in specs.items()}
    for request in range(4):
        S = torch.randn(dims.num_v_heads, dims.head_v_dim, dims.head_k_dim, device=DEVICE).mul(0.1).to(state_dtype)
        conv = torch.randn(dims.conv_width - 1, dims.conv_dim, device=DEVICE).to(input_dtype)
        for state in states.values():
            state.load(0, request, S.to(state.tensors["checkpoint"].dtype), conv.to(state.tensors["conv"].dtype))
    params = random_params(dims)
    exact_params = params._replace(**{n: getattr(params, n).double() for n in ("taps", "neg_A", "dt_bias")})
    requests = torch.tensor([2, 0, 3], device=DEVICE)
    window = kernels.DeviceWindow.empty(4, rows, num_slots=4, num_requests=4, device=DEVICE)
    worst = {"torch": 0.0, "triton": 0.0}
    state_error = dict(worst)
    for _ in range(6):
        x = torch.randn(4, rows, dims.conv_dim, device=DEVICE).to(input_dtype)
        a, b = (torch.randn(4, rows, dims.num_v_heads, device=DEVICE).to(input_dtype) for _ in range(2))
        plans = {name: states[name].plan(trees, requests) for name in ("exact", "torch")}
        window.update(trees, requests, requests)
        out = {
            "exact": states["exact"].verify(
                0, plans["exact"], x[:3].double(), a[:3].double(), b[:3].double(), exact_params
            ),
            "torch": states["torch"].verify(0, plans["torch"], x[:3], a[:3], b[:3], params),
        }
        layer = states["triton"]._layers[0]
        padded = kernels.verify(layer, window, x, a, b, params, fold_always=mode == "reconstruct")
        assert not padded[3].any(), "a padding request is not zero"
        assert not padded[1, min(rows, 4) :].any(), "padding rows are not zero"
        for name, found in (("torch", out["torch"]), ("triton", padded[:3])):
            worst[name] = max(worst[name], error(found, out["exact"]))
        path = torch.full((4, rows), -1, device=DEVICE)
        accepted = torch.ones(4, dtype=torch.int64, device=DEVICE)
        for place, chosen in enumerate((tree.path(rows - 1), (0,), tree.path(rows // 2))):
            path[place, : len(chosen)] = torch.tensor(chosen)
            accepted[place] = len(chosen)
        for name, plan in plans.items():
            states[name].commit(plan, path[:3], accepted[:3])
        kernels.commit(states["triton"]._all, window, path, accepted)
        window.check()
        for request in (0, 2, 3):
            exact = states["exact"].read(0, request)
            for name in state_error:
                found = states[name].read(0, request)
                state_error[name] = max(state_error[name], error(found[0], exact[0]))
                assert error(found[1], exact[1]) == 0, "committed inputs differ"
    kernels.fold(layer, requests, requests)
    assert not layer.pending.any(), "fold left rows pending"
    record = {
        "case": "check", "mode": mode, "rows": rows, "state_dtype": str(state_dtype), "input_dtype": str(input_dtype),
        "heads": [dims.num_k_heads, dims.num_v_heads, dims.head_k_dim, dims.head_v_dim],
        "output_error": worst["triton"], "output_error_torch": worst["torch"],
        "state_error": state_error["triton"], "state_error_torch": state_error["torch"],
    }  # fmt: skip
    record["passed"] = all(record[k] < 2 * record[f"{k}_torch"] + 2e-7 for k in ("output_error", "state_error"))
    return record


def checked(*case: Any) -> dict[str, Any]:
    """`check`, with what it raises as a record: the other checks still run."""
    try:
        return check(*case)
    except Exception as reason:
        return {"case": "check", "of": str(case), "passed": False, "error": f"{type(reason).__name__}: {reason}"}


# Time


def bandwidth() -> float:
    """Bytes read and written per second by a large copy, made by a kernel: a captured copy goes to a copy engine."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    times = replay_times(lambda: torch.mul(source, 1.0, out=target), repeats=5)
    return 2 * source.nbytes / statistics.median(times)


def replay_times(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each replay of `work`, captured once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
    return times


class Layers:
    """States of many layers for one batch, with inputs of their own."""

    def __init__(self, batch: int, rows: int, state_dtype: torch.dtype, dims: GDNDims) -> None:
        spec = StateSpec(dims, 1, "deferred", max(rows, 2), 0, state_dtype, torch.bfloat16, HISTORY)
        state_bytes = batch * dims.num_v_heads * dims.head_v_dim * dims.head_k_dim * state_dtype.itemsize
        self.count = min(128, max(3, -(-COLD_BYTES // state_bytes)))
        self.dims, self.batch, self.rows = dims, batch, rows
        tensors = {
            name: torch.zeros(self.count, batch, *shape, dtype=dtype, device=DEVICE)
            for name, (shape, dtype) in spec.pieces().items()
        }
        for name in (
            "checkpoint",
            "conv",
            "window_inputs",
            "window_keys",
            "history_keys",
            "window_values",
            "history_values",
        ):
            tensors[name].normal_(0, 0.05)
        for name in ("window_decays", "history_decays"):
            tensors[name].uniform_(-0.3, -0.01)
        self.all = LayerState(**tensors)
        self.each = [LayerState(*(t[layer] for t in tensors.values())) for layer in range(self.count)]
        tree = DraftTree.from_widths(WIDTHS[rows])
        self.window = kernels.DeviceWindow.empty(batch, rows, num_slots=batch, num_requests=batch, device=DEVICE)
        order = torch.randperm(batch)
        self.window.update(TreeBatch.of([tree] * batch), order, order)
        self.params = random_params(dims)

        def inputs(*shape: int) -> torch.Tensor:
            return torch.randn(self.count, batch, rows, *shape, device=DEVICE, dtype=torch.bfloat16)

        self.x = inputs(dims.conv_dim)
        self.a, self.b = inputs(dims.num_v_heads), inputs(dims.num_v_heads)
        self.z = inputs(dims.num_v_heads, dims.head_v_dim)
        self.weight = torch.rand(dims.head_v_dim, device=DEVICE, dtype=torch.bfloat16) + 0.5
        path = list(tree.path(rows - 1))[:ACCEPTED]
        self.path = torch.tensor([path] * batch, device=DEVICE)
        self.accepted = torch.full((batch,), len(path), device=DEVICE)

    def run(
        self, pending: torch.Tensor, *, fold_always: bool, with_conv: bool, shape: Cut | None
    ) -> Callable[[], None]:
        def work() -> None:
            self.all.pending.copy_(pending)
            kept = []  # each layer writes to memory of its own
            for layer, state in enumerate(self.each):
                x = self.x[layer]
                mixed = kernels.convolve(state, self.window, x, self.params) if with_conv else x
                out = kernels.verify_mixed(
                    state, self.window, mixed, self.a[layer], self.b[layer], self.params, fold_always=fold_always,
                    norm=GatedNorm(self.z[layer], self.weight), shape=shape,
                )  # fmt: skip
                kept += [mixed, out]

        return work

    def commit(self) -> Callable[[], None]:
        def work() -> None:
            self.all.pending.fill_(8)
            self.all.window_rows.fill_(self.rows)
            kernels.commit(self.all, self.window, self.path, self.accepted)

        return work


def fills(case: str, batch: int) -> list[int]:
    """Pending rows of each request when its window is verified."""
    if case in {"deferred", "decode"}:
        step, longest = (ACCEPTED, 4) if case == "deferred" else (1, 1)
        cycle = [step]
        while cycle[-1] + longest <= HISTORY:
            cycle.append(cycle[-1] + step)
        return [cycle[place % len(cycle)] for place in range(batch)]
    return [{"verify": 8, "reconstruct": ACCEPTED}[case]] * batch


def floor_bytes(case: str, batch: int, rows: int, dims: GDNDims, state_dtype: torch.dtype, with_conv: bool) -> float:
    """Bytes that must move per layer."""
    solved = 2 * dims.key_dim + 4 * dims.value_dim + 4 * dims.num_v_heads
    conv_inputs = 2 * (dims.conv_width - 1) * dims.conv_dim
    if case == "commit":
        return batch * (2 * ACCEPTED * solved + 2 * conv_inputs)
    state = dims.num_v_heads * dims.head_v_dim * dims.head_k_dim * state_dtype.itemsize
    pending = fills(case, batch)
    longest = len(WIDTHS[rows]) + 1
    folds = batch if case == "reconstruct" else sum(used + longest > HISTORY for used in pending)
    row = 2 * dims.conv_dim + 4 * dims.num_v_heads + 2 * 2 * dims.value_dim + solved
    if with_conv:
        row += 2 * dims.conv_dim
        batch_conv = batch * conv_inputs
    else:
        batch_conv = 0
    return (batch + folds) * state + sum(pending) * solved + batch * rows * row + batch_conv


def measure(
    layers: Layers, case: str, state_dtype: torch.dtype, copy_rate: float, *, with_conv: bool = False,
    shape: Cut | None = None,
) -> dict[str, Any]:  # fmt: skip
    if case == "commit":
        work = layers.commit()
    else:
        pending = torch.tensor(fills(case, layers.batch), dtype=torch.int32)[torch.randperm(layers.batch)].to(DEVICE)
        work = layers.run(pending, fold_always=case == "reconstruct", with_conv=with_conv, shape=shape)
    first, again = (statistics.median(replay_times(work, 9)) / layers.count * 1e6 for _ in range(2))
    layers.window.check()
    floor = floor_bytes(case, layers.batch, layers.rows, layers.dims, state_dtype, with_conv) / copy_rate * 1e6
    return {
        "case": case, "impl": "triton", "batch": layers.batch, "rows": layers.rows,
        "pending": 8 if case == "commit" else statistics.mean(fills(case, layers.batch)),
        "heads": [layers.dims.num_k_heads, layers.dims.num_v_heads],
        "state_dtype": str(state_dtype).removeprefix("torch."), "with_conv": with_conv,
        "cut": None if shape is None else shape._asdict(), "us": round(first, 2),
        "us_again": round(again, 2), "baseline_us": None, "floor_us": round(floor, 2),
    }  # fmt: skip


# The run


def variants(rows: int, state_dtype: torch.dtype) -> list[Cut]:
    """Other cuts than the chosen one, for tuning."""
    base = cut(model_dims(), rows, HISTORY, state_dtype, whole_head=True)
    found = []
    for warps in (4, 8) if rows <= 16 else (8, 16):
        for registers in (None, 128, 168) if warps == 4 else (None, 128):
            if warps * 32 * (registers or 0) <= 65536:
                found.append(base._replace(warps=warps, registers=registers))
    return found


def compile_one(rows: int, case: str, state_dtype: torch.dtype, shape: Cut | None) -> None:
    """Compiles what a case needs, in a process of its own, into the cache that all share."""
    layers = Layers(1, rows, state_dtype, model_dims())
    pending = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    layers.each = layers.each[:1]
    layers.run(pending, fold_always=case == "reconstruct", with_conv=True, shape=shape)()
    torch.cuda.synchronize()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("output", type=Path)
    arguments.add_argument("--quick", action="store_true", help="bf16 state alone")
    arguments.add_argument("--tune", action="store_true", help="other cuts besides")
    arguments.add_argument("--seconds", type=float, default=600, help="starts no further case after that")
    options = arguments.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    dtypes = (bf16,) if options.quick else (bf16, fp32)
    jobs: list[tuple[int, str, torch.dtype, Cut | None]] = [
        (rows, case, dtype, None) for dtype in dtypes for rows in (4, 40) for case in ("verify", "reconstruct")
    ]
    if options.tune:
        jobs += [(rows, "verify", bf16, shape) for rows in (4, 40) for shape in variants(rows, bf16)]
    small = GDNDims(2, 4, 128, 128)
    checks = [
        (4, bf16, bf16, small, "deferred"), (15, bf16, bf16, small, "deferred"), (40, bf16, bf16, small, "reconstruct"),
        (15, fp32, bf16, small, "deferred"), (4, fp32, fp32, small, "reconstruct"), (4, fp16, fp16, small, "deferred"),
        (4, bf16, fp16, small, "deferred"), (15, bf16, bf16, GDNDims(1, 8, 64, 64), "deferred"),
        (4, bf16, bf16, GDNDims(2, 6, 256, 128), "deferred"), (1, bf16, bf16, small, "deferred"),
    ]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        compiled = pool.starmap_async(compile_one, jobs, chunksize=1)
        records: list[dict[str, Any]] = pool.starmap(checked, checks, chunksize=1)
        compiled.wait()
    for record in records:
        print(json.dumps(record), flush=True)
    failed = [record for record in records if not record["passed"]]
    print(
        f"compiled {len(jobs)} variants and ran {len(checks)} checks, {time.perf_counter() - started:.0f} s", flush=True
    )

    copy_rate = bandwidth()
    print(f"copy bandwidth {copy_rate / 1e12:.2f} TB/s; {time.perf_counter() - started:.0f} s")
    plans = [
        (batch, rows, dtype)
        for dtype in dtypes
        for rows in (4, 40, 15, 1)
        for batch in BATCHES
    ]  # fmt: skip
    print(f"{'case':12} {'state':9} {'rows':>4} {'batch':>5} {'conv':>5} {'us':>8} {'again':>8} {'floor':>8} ratio cut")
    for batch, rows, dtype in plans:
        if time.perf_counter() - started > options.seconds:
            print("out of time")
            break
        layers = Layers(batch, rows, dtype, model_dims())
        todo: list[dict[str, Any]] = [{"case": case} for case in ("verify", "reconstruct", "deferred", "commit")]
        if rows == 1:
            todo = [{"case": "decode"}]
        elif rows != 4:
            todo = todo[:2]
        if rows != 1:
            todo.append({"case": "verify", "with_conv": True})
        if options.tune and dtype == bf16 and rows in (4, 40) and batch in (8, 64, 256):
            todo += [{"case": "verify", "shape": shape} for shape in variants(rows, dtype)]
        for what in todo:
            try:
                record = measure(layers, state_dtype=dtype, copy_rate=copy_rate, **what)
            except (
                RuntimeError,
                triton.TritonError,
            ) as reason:  # a cut that the device cannot hold, say: the other cases still count
                record = {"case": what["case"], "batch": batch, "rows": rows, "error": str(reason)}
                print(record, flush=True)
                records.append(record)
                failed.append(record)
                continue
            records.append(record)
            shape = what.get("shape")
            print(
                f"{record['case']:12} {record['state_dtype']:9} {rows:4} {batch:5} {record['with_conv']!s:>5} "
                f"{record['us']:8.2f} {record['us_again']:8.2f} {record['floor_us']:8.2f} "
                f"{record['us'] / record['floor_us']:6.2f} {'' if shape is None else (shape.warps, shape.registers)}",
                flush=True,
            )
        del layers
        torch.cuda.empty_cache()
    options.output.write_text(
        json.dumps({**provenance(), "copy_bytes_per_s": copy_rate, "records": records}, indent=1) + "\n"
    )
    print(f"{time.perf_counter() - started:.0f} s, {len(failed)} checks failed")
    if failed:
        raise SystemExit(1)


def provenance() -> dict[str, Any]:
    """Where the numbers come from."""
    try:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    except FileNotFoundError:
        driver = ""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"gpu": torch.cuda.get_device_name(), "driver": driver},
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "treewy": treewy.__version__,
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
