"""Thin a run's log to a few hundred lines and draw its losses.

Usage: ``python training/plot_loss.py --log RUN/log.jsonl --out training``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def thin(lines: list[dict], keep: int) -> list[dict]:
    """Keep every event that is not a training step, the first steps, and evenly spaced steps, about ``keep`` in all."""
    steps = [i for i, line in enumerate(lines) if line["event"] == "train"]
    stride = max(1, len(steps) // keep)
    wanted = set(steps[:10]) | set(steps[::stride])
    return [line for i, line in enumerate(lines) if line["event"] != "train" or i in wanted]


def main() -> None:
    """Write ``loss_curve.jsonl`` and ``loss_curve.png``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=int, default=240)
    args = parser.parse_args()
    lines = thin([json.loads(line) for line in args.log.read_text().splitlines()], args.keep)
    (args.out / "loss_curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    train = [line for line in lines if line["event"] == "train"]
    held = [line for line in lines if line["event"] == "held_out" and line["step"] > 1]
    joint = [line for line in train if line["phase"] == "A" and line["step"] >= 100]
    axes[0].plot([x["tokens"] / 1e6 for x in joint], [x["losses"][0] for x in joint], lw=0.8, label="training batch")
    axes[0].plot([x["tokens"] / 1e6 for x in held], [x["held_out_loss"] for x in held], "k.-", label="held out")
    axes[0].set(title="trunk: next-token loss", xlabel="million tokens seen", ylabel="nats a token")
    axes[0].set_ylim(1.2, 3.0)
    distil = [line for line in train if line["phase"] == "B"]
    for d in range(len(distil[0]["losses"])):
        axes[1].plot(
            [x["tokens"] / 1e6 for x in distil], [x["losses"][d] for x in distil], lw=0.8, label=f"depth {d + 1}"
        )
    axes[1].set(title="head, phase B: KL from the trunk", xlabel="million tokens seen", ylabel="nats")
    axes[1].set_ylim(0.2, 0.8)
    for d in range(max(len(x["agreement"]) for x in held)):
        points = [(x["tokens"] / 1e6, x["agreement"][d]) for x in held if len(x["agreement"]) > d]
        axes[2].plot(*zip(*points, strict=True), ".-", lw=0.8, label=f"to depth {d + 1}")
    axes[2].set(title="agreement with the trunk, held out", xlabel="million tokens seen", ylabel="share of positions")
    for ax in axes:
        ax.legend(fontsize=7)
        ax.grid(alpha=0.3)
    figure.savefig(args.out / "loss_curve.png", dpi=90)


if __name__ == "__main__":
    main()
