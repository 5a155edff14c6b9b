"""The plugin on a GPU: CUDA kernels, captured graphs, asynchronous scheduling; beside the oracle of the other tests.

Four requests fit the captured graphs and eight may run, in a pool that is too small for eight: so batches are smaller
than captured, padded, and larger; prompts come in chunks beside windows; requests are preempted and resume. Piecewise
graphs are captured without a compiler; with VLLM_USE_BREAKABLE_CUDAGRAPH=0 they are those of torch.compile.
"""

from pathlib import Path

import pytest
import torch

from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.engine import Oracle, play, prompts, running
from treewy.model import MODEL_DIR

pytestmark = pytest.mark.gpu

GRAPHS = {
    "eager": {},
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [4, 8, 16],
        },
    },
    "piecewise": {
        "enforce_eager": False,
        "compilation_config": {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": [4, 8, 16, 40],
        },
    },
}
CACHING = {"uncached": {}, "cached": {"enable_prefix_caching": True, "prefix_cache_retention_interval": 32}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a size that vLLM's own kernels for decoding take; one of two drafts is right."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), noise=0.6)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.mark.parametrize("caching", CACHING)
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("mode", ["deferred", "reconstruct"])
def test_requests_come_go_are_preempted_and_resume(
    checkpoint: Path, oracle: Oracle, mode: str, graphs: str, caching: str
) -> None:
    settings = {**GRAPHS[graphs], **CACHING[caching], "max_model_len": 256, "num_gpu_blocks_override": 30}
    with running(checkpoint, mode, max_num_seqs=8, **settings) as engine:
        assert engine.runner.model_state.groups[0].impl == "cuda"
        run = play(engine, oracle, 11, requests=24, tokens=90, compare_every=10)
        assert engine.preemptions() > 0
        assert run.states > 0
        assert not int(engine.runner.model_state.running.errors)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_the_shipped_model_writes_what_it_writes_without_speculation(graphs: str) -> None:
    """Up to nearly equal tokens, of which there are more without speculation too: see the oracle."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode
    source = Path(__file__).read_text()
    some = [encode(source[start : start + 700]).ids[:150] for start in range(0, 2000, 333)]
    oracle = Oracle(MODEL_DIR)
    texts, accepted = {}, {}
    for mode in (None, "store_all", "reconstruct", "deferred"):
        with running(MODEL_DIR, mode, draft_tokens=3 if mode else 0, block_size=None, **GRAPHS[graphs]) as engine:
            texts[mode] = engine.generate(some, 200)
            accepted[mode] = engine.drafts()
        worst = max(float(oracle.deficits(p, text).max()) for p, text in zip(some, texts[mode], strict=True))
        same = sum(text == other for text, other in zip(texts[mode], texts[None], strict=True))
        print(
            f"{graphs} {mode}: {same} of {len(some)} texts as without speculation; worst deficit {worst:.4f}; "
            f"windows and accepted drafts {accepted[mode]}"
        )
        for prompt, text in zip(some, texts[mode], strict=True):
            oracle.check(prompt, text)
    assert accepted["deferred"][1] == pytest.approx(accepted["store_all"][1], rel=0.1)


def test_no_step_waits_for_the_device(checkpoint: Path, oracle: Oracle) -> None:
    """Asynchronous scheduling stays asynchronous: PyTorch refuses what would wait, around every forward."""

    def guarded(method):
        def run(*arguments, **named):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*arguments, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    with running(checkpoint, "deferred", max_num_seqs=8, **GRAPHS["piecewise"]) as engine:
        assert engine.runner.vllm_config.scheduler_config.async_scheduling
        some = prompts(12, 20, 90)
        engine.generate(some[:4], 20)  # what is compiled at first use
        state = engine.runner.model_state
        for name in ("prepare_attn", "postprocess_state"):
            setattr(state, name, guarded(getattr(state, name)))
        for prompt, text in zip(some, engine.generate(some, 40), strict=True):
            oracle.check(prompt, text)
