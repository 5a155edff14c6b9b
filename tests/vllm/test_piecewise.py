"""Piecewise graphs: projections, MLPs and norms of a step are replayed, GDN core and attention see the step itself."""

import gc
from pathlib import Path

import pytest
import torch

from tests.vllm.engine import Oracle, play, prompts, running
from tests.vllm.recorded_graphs import piecewise

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower


@pytest.mark.parametrize("mode", ["deferred", "reconstruct"])
def test_steps_with_prompts_are_replayed(
    checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Windows alone, prompts in chunks, both together, padded; a capture leaves requests' states alone."""
    with running(checkpoint, mode) as engine, piecewise(engine, monkeypatch, [4, 16, 40, 64]) as segments:
        run = play(engine, oracle, 21, requests=12, tokens=60, compare_every=10)
        assert run.states > 0
        assert segments.replayed > 100


def test_blocks_are_given_back(checkpoint: Path) -> None:
    """vLLM captures with blocks of its memory profile, takes them back and allocates others."""
    from vllm.v1.worker.utils import clear_layer_kv_caches

    with running(checkpoint, "deferred") as engine:
        engine.generate(prompts(2, 5, 20), 10)
        layers = engine.runner.compilation_config.static_forward_context.values()
        places = {layer.kv_cache[0].untyped_storage().data_ptr() for layer in engine.runner.model_state.layers.values()}
        clear_layer_kv_caches(layers)
        engine.runner.kv_caches.clear()
        gc.unfreeze()  # vLLM has hidden from it what was there at the end of its start
        gc.collect()
        tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
        assert not [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() in places]


def test_torch_compile(checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What vLLM does by default; here it traces the model, and leaves the graph as it is to save time."""
    from vllm import envs
    from vllm.config import CompilationMode

    for name, value in (
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "0"),
        ("VLLM_CPU_CI_ENV", "1"),
        ("VLLM_CACHE_ROOT", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    envs.disable_envs_cache()
    with running(checkpoint, "deferred", enforce_eager=False) as engine:
        assert engine.runner.compilation_config.mode != CompilationMode.NONE
        run = play(engine, oracle, 22, requests=12, tokens=60, compare_every=10)
        assert run.states > 0
