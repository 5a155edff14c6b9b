"""Train the small model and its MTP head within a given number of minutes.

    python training/train.py --data DIR --out RUN --minutes 19

Phase A trains trunk and head together on token ids (head depths 1-3).  Phase B freezes the trunk at its shipped
bfloat16 values and trains the head alone to depth 6, against the trunk's full distributions, on windows that are half
corpus and half corpus continued by the trunk itself.  Learning rates warm up, hold and fall to zero in each phase.

The run writes ``RUN/log.jsonl``, ``RUN/checkpoint.pt`` (every two minutes and at the end) and ``RUN/own_text.pt``.
``--resume`` goes on from the checkpoint; the minutes already trained count.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from evaluation import autocast, continue_text, held_out_metrics
from export import export
from mtp_model import Forward, Ops, TrunkWithMTP, make_config, round_trunk_to_bfloat16
from muon import Muon
from text_data import Windows, gather, load_tokens
from torch import Tensor

JOINT_WEIGHTS = (0.25, 0.20, 0.15)  # of the head's losses beside the trunk's, phase A
DISTIL_WEIGHTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the depths, phase B
MUON_LR, ADAM_LR = 0.02, 3e-3
HEAD_LR_SCALE = 0.5  # phase B's peak relative to phase A's
WARM_UP_STEPS = 100


def schedule(progress: float, steps: int, hold: float) -> float:
    """Learning-rate factor: warm-up over steps, constant until ``hold`` of the phase's time, then linear to zero."""
    fall = 1.0 if progress < hold else max(0.0, (1.0 - progress) / (1.0 - hold))
    return min(1.0, (steps + 1) / WARM_UP_STEPS) * fall


def make_optimizers(named: list[tuple[str, Tensor]], device: str) -> list[torch.optim.Optimizer]:
    """Muon for matrices; AdamW for the embedding, the two narrow gate projections, convolutions and vectors."""
    special = ("embed_tokens", "in_proj_a", "in_proj_b")
    matrices = [p for n, p in named if p.ndim == 2 and not any(s in n for s in special)]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen]
    cuda = device == "cuda"
    return [
        Muon(matrices, lr=torch.tensor(MUON_LR, device=device)),
        torch.optim.AdamW(
            others, lr=torch.tensor(ADAM_LR, device=device), betas=(0.9, 0.95), weight_decay=0.0,
            fused=cuda or None, capturable=cuda,
        ),
    ]  # fmt: skip


