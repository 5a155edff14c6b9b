"""Serving with one recurrent state a request beside vLLM's own speculation and none, on one GPU.

    pip install 'treewy[vllm,bench]'
    python benchmarks/serving.py                           # all of it: 4 arms, 2 memory limits, 6 concurrencies
    python benchmarks/serving.py --gmu 0.6 --arm deferred store_all --concurrency 64 128 --name mine
    python benchmarks/serving.py --show                    # the tables again, anywhere

Writes results/NAME.json after every point, so that an interrupted run keeps what there is, and prints tables.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
ARMS = ("none", "store_all", "reconstruct", "deferred")
LIMITS = (0.6, 0.9)
CONCURRENCIES = (1, 8, 32, 64, 128, 256)
ACCEPTANCE = 3.23
DRAFTS = 3
INPUT, OUTPUT = 512, 256
MOST = 256
"""Requests that may run at once, in every arm."""
LEAST = 48
"""Requests of a point, however few are under way at once."""
ENGINE = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": MOST,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "seed": 0,
}
DECODES = (1, 2, 4, 8, 16, 32, 64, 80, 96, 128, 160, 192, 224, 256)
"""Requests of captured decode batches."""
MIXED = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens of captured steps with prompts, besides those of decode batches."""
MODEL = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "mtp_num_hidden_layers": 1,
    "mamba_ssm_dtype": "bfloat16",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Dimensions of Qwen3.5-35B-A3B, text only, with states in bf16."""
METHOD = f"""vLLM's AsyncLLM, an engine an arm and memory limit, weights random (load format dummy), so acceptance is
vLLM's synthetic one of {ACCEPTANCE} tokens a window, MTP of depth {DRAFTS}; prompts of {INPUT} random tokens, {OUTPUT}
tokens out, greedy, prefix caching off. Closed loop: as many requests as the concurrency are under way, the next starts
when one ends, twice as many in all (at least {LEAST}); the same prompts in every arm. Warmed up with a burst of short
requests. tokens_per_s counts output tokens over the whole point, its start and end included; ttft is from the request
to its first token, tpot_ms the mean over requests of the time between tokens after the first; running, waiting and
KV-cache peaks are the scheduler's, step by step. step_ms_decode and step_ms_mixed are medians of the time between the
outputs of steps without and with prompt tokens. state_bytes_per_request is what a running request holds in recurrent
states, side buffers included. GDN prompts by the Triton kernels of vLLM. In all arms decode batches are captured as
full CUDA graphs and steps with prompts as piecewise ones between attention and GDN layers (FULL_AND_PIECEWISE),
captured by vLLM """
CAPTURED = {
    "1": "without torch.compile (VLLM_USE_BREAKABLE_CUDAGRAPH=1), so what Inductor would fuse stays apart.",
    "0": "through torch.compile with Inductor (VLLM_USE_BREAKABLE_CUDAGRAPH=0).",
}


def engine_settings(arm: str, gmu: float, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM's settings of an arm."""
    rows = 1 if arm == "none" else 1 + DRAFTS
    settings: dict[str, Any] = {
        **ENGINE,
        "model": model,
        "gpu_memory_utilization": gmu,
        "compilation_config": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": sorted({*(rows * count for count in DECODES), *MIXED}),
        },
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    if arm != "none":
        settings["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": DRAFTS,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": ACCEPTANCE,
        }
        settings["additional_config"]["treewy"] = {"mamba_state_commit": arm}
    additional = {**settings["additional_config"], **extra.get("additional_config", {})}
    return {**settings, **extra, "additional_config": additional}


class Observer:
    """What the scheduler says of every step, through vLLM's interface for loggers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins a point."""
        self.running = self.waiting = self.preemptions = self.drafts = self.accepted = 0
        self.usage = 0.0
        self.last: float | None = None
        self.gaps: dict[str, list[float]] = {"decode": [], "mixed": []}

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """A step's outputs have arrived."""
        now, last = time.perf_counter(), self.last
        self.last = now
        if scheduler_stats is not None:
            self.running = max(self.running, scheduler_stats.num_running_reqs)
            self.waiting = max(self.waiting, scheduler_stats.num_waiting_reqs)
            self.usage = max(self.usage, scheduler_stats.kv_cache_usage)
            if scheduler_stats.spec_decoding_stats is not None:
                self.drafts += scheduler_stats.spec_decoding_stats.num_drafts
                self.accepted += scheduler_stats.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            if last is not None:
                self.gaps["mixed" if iteration_stats.num_prompt_tokens else "decode"].append(now - last)

    def median_gap(self, kind: str) -> float | None:
        """Milliseconds."""
        return round(1e3 * statistics.median(self.gaps[kind]), 2) if self.gaps[kind] else None


