"""The plugin in the real engine, without prefix caching: chains from the MTP module, both modes.

What an engine emits is held against the checkpoint in transformers, in fp32 (`engine.Oracle`), and so are the recurrent
states of requests in the middle of their lives. Requests come at random times, some are aborted; with at most 64 tokens
a step, prompts are cut into chunks and share steps with windows.
"""

import pytest
import torch

from tests.vllm.engine import Engine, Oracle, play, prompts, running
from treewy.state import StateSpec

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower

MODES = ["deferred", "reconstruct"]


def groups(engine: Engine) -> list:
    """KV-cache specifications of the GDN layers' groups."""
    specs = [group.kv_cache_spec for group in engine.runner.kv_cache_config.kv_cache_groups]
    return [spec for spec in specs if hasattr(spec, "num_speculative_blocks")]


@pytest.fixture(scope="module")
def stored(checkpoint):
    """What vLLM does without the plugin: a run of full windows, and its specifications."""
    with running(checkpoint, None) as engine:
        texts = engine.generate(prompts(4, 5, 60), 61)
        layers = engine.runner.model_state
        return {
            "texts": texts,
            "drafts": engine.drafts(),
            "specs": groups(engine),
            "state": type(layers).__name__,
            "blocks": engine.runner.kv_cache_config.num_blocks,
        }


@pytest.fixture(scope="module", params=MODES)
def engine(request, checkpoint, stored):  # after which no other engine ends while this one runs
    with running(checkpoint, request.param) as engine:
        yield engine


def test_without_the_setting_vllm_is_as_it_was(stored) -> None:
    assert stored["state"] == "MambaHybridModelState"
    assert {spec.num_speculative_blocks for spec in stored["specs"]} == {3}


def test_store_all_is_vllm_itself(checkpoint, stored) -> None:
    with running(checkpoint, "store_all") as engine:
        assert type(engine.runner.model_state).__name__ == "MambaHybridModelState"
        assert groups(engine) == stored["specs"]
        assert engine.generate(prompts(4, 5, 60), 61) == stored["texts"]
        assert engine.drafts() == stored["drafts"]


def test_a_request_holds_one_block_of_the_true_size(engine, stored) -> None:
    spec: StateSpec = engine.runner.model_state.running.spec
    pieces = spec.bytes_by_piece()
    one_layer = (pieces["checkpoint"] + pieces["conv"]) // spec.num_layers
    for mine, theirs in zip(groups(engine), stored["specs"], strict=True):
        assert mine.num_speculative_blocks == 0
        assert mine.state_content_size_bytes == one_layer
        # The convolution of a window of 4 kept 3 rows more.
        assert theirs.state_content_size_bytes - one_layer == 3 * spec.layers.conv_dim * spec.input_dtype.itemsize


def test_rows_of_running_requests_are_allocated_once_each_and_not_per_block(engine) -> None:
    """Class 18, 20: bytes follow max_num_seqs, and specification and allocation agree."""
    held = engine.runner.model_state.running
    pieces = held.spec.bytes_by_piece()
    expected = sum(size for name, size in pieces.items() if name not in ("checkpoint", "conv"))
    assert held.nbytes == expected * engine.runner.max_num_reqs


def test_acceptance_is_that_of_store_all(engine, oracle: Oracle, stored) -> None:
    before = engine.drafts()
    texts = engine.generate(prompts(4, 5, 60), 61)
    windows, accepted = (now - then for now, then in zip(engine.drafts(), before, strict=True))
    for prompt, text in zip(prompts(4, 5, 60), texts, strict=True):
        oracle.check(prompt, text)
    their_windows, their_accepted = stored["drafts"]
    assert accepted / windows == pytest.approx(their_accepted / their_windows, abs=0.15)
    assert accepted > windows  # more than one of three, so paths of several rows are committed


@pytest.mark.parametrize("seed", [0, 1])
def test_requests_come_go_and_are_aborted(engine, oracle: Oracle, seed: int) -> None:
    run = play(engine, oracle, seed, requests=9, tokens=50, compare_every=5)
    assert run.states >= 5


def test_a_slot_forgets_the_request_before(engine, oracle: Oracle) -> None:
    """Class 17: an aborted request leaves rows pending, even infinite ones; its successor sees none of it."""
    name = engine.add(prompts(1, 20, 20, 7)[0], 40)
    for _ in range(5):
        engine.step()
    slot = engine.runner.req_states.req_id_to_index[engine.scheduler.running[0].request_id]
    engine.abort(name)
    engine.run()
    for piece in engine.runner.model_state.running.pieces.values():
        if piece.is_floating_point():
            piece[:, slot] = float("inf")
    some = prompts(4, 1, 30, 8)
    for prompt, text in zip(some, engine.generate(some, 20), strict=True):
        oracle.check(prompt, text)


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_resume(checkpoint, oracle: Oracle, mode: str) -> None:
    with running(checkpoint, mode, max_model_len=256, num_gpu_blocks_override=14) as engine:
        run = play(engine, oracle, 2, requests=8, tokens=90, compare_every=6)
        assert engine.preemptions() > 0
        assert run.states > 0


def test_more_requests_run_at_once(checkpoint) -> None:
    """16 blocks: four a group and one for attention, or one a group and one for attention."""
    at_once = {}
    for mode in (None, "deferred"):
        with running(checkpoint, mode, max_model_len=128, num_gpu_blocks_override=17) as engine:
            for prompt in prompts(4, 5, 10):
                engine.add(prompt, 12)
            engine.step()
            engine.step()
            at_once[mode] = len(engine.scheduler.running)
            engine.run()
    assert at_once == {None: 1, "deferred": 4}


@pytest.mark.parametrize("draft_tokens", [1, 5])
def test_other_lengths_of_window(checkpoint, oracle: Oracle, draft_tokens: int) -> None:
    with running(checkpoint, "deferred", draft_tokens=draft_tokens, treewy={"history_rows": 6}) as engine:
        some = prompts(3, 1, 40, 3)
        for prompt, text in zip(some, engine.generate(some, 30), strict=True):
            oracle.check(prompt, text)


def test_a_fault_is_seen(checkpoint, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of these tests: an engine whose commit loses one convolution input does not pass."""
    from treewy import ops

    commit = ops.commit

    def forgetful(state, *arguments):
        kept = state.conv.clone()
        commit(state, *arguments)
        state.conv[:, 0] = kept[:, 0]

    monkeypatch.setattr(ops, "commit", forgetful)
    with running(checkpoint, "deferred") as engine:
        some = prompts(3, 5, 40, 4)
        texts = engine.generate(some, 40)
        deficits = [oracle.deficits(prompt, text) for prompt, text in zip(some, texts, strict=True)]
    assert torch.cat(deficits).max() > 0.5
