"""The plugin with prefix caching: blocks of 32 tokens, so that windows run across their ends all the time.

Whether a block holds what its entry in the cache promises shows when another request starts from it: its tokens and
states are held against the oracle, as in test_chain.py.
"""

from pathlib import Path

import pytest

from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.engine import MARGIN, STATE_ERROR, Engine, Oracle, compare_states, play, prompts, running
from treewy.vllm import commit, prefix_cache

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower

MODES = ["deferred", "reconstruct"]
BLOCK = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of three drafts is right, so windows end at every place of a block."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), noise=0.8)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def start(checkpoint, mode: str, **settings):
    """By default vLLM keeps states at the ends of prompts only; here it keeps every full block."""
    return running(checkpoint, mode, enable_prefix_caching=True, prefix_cache_retention_interval=BLOCK, **settings)


def continued(engine: Engine, text: list[int], oracle: Oracle) -> tuple[list[float], list[int]]:
    """Continues prefixes of a text, the longest first: the worst deficit of each, and what it took from the cache."""
    worst, cached = [], []
    for length in range((len(text) - 9) // BLOCK * BLOCK + 1, BLOCK, -4 * BLOCK):
        prompt = text[:length]
        name = engine.add(prompt, 8)
        while engine.busy:
            engine.step()
            compare_states(engine, oracle)
        worst.append(float(oracle.deficits(prompt, engine.emitted[name]).max()))
        cached.append(engine.cached[name])
    return worst, cached


@pytest.mark.parametrize(("mode", "tokens"), [("deferred", 520), ("reconstruct", 150)])
def test_a_long_text_and_requests_that_start_inside_it(
    checkpoint, oracle: Oracle, mode: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_blocks = []

    def publish(state, full, inputs) -> None:
        prefix_cache.publish(state, full, inputs)
        block = full.target[0] if full.target[0] >= 0 else full.slots[0]
        kept = (state.checkpoint[block].float().clone(), state.conv[block].float().clone())
        full_blocks.append((state.end.data_ptr(), int(full.rest), *kept))

    monkeypatch.setattr(commit, "publish", publish)
    with start(checkpoint, mode) as engine:
        prompt = prompts(1, 21, 21, 5)[0]
        (text,) = engine.generate([prompt], tokens)
        oracle.check(prompt, text)
        whole = [*prompt, *text]
        order = [layer.state.end.data_ptr() for layer in engine.runner.model_state.layers.values()]
        assert len(full_blocks) // len(order) == (len(whole) - 1) // BLOCK
        assert {rest for _, rest, _, _ in full_blocks} >= {0, 1}
        at_ends = [oracle.states(whole[:length]) for length in range(BLOCK, len(whole), BLOCK)]
        for number, (end, _, state, conv) in enumerate(full_blocks):
            states, inputs = at_ends[number // len(order)]
            wanted, wanted_inputs = states[order.index(end)], inputs[order.index(end)]
            assert (state - wanted).norm() / wanted.norm() < STATE_ERROR
            assert (conv - wanted_inputs).norm() / wanted_inputs.norm() < STATE_ERROR
        worst, cached = continued(engine, whole, oracle)
        assert max(worst) < MARGIN
        assert max(cached) > 2 * BLOCK, "nothing was taken from blocks that decoding had filled"


@pytest.mark.parametrize("mode", MODES)
def test_requests_share_prefixes_are_preempted_and_resume(checkpoint, oracle: Oracle, mode: str) -> None:
    with start(checkpoint, mode, max_model_len=256, num_gpu_blocks_override=18) as engine:
        run = play(engine, oracle, 3, requests=8, tokens=90, compare_every=8)
        assert engine.preemptions() > 0
        assert run.states > 0


def test_chunks_that_end_at_every_place_of_a_block(checkpoint, oracle: Oracle) -> None:
    """Class 24: prompts in chunks of at most 13 tokens over blocks of 32, in steps that also have windows."""
    with start(checkpoint, "deferred", max_num_batched_tokens=16) as engine:
        run = play(engine, oracle, 6, requests=5, tokens=25, compare_every=6)
        assert run.states > 0


def test_a_block_that_is_not_written_is_seen(checkpoint, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of these tests: without the write to full blocks, requests that start there go wrong."""
    monkeypatch.setattr(commit, "publish", lambda *_: None)
    with start(checkpoint, "deferred") as engine:
        prompt = prompts(1, 21, 21, 5)[0]
        (text,) = engine.generate([prompt], 250)
        with pytest.raises(AssertionError, match=r"state of layer 0 after \d+ tokens of"):
            continued(engine, [*prompt, *text], oracle)
        engine.run()


def test_windows_longer_than_a_block_are_refused(checkpoint) -> None:
    with (
        pytest.raises(ValueError, match="window must not be longer than a block"),
        running(checkpoint, "deferred", draft_tokens=40, enable_prefix_caching=True),
    ):
        pass
