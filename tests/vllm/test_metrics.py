"""What the worker samples now and then."""

from types import SimpleNamespace

import torch
from prometheus_client import REGISTRY

from treewy.vllm import metrics


def test_refusals_are_counted_and_logged_once(monkeypatch) -> None:
    """What kernels refuse sets a bit on the device; no step asks for it."""
    logged = []
    monkeypatch.setattr(metrics, "EVERY", 2)
    monkeypatch.setattr(metrics, "logger", SimpleNamespace(error=lambda *text: logged.append(text[0] % text[1:])))
    running = SimpleNamespace(
        pieces={"pending": torch.tensor([[[3], [9], [0]]])},
        errors=torch.zeros(1, dtype=torch.int32),
        spec=SimpleNamespace(bytes_per_request=64),
    )
    meter = metrics.Meter(running)
    for step in range(6):
        meter.before_step()
        running.pieces["pending"][0, 0, 0] = 4 + step
        if step == 1:  # between two samples
            running.errors.fill_(8)
        meter.after_commit(torch.tensor([0, -1]), torch.tensor([2, 5]), torch.tensor([7, -1]))
    assert logged == [
        "treewy: a round was given a slot or running request outside those that exist. Nothing of these requests "
        "changed; please report this"
    ]
    values = {name: REGISTRY.get_sample_value(name) for name in metrics._GAUGES}
    assert values["vllm:treewy_refusals"] == 1
    assert values["vllm:treewy_pending_rows"] == 8
    assert values["vllm:treewy_folds_per_window"] == 1
    assert values["vllm:treewy_state_bytes_per_request"] == 64
