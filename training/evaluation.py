"""Measurements of the model: held-out losses, agreement of the head with the trunk, and greedy text.

Run as a script on an exported folder for the final evaluation::

    python training/evaluation.py --data DIR --model src/treewy/model --out evaluation.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from mtp_model import Forward, Ops, TrunkWithMTP, logits_of, token_loss
from text_data import gather, load_held_out_documents, load_tokens
from torch import Tensor


def autocast(device: torch.device | str) -> torch.autocast:
    """Mixed precision as used in training: bfloat16 products on the GPU, nothing on the CPU."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False)


@torch.no_grad()
def held_out_metrics(
    forward: Forward, tokens: Tensor, batches: int, batch: int, length: int, depths: int
) -> dict[str, float | list[float]]:
    """Losses and teacher-forced agreement on evenly spaced windows of held-out tokens.

    ``agreement[d - 1]`` is the share of positions at which the head's first choice is the trunk's first choice at
    every depth up to ``d``; ``conditional`` divides each by the one before.
    """
    embedding = forward.model.embedding
    bases = length - depths - 1
    starts = torch.linspace(0, tokens.numel() - length - 1, batches * batch, device=tokens.device).long()
    main, drafts, hits = 0.0, [0.0] * depths, [0.0] * depths
    for part in starts.view(batches, batch):
        ids = gather(tokens, part, length)
        with autocast(tokens.device):
            embedded = forward.embed(ids)
            hidden = forward.trunk(embedded)
            main += token_loss(hidden[:, :-1], embedding, ids[:, 1:]).item() / batches
            choice = logits_of(hidden, embedding).argmax(-1)
            so_far = torch.ones_like(ids[:, :bases], dtype=torch.bool)
            for d, out in enumerate(forward.heads(embedded, hidden, depths, bases), 1):
                logits = logits_of(out, embedding)
                drafts[d - 1] += F.cross_entropy(
                    logits.flatten(0, 1).float(), ids[:, d + 1 : d + 1 + bases].flatten()
                ).item() / batches  # fmt: skip
                so_far &= logits.argmax(-1) == choice[:, d : d + bases]
                hits[d - 1] += so_far.float().mean().item() / batches
    return {
        "held_out_loss": main,
        "mtp_losses": drafts,
        "agreement": hits,
        "conditional": [h / max(b, 1e-9) for h, b in zip(hits, [1.0, *hits[:-1]], strict=True)],
        "tokens_per_round": 1 + sum(hits),
    }


@torch.no_grad()
def continue_text(lm: torch.nn.Module, prompts: Tensor, new_tokens: int, temperature: Tensor | None = None) -> Tensor:
    """Continue a batch of equally long prompts with Hugging Face's own cached decoding.

    ``temperature`` holds one value per row (zero: greedy); without it every row is greedy.
    """
    ids, cache, rows = prompts, None, [prompts]
    for _ in range(new_tokens):
        out = lm(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        if temperature is not None:
            noise = -torch.log(torch.empty_like(logits).exponential_().clamp_min_(1e-20))
            logits = logits + noise * temperature[:, None]
        ids = logits.argmax(-1, keepdim=True)
        rows.append(ids)
    return torch.cat(rows, 1)


def in_exact_loop(tokens: list[int], longest_period: int = 32) -> bool:
    """True if the last two longest periods' worth of tokens repeats exactly with some period up to that length."""
    tail = tokens[-2 * longest_period :]
    return any(tail[period:] == tail[:-period] for period in range(1, longest_period + 1))


@torch.no_grad()
def draft_ranks(forward: Forward, ids: Tensor, depths: int) -> Tensor:
    """Rank (0 = first choice) of each row's actual token in the head's drafts: ``[rows, bases, depths]``."""
    bases = ids.shape[1] - depths - 1
    with autocast(ids.device):
        embedded = forward.embed(ids)
        outputs = forward.heads(embedded, forward.trunk(embedded), depths, bases)
        ranks = []
        for d, out in enumerate(outputs, 1):
            logits = logits_of(out, forward.model.embedding).float()
            target = ids[:, d + 1 : d + 1 + bases, None]
            ranks.append((logits > logits.gather(-1, target)).sum(-1))
    return torch.stack(ranks, -1)


def tokens_per_round(ranks: Tensor, prompt: int, depth: int, width: int = 1) -> float:
    """Replay speculative rounds on greedy text: mean tokens a round if every depth drafts its ``width`` best tokens."""
    hits = (ranks[:, :, :depth] < width).cumprod(-1).sum(-1).tolist()
    rounds = tokens = 0
    for row in hits:
        base = prompt - 1
        while base < len(row):
            rounds, tokens = rounds + 1, tokens + row[base] + 1
            base += row[base] + 1
    return tokens / rounds


def load_exported(folder: Path, device: str) -> TrunkWithMTP:
    """Read an exported folder back as a float32 :class:`TrunkWithMTP` (config, trunk and ``mtp.*`` tensors)."""
    from safetensors.torch import load_file
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    model = TrunkWithMTP(config)
    state = load_file(folder / "model.safetensors")
    head = {k.removeprefix("mtp."): v for k, v in state.items() if k.startswith("mtp.")}
    model.mtp.load_state_dict(head)
    trunk = {k: v for k, v in state.items() if not k.startswith("mtp.")}
    missing, unexpected = model.lm.load_state_dict(trunk, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"checkpoint does not fit: missing {missing}, unexpected {unexpected}")
    return model.to(device).requires_grad_(False)


def main() -> None:
    """Evaluate an exported folder and write the numbers and the greedy texts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--depths", type=int, default=8)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    from transformers import AutoTokenizer, Qwen3_5ForCausalLM

    longest = max(args.length, args.prompt_tokens + args.new_tokens)
    forward = Forward(load_exported(args.model, device), Ops(), longest)
    _, held_out = load_tokens(args.data, device, limit=1)
    result: dict = {"held_out_tokens": held_out_metrics(
        forward, held_out, args.batches, args.batch, args.length, args.depths)}  # fmt: skip
    print(json.dumps(result), flush=True)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoded = [tokenizer(d).input_ids for d in load_held_out_documents(args.data)]
    encoded = [e for e in encoded if len(e) >= args.prompt_tokens + args.new_tokens]
    if not encoded:
        raise SystemExit("no held-out document is long enough")
    chosen = [encoded[i * len(encoded) // args.prompts] for i in range(args.prompts)]
    prompts = torch.tensor([e[: args.prompt_tokens] for e in chosen], device=device)
    lm = Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device).eval()
    text = continue_text(lm, prompts, args.new_tokens)
    ranks = draft_ranks(forward, text, args.depths).cpu()
    chains = {d: tokens_per_round(ranks, args.prompt_tokens, d) for d in range(1, args.depths + 1)}
    new = text[:, args.prompt_tokens :].tolist()
    result["greedy_text"] = {
        "prompts": args.prompts,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "chain_tokens_per_round": chains,
        "width_2_depth_3": tokens_per_round(ranks, args.prompt_tokens, 3, 2),
        "width_3_depth_3": tokens_per_round(ranks, args.prompt_tokens, 3, 3),
        "loop_fraction": sum(in_exact_loop(row) for row in new) / len(new),
        "prompt_ids": prompts.tolist(),
        "new_ids": new,
    }
    args.out.write_text(json.dumps(result))
    print(json.dumps({k: v for k, v in result["greedy_text"].items() if not k.endswith("ids")}), flush=True)


if __name__ == "__main__":
    main()
