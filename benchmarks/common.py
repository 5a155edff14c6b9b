"""What the benchmark scripts share: prompts, names of shapes, and results that say where they come from."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from treewy.bench.provenance import provenance
from treewy.model import MODEL_DIR

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results"


def tokenizer() -> Tokenizer:
    """The shipped model's."""
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def held_out_prompts(count: int, length: int = 256) -> list[list[int]]:
    """The first `length` tokens of the first `count` held-out documents that go on for as long again."""
    encode = tokenizer().encode
    documents = lzma.decompress((DATA / "heldout.txt.xz").read_bytes()).decode().split("\0")
    prompts = (ids[:length] for document in documents if len(ids := encode(document).ids) >= 2 * length)
    return [prompt for prompt, _ in zip(prompts, range(count), strict=False)]


def text_prompts(name: str, count: int, longest: int = 1024) -> list[list[int]]:
    """`count` prompts of `spec_bench` or `humaneval`, evenly spread over the file, cut to their last tokens."""
    encode = tokenizer().encode
    text = lzma.decompress((DATA / f"{name}.jsonl.xz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    return [encode(row["prompt"]).ids[-longest:] for row in rows[:: max(1, len(rows) // count)][:count]]


def shape_name(kwargs: dict[str, Any]) -> str:
    """A decoder's shape arguments as the tables name them."""
    if "draft_tree_budget" in kwargs:
        return f"best-first {kwargs['draft_tree_budget']} rows, depth <= {kwargs['max_draft_depth']}"
    widths = kwargs["draft_tree_widths"]
    return f"chain {len(widths)}" if set(widths) == {1} else str(tuple(widths)).replace(" ", "")


def read(name: str) -> dict[str, Any]:
    """`results/NAME.json`."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def write(name: str, method: str, records: list[dict[str, Any]], earlier_command: str = "") -> None:
    """Writes `results/NAME.json` whole or not at all; `earlier_command` made the records that are kept."""
    command = " ".join(["python", *sys.argv])
    where = provenance("transformers")
    where["machine"]["cores"] = torch.get_num_threads()
    document = {
        "command": f"{earlier_command} && {command}" if earlier_command else command,
        **where,
        "method": method,
        "records": records,
    }
    RESULTS.mkdir(exist_ok=True)
    unfinished = RESULTS / f"{name}.json.part"
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    head = json.dumps({key: value for key, value in document.items() if key != "records"}, indent=1)
    unfinished.write_text(f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n')
    unfinished.replace(RESULTS / f"{name}.json")
