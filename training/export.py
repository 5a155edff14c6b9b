"""Write a training checkpoint as a Hugging Face folder that ``from_pretrained`` reads unchanged.

Usage: ``python training/export.py --checkpoint RUN/checkpoint.pt --data DIR --out src/treewy/model``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from mtp_model import TrunkWithMTP, make_config
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
}


def exported_tensors(model: TrunkWithMTP) -> dict[str, Tensor]:
    """Tensors under their checkpoint names: bfloat16, except ``A_log``, which stays in float32."""
    tensors = {}
    for name, p in model.lm.state_dict().items():
        if name != "lm_head.weight":  # tied to the embedding
            tensors[name] = p.to("cpu", torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
    for name, p in model.mtp.state_dict().items():
        tensors[f"mtp.{name}"] = p.to("cpu", torch.bfloat16).contiguous()
    return tensors


def export(model: TrunkWithMTP, tokenizer: Path, folder: Path) -> None:
    """Write config, generation config, weights and tokenizer into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=0, pad_token_id=3, do_sample=False).save_pretrained(folder)
    save_file(exported_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")


def main() -> None:
    """Read a checkpoint and export it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    model = TrunkWithMTP(make_config(saved["preset"]))
    model.load_state_dict(saved["model"])
    export(model, args.data / "tokenizer.json", args.out)
    size = (args.out / "model.safetensors").stat().st_size
    print(f"exported step {saved['step']} to {args.out}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
