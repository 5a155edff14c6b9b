"""What the emulation of the CUDA kernel finds: each barrier, fence and wait that is taken out of the kernel.

A kernel that passes in it passes because it is right, not because the emulation is kind.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.ops import emulation
from tests.ops.test_cuda import DEVICE, Case, Round, copy_of, distance, emulated  # noqa: F401
from treewy.ops.cuda import build

SOURCE = Path(build.__file__).with_name("verify.cu").read_text()
WAITS = [
    (SOURCE.count("\n", 0, match.start()) + 1, match[0])
    for match in re.finditer(
        r"(__syncthreads|wait_for_copies|wait_for_first_group|before_copy_engine|State::written)\(\);|wait\(state_there\);"
        r"|__syncwarp\(\);(?=\s+if \(inverse_tile)",
        SOURCE,
    )
]
FUSED, WIDE = Case(4, 12, heads=(1, 2)), Case(18, 20, heads=(1, 2))


def outputs(case, run):
    """Of a round that folds."""
    round_ = Round(case)
    state = copy_of(round_.state)
    return getattr(round_, run)(state, True), state.checkpoint[round_.slots[:3]]


right = cache(outputs)
"""Of the kernel as it is."""


def differs(case, run, expected):
    """Whether one more order of threads and blocks gives anything else, or is stopped by the machine."""
    try:
        return any(distance(*pair) > 1e-6 for pair in zip(outputs(case, run), expected, strict=True))
    except AssertionError:  # said by the machine, or a result that is not finite
        return True


@pytest.mark.skipif(DEVICE.type != "cpu", reason="emulates on the CPU")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("line", "what"), WAITS, ids=[f"{line}-{what[:-3]}" for line, what in WAITS])
def test_a_wait_that_is_missing_is_found(line, what, monkeypatch, tmp_path):
    cases = [(FUSED, "run_whole"), (WIDE, "run")]
    expected = [right(*case) for case in cases]
    lines = SOURCE.split("\n")
    lines[line - 1] = lines[line - 1].replace(what, ";")
    (tmp_path / "verify.cu").write_text("\n".join(lines))
    monkeypatch.setattr(emulation, "SOURCE", tmp_path)
    monkeypatch.setattr(emulation, "_compiled", cache(emulation._compiled.__wrapped__))
    monkeypatch.setattr(emulation, "_folder", lambda: tmp_path)
    assert any(differs(*case, wanted) for case, wanted in zip(cases, expected, strict=True) for _ in range(3))
