"""How many tokens a round accepts, by shape and rows, for the shipped model and its MTP head.

    python benchmarks/model_acceptance.py [--sets held-out spec-bench humaneval] [--temperatures 0 0.7 1]
        [--sequences 80] [--append]

Writes results/model-acceptance.json and prints the table. A server pays for rows, so acceptance stands against rows.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import held_out_prompts, read, shape_name, text_prompts, write
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from treewy.acceptance import SamplingParams
from treewy.model import MODEL_DIR
from treewy.transformers import SpeculativeDecoder

CHAINS = [{"draft_tree_widths": (1,) * depth} for depth in range(1, 9)]
TREES = [{"draft_tree_widths": widths} for widths in ((2, 2), (3, 2, 1), (2, 2, 2), (3, 3, 3))]
BEST_FIRST = [{"draft_tree_budget": rows, "max_draft_depth": 6} for rows in (8, 15, 24, 40)]
ALL_SHAPES: list[dict[str, Any]] = [*CHAINS, *TREES, *BEST_FIRST]
FEW_SHAPES: list[dict[str, Any]] = [CHAINS[2], CHAINS[7], TREES[2], TREES[3], BEST_FIRST[1], BEST_FIRST[3]]
DRAWN: list[dict[str, Any]] = [CHAINS[2], TREES[2], TREES[3]]
HORIZONS = (64, 128)
METHOD = """Greedy or sampled decoding from prompts of the named set in one batch, stopping at the end-of-text token.
Held-out prompts are the first 256 tokens of a document. A record covers the windows that begin within the first
new_tokens new tokens of each sequence; decoding goes 8 tokens further, so that no window is cut by the end.
acceptance_length is the mean number of tokens accepted per window, the bonus token included; per_depth the share of
windows of which a node at that depth was accepted; rows the mean rows per window. In sampling, drafts are the most
probable tokens ("chosen") or drawn from the head's distribution ("drawn"); both are lossless. looping is the share
of sequences that end in a repetition of period <= 32 (a 9 M parameter base model, decoded greedily, falls into
loops; in a loop everything is accepted and depth alone counts)."""


def measure(model: Any, prompts: list[list[int]], shape: dict[str, Any], temperature: float, drawn: bool) -> list[dict]:
    """One record per horizon."""
    began = time.perf_counter()
    decoder = SpeculativeDecoder(model, "mtp", draw_drafts=drawn, **shape)
    params = [SamplingParams(temperature, seed=i if temperature else None) for i in range(len(prompts))]
    longest = HORIZONS[-1] + 8
    run = decoder.run(prompts, params, longest, lambda request: "stop" if request.tokens[-1] == 0 else None)
    windows = [(longest - step.remaining, step) for steps in run for step in steps if step.rows]
    records = []
    for horizon in HORIZONS:
        steps = [step for position, step in windows if position < horizon]
        depths = range(1, max(step.accepted for step in steps))
        texts = [request.tokens[request.prompt_length :][:horizon] for request in run.requests]
        records.append(
            {
                "shape": shape_name(shape),
                "temperature": temperature,
                "drafts": "drawn" if drawn else "chosen",
                "new_tokens": horizon,
                "rows": round(sum(step.rows for step in steps) / len(steps), 2),
                "acceptance_length": round(sum(step.accepted for step in steps) / len(steps), 4),
                "per_depth": [round(sum(step.accepted > depth for step in steps) / len(steps), 4) for depth in depths],
                "windows": len(steps),
                "sequences": len(prompts),
                "looping": round(sum(map(loops, texts)) / len(texts), 3),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    return records


def loops(text: list[int]) -> bool:
    """Whether a text ends in a repetition of period <= 32 (twice at least, 16 tokens at least)."""
    return any(
        text[-repeat:] == text[-repeat - period : -period] for period in range(1, 33) if (repeat := max(period, 16))
    )


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=["held-out", "spec-bench", "humaneval"], default=["held-out"])
    parser.add_argument("--sequences", type=int, default=80)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--append", action="store_true", help="keep the records that are there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    sets: dict[str, tuple[list[list[int]], list[dict[str, Any]]]] = {}
    if "held-out" in arguments.sets:
        sets["held-out documents"] = held_out_prompts(arguments.sequences), ALL_SHAPES
    if "spec-bench" in arguments.sets:
        sets["spec-bench"] = text_prompts("spec_bench", arguments.sequences), FEW_SHAPES
    if "humaneval" in arguments.sets:
        sets["humaneval"] = text_prompts("humaneval", arguments.sequences), FEW_SHAPES
    console, records, earlier = Console(), [], ""
    if arguments.append:
        kept = read("model-acceptance")
        records, earlier = kept["records"], kept["command"]
    for name, (prompts, shapes) in sets.items():
        for temperature in arguments.temperatures:
            for shape in shapes:
                drawn = [False, True] if temperature and shape in DRAWN else [False]
                for drawn_drafts in drawn:
                    for record in measure(model, prompts, shape, temperature, drawn_drafts):
                        records.append({"prompts": name, **record})
                        console.print_json(data=records[-1], indent=None)
                write("model-acceptance", METHOD.replace("\n", " "), records, earlier)
    table = Table("prompts", "temperature", "drafts", "new tokens", "shape", "rows", "accepted", "per depth", "looping")
    for record in records:
        fields = ("prompts", "temperature", "drafts", "new_tokens", "shape", "rows", "acceptance_length")
        per_depth = " ".join(f"{share:.2f}" for share in record["per_depth"])
        table.add_row(*(str(record[field]) for field in fields), per_depth, str(record["looping"]))
    console.print(table)


if __name__ == "__main__":
    main()
