"""Lets torchvision's build for GPUs be imported beside a CPU build of torch, as vLLM for CPUs pulls it in.

It finds its compiled operators not loadable there, and then fails on registering shapes for two that do not exist.
Nothing here calls them; this declares them first. Run once after installation: `python tests/vllm/mend_torchvision.py`.
"""

import importlib.util
from pathlib import Path

MARK = "# TreeWY's tests: "
DECLARE = f"""
{MARK}declare what a build without operators lacks
if not torchvision.extension._has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define("torchvision::" + _name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    source = Path(spec.origin).with_name("_meta_registrations.py")
    text = source.read_text()
    if MARK in text:
        return
    lines = text.splitlines(keepends=True)
    last_import = max(n for n, line in enumerate(lines) if line.startswith(("import torchvision", "from torchvision")))
    lines.insert(last_import + 1, DECLARE)
    source.write_text("".join(lines))


if __name__ == "__main__":
    main()
