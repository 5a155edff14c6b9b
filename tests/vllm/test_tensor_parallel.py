"""Two tensor-parallel ranks, each a process of its own with half of the heads.

Every token is held against the oracle, and so are the recurrent states, put together from both ranks.
"""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.engine import Oracle, compare_states, prompts, running

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower


def rank(worker: Any) -> dict[str, Any]:
    """What a rank keeps for running requests."""
    state = worker.model_runner.model_state
    held, spec = state.running, state.running.spec
    beside = spec.bytes_per_request - sum(spec.bytes_by_piece()[name] for name in ("checkpoint", "conv"))
    return {
        "heads": (spec.layers.num_k_heads, spec.layers.num_v_heads),
        "layers": sum(len(group.layers) for group in state.groups),
        "checkpoint": [layer.state.checkpoint.shape[1:] for layer in state.layers.values()],
        "conv": [layer.state.conv.shape[1:] for layer in state.layers.values()],
        "bytes": held.nbytes,
        "promised": held.num_requests * beside,
        "norms": [float(layer.state.checkpoint.norm()) for layer in state.layers.values()],
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), noise=0.5, key_heads=2, value_heads=4)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that need not import everything again, which is most of their time; safe where nothing has threads."""
    if torch.get_num_threads() == 1:
        from vllm.v1.executor import multiproc_executor

        monkeypatch.setattr(multiproc_executor, "get_mp_context", lambda: multiprocessing.get_context("fork"))


def test_two_ranks(checkpoint, forked) -> None:
    oracle, compared = Oracle(checkpoint), 0
    some = prompts(2, 5, 30, 3)
    with running(
        checkpoint, "deferred", tensor_parallel_size=2, distributed_executor_backend="mp", max_model_len=256
    ) as engine:
        names = [engine.add(prompt, 14) for prompt in some]
        while engine.busy:
            engine.step()
            compared += compare_states(engine, oracle)
        ranks = engine.executor.collective_rpc(rank)
        windows, accepted = engine.drafts()
        for name, prompt in zip(names, some, strict=True):
            oracle.check(prompt, engine.emitted[name])
    assert compared > 5
    assert windows > 0
    assert accepted > 0
    assert len(ranks) == 2
    for mine in ranks:
        assert mine["heads"] == (1, 2)
        assert mine["layers"] == 3
        assert mine["checkpoint"] == [torch.Size([2, 64, 64])] * 3
        assert mine["conv"] == [torch.Size([3, 64 + 64 + 128])] * 3
        assert mine["bytes"] == mine["promised"]
    assert ranks[0]["norms"] != ranks[1]["norms"]
