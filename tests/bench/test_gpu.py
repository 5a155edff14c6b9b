"""On the device: guard slots around the state stay as they are, and a replayed graph computes what the launches do.

`make test-gpu` runs the small ones under compute-sanitizer too.
"""

import pytest
import torch

from treewy.bench.kernels import Job, check, measure
from treewy.bench.timing import GraphTimer
from treewy.bench.workload import CAPACITY, Inputs, OursCuda, OursTriton, Setting
from treewy.ops import LayerState
from treewy.tree import TreeBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
IMPLS = [OursTriton, OursCuda]
GUARD = 7.0


def guarded(subject):
    """The same layers where every second slot and request belongs to nobody; gives those that do."""
    batch = subject.setting.batch
    mine = torch.arange(1, 2 * batch, 2, device=subject.device)
    wide = []
    for tensor in subject.all:
        spread = torch.full((tensor.shape[0], 2 * batch + 1, *tensor.shape[2:]), GUARD, device=subject.device)
        spread = spread.to(tensor.dtype)
        spread[:, mine] = tensor
        wide.append(spread)
    subject.all = LayerState(*wide)
    subject.each = [LayerState(*(t[layer] for t in wide)) for layer in range(subject.layers)]
    subject.window = type(subject.window).empty(
        batch, subject.setting.rows, num_slots=2 * batch + 1, num_requests=2 * batch + 1, device=subject.device,
        impl=subject.kernels,
    )  # fmt: skip
    subject.window.update(TreeBatch.of([subject.tree] * batch), mine, mine)
    return mine


def hold(subject, case):
    """Requests at the fills of their case; guards keep their pattern."""
    fills = {"verify": 8, "deferred": CAPACITY, "reconstruct": len(subject.path)}[case]
    mine = torch.arange(1, 2 * subject.setting.batch, 2, device=subject.device)
    subject.all.pending[:, mine] = fills
    subject.all.end[:, mine] = 5
    subject.all.window_rows[:, mine] = subject.setting.rows


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [1, 4, 15, 40])
@pytest.mark.parametrize("case", ["verify", "deferred", "reconstruct"])
def test_guard_slots(impl, rows, case):
    setting = Setting(case, 3, rows, (2, 4), with_conv=True)
    subject = impl(Inputs(setting, 2, torch.device("cuda")))
    mine = guarded(subject)
    hold(subject, case)
    checkpoint = subject.all.checkpoint.clone()
    outputs = subject.verify()
    folded = not torch.equal(subject.all.checkpoint, checkpoint)
    subject.commit()
    subject.window.check()
    assert folded == (case != "verify")
    assert all(torch.isfinite(out).all() for out in outputs)
    others = torch.ones(2 * setting.batch + 1, dtype=torch.bool)
    others[mine.cpu()] = False
    for name, tensor in subject.all._asdict().items():
        assert (tensor[:, others] == GUARD).all(), f"{name} of a request that was not asked for has changed"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("with_conv", [False, True])
def test_a_replay_computes_what_the_launches_do(impl, rows, with_conv):
    setting = Setting("verify", 3, rows, (2, 4), with_conv=with_conv)
    subject = impl(Inputs(setting, 3, torch.device("cuda")))
    subject.begin()
    expected = [out.clone() for out in subject.verify()]
    timer = GraphTimer()
    with timer.scope():
        replay = timer.prepare(subject.verify, subject.begin)
        for out in replay.kept[0]:
            out.zero_()
        assert replay() > 0
    torch.cuda.synchronize()
    for out, exact in zip(replay.kept[0], expected, strict=True):
        assert torch.equal(out, exact)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(16, 32), (16, 48), (16, 64)], ids=str)
@pytest.mark.parametrize(("case", "rows"), [("verify", 4), ("deferred", 4), ("reconstruct", 15), ("deferred", 40)])
def test_outputs_beside_float64(impl, state_dtype, heads, case, rows):
    setting = Setting(case, 3, rows, heads, state_dtype, with_conv=True)
    assert check(Job(impl, setting, ("verify",)), torch.device("cuda")).error < 0.006


@pytest.mark.parametrize("impl", IMPLS)
def test_a_measurement_of_whole_cycles(impl):
    setting = Setting("deferred", 8, 4, (2, 4))
    subject = impl(Inputs(setting, 2, torch.device("cuda")))
    record = measure(subject, "round", GraphTimer(), 4e12)
    assert 0.1 < record.us < 1000
    assert torch.equal(subject.all.pending, subject.first_fills)