async def closed_loop(engine: Any, name: str, concurrency: int, count: int, output: int) -> list[tuple[float, ...]]:
    """Start, first token, last token of every request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(concurrency)
    waiting = [[rng.randrange(4, 32000) for _ in range(INPUT)] for _ in range(count)]
    parameters = SamplingParams(
        temperature=0,
        max_tokens=output,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    times: list[tuple[float, ...]] = []

    async def client() -> None:
        while waiting:
            prompt = waiting.pop()
            began, first, seen = time.perf_counter(), None, 0
            async for part in engine.generate(
                {"prompt_token_ids": prompt}, parameters, f"{name}-{concurrency}-{len(waiting)}"
            ):
                seen += len(part.outputs[0].token_ids)
                first = first or (time.perf_counter() if seen else None)
            if seen != output or first is None:
                raise SystemExit(f"a request gave {seen} of {output} tokens")
            times.append((began, first, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return times


async def measure(arm: str, gmu: float, concurrencies: list[int], model: str, extra: dict[str, Any]) -> Any:
    """One engine: a record for every concurrency, as it is there."""
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # read when vLLM is imported
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    observer = Observer()
    logger = type("Logger", (StatLoggerBase,), {
        "__init__": lambda *_, **__: None,
        "record": lambda _, *a, **k: observer.record(*a, **k),
        "log_engine_initialized": lambda _: None,
    })  # fmt: skip
    settings = engine_settings(arm, gmu, model, extra)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings), stat_loggers=[logger])
    held = state_bytes(engine.vllm_config, arm)
    try:
        for concurrency in (min(64, max(concurrencies)), 1):
            await closed_loop(engine, "warm", concurrency, concurrency, 8)
        for concurrency in concurrencies:
            observer.reset()
            times = await closed_loop(engine, "run", concurrency, max(LEAST, 2 * concurrency), OUTPUT)
            seconds = max(last for *_, last in times) - min(first for first, *_ in times)
            waits = sorted(1e3 * (first - began) for began, first, _ in times)
            yield {
                "arm": arm,
                "gpu_memory_utilization": gmu,
                "concurrency": concurrency,
                "tokens_per_s": round(len(times) * OUTPUT / seconds, 1),
                "ttft_p50_ms": round(percentile(waits, 50), 1),
                "ttft_p99_ms": round(percentile(waits, 99), 1),
                "tpot_ms": round(1e3 * statistics.mean((last - first) / (OUTPUT - 1) for _, first, last in times), 3),
                "running_peak": observer.running,
                "waiting_peak": observer.waiting,
                "kv_usage_peak": round(observer.usage, 4),
                "preemptions": observer.preemptions,
                "acceptance_length": round(1 + observer.accepted / observer.drafts, 3) if observer.drafts else 1.0,
                "state_bytes_per_request": held,
                "step_ms_decode": observer.median_gap("decode"),
                "step_ms_mixed": observer.median_gap("mixed"),
                "steps_mixed": len(observer.gaps["mixed"]),
                "steps": sum(map(len, observer.gaps.values())),
                "requests": len(times),
            }
    finally:
        engine.shutdown()


def percentile(ordered: list[float], percent: int) -> float:
    """Of sorted values, the nearest rank."""
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def state_bytes(config: Any, arm: str) -> int:
    """Bytes of recurrent state that a running request holds, side buffers included."""
    from treewy.vllm.options import Options
    from treewy.vllm.running import IN_BLOCK, state_spec

    spec = state_spec(config, Options(arm if arm in ("reconstruct", "deferred") else "reconstruct"))
    if arm in ("reconstruct", "deferred"):
        return spec.bytes_per_request
    pieces = spec.bytes_by_piece()
    rows = 0 if arm == "none" else DRAFTS
    block = sum(pieces[name] for name in IN_BLOCK)
    return (1 + rows) * (block + rows * spec.layers.conv_dim * spec.input_dtype.itemsize * spec.num_layers)


def save(name: str, record: dict[str, Any], command: str) -> None:
    """Puts a record into results/NAME.json, in the place of an earlier one of the same point."""
    from treewy.bench.provenance import provenance

    file = RESULTS / f"{name}.json"
    point = ("arm", "gpu_memory_utilization", "concurrency")
    old = json.loads(file.read_text()) if file.exists() else {"records": []}
    here = [record[key] for key in point]
    records = [other for other in old["records"] if [other[key] for key in point] != here] + [record]
    missing = set(product(ARMS, LIMITS, CONCURRENCIES)) - {tuple(each[key] for key in point) for each in records}
    begun = {"command": command, **provenance("vllm", "triton")}
    method = METHOD.replace("\n", " ") + CAPTURED[os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")]
    told = {"complete": not missing, "method": method, "model": MODEL}
    noted = {key: value for key, value in old.items() if key not in {"records", *begun, *told}}  # by hand
    head = json.dumps({**begun, **noted, **told}, indent=1, ensure_ascii=False)
    lines = ",\n".join("  " + json.dumps(each) for each in records)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n')
    unfinished.replace(file)


def tables(records: list[dict[str, Any]]) -> Iterator[Table]:
    """A table for every memory limit."""
    for gmu in sorted({record["gpu_memory_utilization"] for record in records}):
        table = Table(
            "concurrent", "arm", "tokens/s", "of store_all", "TTFT p50", "p99", "TPOT", "running", "waiting", "KV",
            "preempted", "decode step", "mixed step", title=f"gpu_memory_utilization {gmu}; milliseconds",
        )  # fmt: skip
        mine = [record for record in records if record["gpu_memory_utilization"] == gmu]
        base = {record["concurrency"]: record["tokens_per_s"] for record in mine if record["arm"] == "store_all"}
        for r in sorted(mine, key=lambda record: (record["concurrency"], ARMS.index(record["arm"]))):
            ratio = f"{r['tokens_per_s'] / base[r['concurrency']]:.2f}" if r["concurrency"] in base else ""
            table.add_row(
                *map(str, (r["concurrency"], r["arm"], r["tokens_per_s"], ratio, r["ttft_p50_ms"], r["ttft_p99_ms"],
                r["tpot_ms"], r["running_peak"], r["waiting_peak"], f"{r['kv_usage_peak']:.1%}", r["preemptions"],
                r["step_ms_decode"], r["step_ms_mixed"]))
            )  # fmt: skip
        yield table


def main() -> None:
    """One process an engine, so that a failure loses no more than its own points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gmu", type=float, nargs="+", default=list(LIMITS), help="gpu_memory_utilization")
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCIES))
    parser.add_argument("--model-config", type=Path, help="config.json of another model, in place of MODEL")
    parser.add_argument("--engine", type=json.loads, default={}, help="more settings of vLLM's engine, as JSON")
    parser.add_argument("--name", default="serving", help="results/NAME.json")
    parser.add_argument("--show", action="store_true", help="print the tables of results/NAME.json")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for an engine")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--command", default=shlex.join(["python", *sys.argv]), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        asyncio.run(work(arguments))
        return
    file = RESULTS / f"{arguments.name}.json"
    if arguments.show and not file.exists():
        parser.exit(2, f"{os.path.relpath(file)} does not exist; give --name, such as serving-h200\n")
    failed = []
    for gmu in [] if arguments.show else arguments.gmu:
        for arm in arguments.arm:
            command = [sys.executable, *sys.argv, "--worker", "--gmu", str(gmu), "--arm", arm]
            try:
                done = subprocess.run([*command, "--command", arguments.command], timeout=arguments.timeout).returncode
            except subprocess.TimeoutExpired:
                done = -1
            if done:
                failed.append(f"{arm} at {gmu}")
    for table in tables(json.loads(file.read_text())["records"]) if file.exists() else ():
        Console(width=160).print(table)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


async def work(arguments: argparse.Namespace) -> None:
    """The points of one engine."""
    with tempfile.TemporaryDirectory() as folder:
        config = arguments.model_config.read_text() if arguments.model_config else json.dumps(MODEL)
        (Path(folder) / "config.json").write_text(config)
        arm, gmu = arguments.arm[0], arguments.gmu[0]
        async for record in measure(arm, gmu, arguments.concurrency, folder, arguments.engine):
            save(arguments.name, record, arguments.command)
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
