"""Tokens per second of the shipped model on one CPU thread, batch 1, against plain decoding in the same run.

    python benchmarks/generate_cpu.py [--new-tokens 256] [--repeats 5]

Writes results/generate-cpu.json and prints the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import held_out_prompts, shape_name, write
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from treewy.acceptance import SamplingParams
from treewy.model import MODEL_DIR
from treewy.transformers import SpeculativeDecoder

SHAPES: list[dict[str, Any]] = [
    {"draft_tree_widths": (1, 1, 1)},
    {"draft_tree_widths": (1,) * 6},
    {"draft_tree_widths": (2, 2, 2)},
    {"draft_tree_widths": (3, 3, 3)},
    {"draft_tree_budget": 8, "max_draft_depth": 6},
    {"draft_tree_budget": 15, "max_draft_depth": 6},
]
MODES = ("store_all", "reconstruct", "deferred")
METHOD = """One thread, batch 1, fp32, greedy, stop tokens off. In every repeat, one held-out prompt of 256 tokens is
decoded by plain decoding (N = 0, same code, reported as plain_tokens_per_s), by model.generate of the untouched
model (generate_tokens_per_s) and by every shape and mode, one after the other; prefill is not counted in the first
and the last, and model.generate is charged from its second token on in the same way. speedup is the median over
repeats of tokens_per_s / plain_tokens_per_s of the same repeat, spread its least and greatest value; rates are
medians. All texts of a repeat are equal. state_bytes is what one sequence's recurrent state takes, store_all_bytes
what it takes in the mode store_all for the same shape, both counted and equal to what was allocated.
acceptance_length is that of the last repeat."""


def decode(model: Any, drafter: str, prompt: list[int], new_tokens: int, **kwargs: Any) -> tuple[list[int], float, Any]:
    """Text, tokens per second after the prefill, and the run."""
    run = SpeculativeDecoder(model, drafter, **kwargs).run([prompt], SamplingParams(), new_tokens)
    rounds = iter(run)
    next(rounds)
    began = time.perf_counter()
    for _ in rounds:
        pass
    seconds = time.perf_counter() - began
    return run.requests[0].tokens, (new_tokens - 1) / seconds, run


def generate(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Text and tokens per second of `model.generate`: the time of all tokens less that of the first."""
    ids, seconds = torch.tensor([prompt]), []
    for count in (1, new_tokens):
        began = time.perf_counter()
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - began)
    return output[0].tolist(), (new_tokens - 1) / (seconds[1] - seconds[0])


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    cases = [(shape, mode) for shape in SHAPES for mode in MODES]
    rates: dict[int, list[float]] = {case: [] for case in range(len(cases))}
    plain_rates, generate_rates, runs, same = [], [], {}, 0
    decode(model, "none", held_out_prompts(1)[0], 32)  # warms caches and allocators
    for prompt in held_out_prompts(arguments.repeats):
        text, plain, _ = decode(model, "none", prompt, arguments.new_tokens)
        plain_rates.append(plain)
        theirs, rate = generate(model, prompt, arguments.new_tokens)
        generate_rates.append(rate)
        texts = [theirs]
        for case, (shape, mode) in enumerate(cases):
            decoded, rate, runs[case] = decode(
                model, "mtp", prompt, arguments.new_tokens, mamba_state_commit=mode, **shape
            )
            texts.append(decoded)
            rates[case].append(rate)
        same += all(other == text for other in texts)
    if same < arguments.repeats:
        raise SystemExit(f"only {same} of {arguments.repeats} repeats gave one text; nothing is written")
    records = []
    for case, (shape, mode) in enumerate(cases):
        state = runs[case].target.state
        assert state.nbytes == state.spec.bytes_per_request
        store_all = runs[case - case % len(MODES)].target.state
        ratios = [rate / plain for rate, plain in zip(rates[case], plain_rates, strict=True)]
        records.append(
            {
                "shape": shape_name(shape),
                "mode": mode,
                "tokens_per_s": round(statistics.median(rates[case]), 1),
                "plain_tokens_per_s": round(statistics.median(plain_rates), 1),
                "generate_tokens_per_s": round(statistics.median(generate_rates), 1),
                "speedup": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "acceptance_length": round(runs[case].statistics.acceptance_length, 3),
                "state_bytes": state.nbytes,
                "store_all_bytes": store_all.nbytes,
                "state_bytes_by_piece": state.spec.bytes_by_piece(),
            }
        )
    write("generate-cpu", METHOD.replace("\n", " "), records)
    table = Table("shape", "mode", "tokens/s", "plain", "model.generate", "speed-up", "state bytes", "of store_all")
    for record in records:
        table.add_row(
            record["shape"],
            record["mode"],
            str(record["tokens_per_s"]),
            str(record["plain_tokens_per_s"]),
            str(record["generate_tokens_per_s"]),
            f"{record['speedup']:.2f} ({record['spread'][0]:.2f} .. {record['spread'][1]:.2f})",
            f"{record['state_bytes']:,}",
            f"1/{record['store_all_bytes'] / record['state_bytes']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
