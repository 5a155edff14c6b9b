"""`treewy doctor` beside the engine it speaks of."""

from pathlib import Path

import pytest

from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.engine import prompts, running
from treewy.vllm import doctor

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower

SERVER = ["--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--block-size", "32"]
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
CACHE = 2**28


def server(arguments: list[str], **of: int | None) -> doctor.Server:
    return doctor.server(doctor.settings(arguments), **of)


def test_it_says_what_the_engine_then_does(checkpoint) -> None:
    """Class 18, 19, 20: bytes to the byte, concurrency as vLLM computes it but for layers that fill a group up."""
    said = server([str(checkpoint), *SERVER, *MTP], cache_bytes=CACHE, context=None)
    assert said.problems == []
    assert (said.runner, said.mode, said.window, said.requested, said.context) == ("V2", "deferred", 4, 4, 512)
    assert (said.gdn_layers, said.attention_layers, said.prefix_caching) == (3, 2, True)
    assert {holding.mode: holding.blocks for holding in said.holdings} == {
        "store_all": 5,
        "reconstruct": 2,
        "deferred": 2,
    }
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    for holding in said.holdings:
        settings = {"max_model_len": 512, "kv_cache_memory_bytes": CACHE, "enable_prefix_caching": True}
        with running(checkpoint, holding.mode, **settings) as engine:
            groups = engine.runner.kv_cache_config.kv_cache_groups
            spec = next(group.kv_cache_spec for group in groups if hasattr(group.kv_cache_spec, "mamba_type"))
            assert holding.states == said.gdn_layers * holding.blocks * spec.state_content_size_bytes
            if holding.mode != "store_all":
                assert holding.running * 4 == engine.runner.model_state.running.nbytes
            most = get_max_concurrency_for_kv_cache_config(engine.runner.vllm_config, engine.runner.kv_cache_config)
            assert holding.concurrency == pytest.approx(most, rel=0.12)


def test_it_names_what_to_change(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    said = server([str(checkpoint), *SERVER], cache_bytes=None, context=None)
    assert said.problems == ["the server does not speculate: add --speculative-config"]
    assert {holding.concurrency for holding in said.holdings} == {None}
    said = server([str(checkpoint), *SERVER, *MTP], cache_bytes=2**21, context=300)
    (problem,) = said.problems
    assert problem.startswith("--max-num-seqs asks for 4 requests, but 1 of 300 tokens fit: lower it to 1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    said = server([str(checkpoint), *SERVER, *MTP], cache_bytes=None, context=None)
    assert said.runner == "V1"
    assert "this server uses model runner V1" in said.problems[0]


def test_refused_settings_have_no_holdings(checkpoint) -> None:
    """A window that is too long is refused as in a server, before its state is laid out."""
    long = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 100}']
    said = server([str(checkpoint), *SERVER, *long], cache_bytes=CACHE, context=None)
    assert "num_speculative_tokens is 100; a window has at most 63 draft nodes" in said.problems
    assert said.holdings == []
    short = ["--additional-config", '{"treewy": {"history_rows": 2}}']
    with pytest.raises(ValueError, match=r"history_rows is 2; .* give at least 4"):
        server([str(checkpoint), *SERVER, *MTP, *short], cache_bytes=None, context=None)


def test_ranks_share_the_heads(checkpoint, tmp_path: Path) -> None:
    """Class 30: of a rank half of everything; heads that cannot be shared are a problem, not an exception."""
    two_heads = write_checkpoint(tmp_path, key_heads=2, value_heads=4)
    ranks = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    one = server([str(two_heads), *SERVER, *MTP], cache_bytes=None, context=None)
    half = server([str(two_heads), *SERVER, *MTP, *ranks], cache_bytes=None, context=None)
    assert half.problems == []
    for whole, mine in zip(one.holdings, half.holdings, strict=True):
        assert whole.states == 2 * mine.states
        assert whole.running == pytest.approx(2 * mine.running, abs=64 * one.gdn_layers)  # counters are not shared
    said = server([str(checkpoint), *SERVER, *MTP, *ranks], cache_bytes=None, context=None)
    assert said.holdings == []
    assert "linear_num_key_heads = 1 cannot be split over 2 ranks" in said.problems[0]


def test_metrics_stand_beside_those_of_vllm(checkpoint) -> None:
    with running(checkpoint, "deferred", treewy={"history_rows": 5}) as engine:
        engine.generate(prompts(2, 5, 20), 40)
        found = {metric.name: metric.value for metric in engine.llm.get_metrics() if "treewy" in metric.name}
        assert found["vllm:treewy_state_bytes_per_request"] == engine.runner.model_state.running.spec.bytes_per_request
        assert 1 <= found["vllm:treewy_pending_rows"] <= 5
        assert 0 <= found["vllm:treewy_folds_per_window"] <= 1


def test_a_server_that_cannot_be_served_does_not_start(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with (
        pytest.raises(
            ValueError, match="mamba_state_commit=deferred cannot be served: this server uses model runner V1"
        ),
        running(checkpoint, "deferred"),
    ):
        pass