class Stepper:
    """One optimisation step as a callable; on request replayed as a CUDA graph after a few plain steps."""

    PLAIN_STEPS = 4

    def __init__(
        self, losses: Callable[[Tensor], tuple[Tensor, Tensor]], optimizers: list[torch.optim.Optimizer], graph: bool
    ) -> None:
        self.losses, self.optimizers, self.graph = losses, optimizers, graph
        self.params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        self.done = 0
        self.captured: torch.cuda.CUDAGraph | None = None
        self.ids: Tensor | None = None
        self.report: Tensor | None = None

    def set_lr(self, factor: float) -> None:
        """Set the learning rates to ``factor`` times their base values, in place."""
        for optimizer, base in zip(self.optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"].fill_(base * factor)

    def _step(self, ids: Tensor) -> Tensor:
        with autocast(ids.device):
            loss, report = self.losses(ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        return torch.cat([report.detach(), norm.detach().reshape(1)])

    def _clear(self) -> None:
        for p in self.params:
            p.grad = None

    def __call__(self, ids: Tensor) -> Tensor:
        """Take a step; returns losses and the gradient norm as one tensor (overwritten by the next step)."""
        self.done += 1
        if not self.graph:
            report = self._step(ids)
            self._clear()
            return report
        if self.captured is None and self.done <= self.PLAIN_STEPS:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                report = self._step(ids)
                self._clear()
            torch.cuda.current_stream().wait_stream(side)
            return report
        if self.captured is None:
            self.ids = ids.clone()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.report = self._step(self.ids)
            self.captured = graph
            print("captured the step as a CUDA graph", flush=True)
        assert self.ids is not None
        assert self.report is not None
        self.ids.copy_(ids)
        self.captured.replay()
        return self.report


class Run:
    """Everything a training run holds, with its clock, log and checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(args.seed)
        args.out.mkdir(parents=True, exist_ok=True)
        self.train_tokens, self.held_out = load_tokens(args.data, self.device, args.limit_tokens)
        self.model = TrunkWithMTP(make_config(args.preset)).to(self.device)
        self.phase = "A"
        self.step = self.phase_steps = self.tokens = 0
        self.earlier = 0.0  # seconds trained before this process
        self.phase_b_start = 0.0
        self.last_save = self.last_evaluation = self.started
        saved = self._load() if args.resume else None
        self.optimizers = self._phase_optimizers()
        if saved:
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
                for group in optimizer.param_groups:
                    group["lr"] = torch.tensor(float(group["lr"]), device=self.device)
            torch.set_rng_state(saved["rng"].cpu())
            if saved["cuda_rng"] is not None and self.device == "cuda":
                torch.cuda.set_rng_state(saved["cuda_rng"].cpu())
        ops = Ops() if args.engine == "eager" else Ops().compiled()
        self.forward = Forward(self.model, ops, args.length)
        self.plain_forward = Forward(self.model, Ops(), args.length)
        self.log_file = (args.out / "log.jsonl").open("a")
        count = sum(p.numel() for p in self.model.parameters())
        self.log(event="start", engine=args.engine, device=self.device, parameters=count, torch=torch.__version__)

    # --- clock, log, checkpoint

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, over all resumed processes."""
        return self.earlier + time.monotonic() - self.started

    @property
    def total(self) -> float:
        """Seconds of training in all."""
        return self.args.minutes * 60

    def log(self, **fields: object) -> None:
        """Append one line to the log and print it."""

        def short(x: object) -> object:
            if isinstance(x, float):
                return round(x, 5)
            return [short(y) for y in x] if isinstance(x, list | tuple) else x

        line = json.dumps({k: short(v) for k, v in dict(seconds=self.elapsed, phase=self.phase, **fields).items()})
        self.log_file.write(line + "\n")
        self.log_file.flush()
        print(line, flush=True)

    def save(self) -> None:
        """Write the checkpoint beside its final name, then rename it, so that a reader never sees half of one."""
        state = {
            "preset": self.args.preset,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "phase": self.phase,
            "step": self.step,
            "phase_steps": self.phase_steps,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "phase_b_start": self.phase_b_start,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device == "cuda" else None,
        }
        target = self.args.out / "checkpoint.pt"
        torch.save(state, target.with_suffix(".tmp"))
        os.replace(target.with_suffix(".tmp"), target)
        self.last_save = time.monotonic()

    def _load(self) -> dict | None:
        path = self.args.out / "checkpoint.pt"
        if not path.exists():
            return None
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.phase, self.step, self.phase_steps = saved["phase"], saved["step"], saved["phase_steps"]
        self.tokens, self.earlier, self.phase_b_start = saved["tokens"], saved["elapsed"], saved["phase_b_start"]
        return saved

    def _phase_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.phase == "A":
            return make_optimizers(list(self.model.named_parameters()), self.device)
        self.model.lm.requires_grad_(False)
        return make_optimizers(list(self.model.mtp.named_parameters()), self.device)

    # --- losses

    def joint_loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Phase A: the trunk's loss plus a little of the head's."""
        main, drafts = self.forward.joint_losses(ids, len(JOINT_WEIGHTS))
        loss = main + sum(w * d for w, d in zip(JOINT_WEIGHTS, drafts, strict=True))
        return loss, torch.stack([main, *drafts])

    def distil_loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Phase B: the head's divergence from the trunk at six depths."""
        drafts = self.forward.distil_losses(ids, len(DISTIL_WEIGHTS))
        loss = sum(w * d for w, d in zip(DISTIL_WEIGHTS, drafts, strict=True)) / sum(DISTIL_WEIGHTS)
        assert isinstance(loss, Tensor)
        return loss, torch.stack(drafts)

    # --- the phases

    def evaluate(self) -> None:
        """Log held-out losses and teacher-forced agreement."""
        small = self.device == "cpu"
        depths = len(JOINT_WEIGHTS if self.phase == "A" else DISTIL_WEIGHTS)
        metrics = held_out_metrics(
            self.plain_forward, self.held_out, 1 if small else 4, self.args.batch // 2 or 1, self.args.length, depths
        )
        self.log(event="held_out", step=self.step, tokens=self.tokens, **metrics)
        self.last_evaluation = time.monotonic()

    def loop(self, stepper: Stepper, batch_of: Callable[[int], Tensor], start: float, end: float, hold: float) -> bool:
        """Steps until ``end`` (in seconds of training); returns False if ``--stop-after`` ended it early."""
        scale = 1.0 if self.phase == "A" else HEAD_LR_SCALE
        mark_time, mark_tokens = time.monotonic(), self.tokens
        while (now := self.elapsed) < end:
            stepper.set_lr(scale * schedule((now - start) / (end - start), self.phase_steps, hold))
            ids = batch_of(self.phase_steps)
            report = stepper(ids)
            self.step, self.phase_steps = self.step + 1, self.phase_steps + 1
            self.tokens += ids.numel()
            if self.device == "cuda" and self.step % 2 == 0:
                torch.cuda.synchronize()
            if self.phase_steps <= 5 or self.step % self.args.log_every == 0:
                *losses, norm = report.tolist()
                if not math.isfinite(sum(losses) + norm):
                    raise SystemExit(f"step {self.step}: losses {losses}, gradient norm {norm}")
                rate = (self.tokens - mark_tokens) / (time.monotonic() - mark_time)
                mark_time, mark_tokens = time.monotonic(), self.tokens
                lr = float(self.optimizers[0].param_groups[0]["lr"])
                self.log(event="train", step=self.step, tokens=self.tokens, tokens_per_second=round(rate), lr=lr,
                         losses=losses, gradient_norm=norm)  # fmt: skip
            if time.monotonic() - self.last_evaluation > self.args.evaluate_every:
                self.evaluate()
                mark_time, mark_tokens = time.monotonic(), self.tokens
            if time.monotonic() - self.last_save > self.args.save_every:
                self.save()
                mark_time, mark_tokens = time.monotonic(), self.tokens
            if self.args.stop_after and self.step >= self.args.stop_after:
                self.save()
                return False
        return True

    def own_text(self) -> Tensor:
        """Windows whose last three eighths the trunk wrote itself, half greedily and half by sampling."""
        path = self.args.out / "own_text.pt"
        if self.args.resume and path.exists():
            return torch.load(path, map_location=self.device, weights_only=True)
        length = self.args.length
        prompt, rows = length * 5 // 8, self.args.own_text_batch
        lm = copy.deepcopy(self.model.lm).eval()
        for name, p in lm.named_parameters():
            if not name.endswith("A_log"):
                p.data = p.data.bfloat16()
        generator = torch.Generator().manual_seed(self.args.seed)
        parts, begun = [], time.monotonic()
        while not parts or time.monotonic() - begun < self.args.own_text_seconds * len(parts) / (len(parts) + 1):
            starts = torch.randint(self.train_tokens.numel() - prompt, (rows,), generator=generator).to(self.device)
            temperature = torch.zeros(rows, device=self.device)
            temperature[rows // 2 :] = torch.linspace(0.3, 1.0, rows - rows // 2, device=self.device)
            prompts = gather(self.train_tokens, starts, prompt)
            parts.append(continue_text(lm, prompts, length - prompt, temperature).to(torch.int16))
            self.log(event="own_text", windows=rows * len(parts), spent=time.monotonic() - begun)
        pool = torch.cat(parts)
        pool = pool[torch.randperm(len(pool), generator=generator).to(self.device)]
        torch.save(pool, path)
        return pool

    def train(self) -> None:
        """Run what is left of both phases, then save and export."""
        args = self.args
        graph = args.engine == "graph" and self.device == "cuda"
        windows = Windows(self.train_tokens, args.batch, args.length, args.seed)
        boundary = self.total * args.phase_a
        if self.phase == "A":
            if not self.loop(Stepper(self.joint_loss, self.optimizers, graph), windows, 0.0, boundary, hold=0.4):
                return
            self.evaluate()
            round_trunk_to_bfloat16(self.model)
            self.phase, self.phase_steps, self.phase_b_start = "B", 0, self.elapsed
            for p in self.model.parameters():
                p.grad = None
            self.optimizers = self._phase_optimizers()
            gc.collect()
            torch.cuda.empty_cache()
            self.save()
            export(self.model, args.data / "tokenizer.json", args.out / "phase_a")
        pool = self.own_text()
        half = args.batch // 2 or 1
        corpus = Windows(self.train_tokens, args.batch - half, args.length, args.seed + 1)

        def mixed(step: int) -> Tensor:
            rows = (torch.arange(half, device=self.device) + step * half) % len(pool)
            return torch.cat([corpus(step), pool[rows].long()])

        if self.phase_steps == 0:
            self.phase_b_start = self.elapsed
        stepper = Stepper(self.distil_loss, self.optimizers, graph)
        if not self.loop(stepper, mixed, self.phase_b_start, self.total, hold=0.3):
            return
        self.evaluate()
        self.save()
        export(self.model, args.data / "tokenizer.json", args.out / "export")
        self.log(event="done", step=self.step, tokens=self.tokens)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with tokens, held-out text and tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=19.0, help="training time in all, compiling included")
    parser.add_argument("--phase-a", type=float, default=0.72, help="share of the time for phase A")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--engine", choices=("graph", "compile", "eager"), default="graph")
    parser.add_argument("--preset", choices=("full", "tiny"), default="full")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own-text-seconds", type=float, default=50.0)
    parser.add_argument("--own-text-batch", type=int, default=2048)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--evaluate-every", type=float, default=60.0)
    parser.add_argument("--save-every", type=float, default=120.0)
    parser.add_argument("--limit-tokens", type=int, default=0, help="use only the first so many training tokens")
    parser.add_argument("--stop-after", type=int, default=0, help="save and stop at this step (to rehearse resuming)")
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
