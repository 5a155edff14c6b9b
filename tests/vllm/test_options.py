"""The settings under "treewy", and what is refused: with pretended configurations, so without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from treewy.vllm import options, plugin
from treewy.vllm.options import Options, active, refusals


def configuration(**changes: Any) -> SimpleNamespace:
    """A server that TreeWY can serve; changes are given as "part__name"."""
    config = SimpleNamespace(
        additional_config={"treewy": {}},
        num_speculative_tokens=3,
        use_v2_model_runner=True,
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            architecture="Qwen3_5ForCausalLM",
            runner_type="generate",
            is_submodel_config=False,
            enable_sleep_mode=False,
            hf_text_config=SimpleNamespace(linear_num_key_heads=2, linear_num_value_heads=6),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
        ),
        cache_config=SimpleNamespace(use_replayssm=False, mamba_cache_mode="none", block_size=32),
        speculative_config=SimpleNamespace(
            enable_adaptive_verification=False, method="mtp", draft_model_config=SimpleNamespace(is_hybrid=False)
        ),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return config


def test_the_default_is_deferred() -> None:
    assert Options.of({"treewy": {}}) == Options("deferred", None, None)


@pytest.mark.parametrize("nothing", [{}, {"treewy": None}, None, {"other": 1}])
def test_nothing_is_asked_for(nothing: object) -> None:
    assert Options.of(nothing) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mamba_state_comit": "deferred"}, "unknown setting 'mamba_state_comit'; there are"),
        ({"mamba_state_commit": "later"}, "'later'; it is one of store_all, reconstruct, deferred"),
        ({"impl": "numpy"}, "'numpy'; it is one of torch, triton, cuda"),
        ({"history_rows": 0}, "history_rows is 0"),
        ({"history_rows": "many"}, "history_rows is 'many'"),
        ("deferred", "write them as"),
    ],
)
def test_settings_that_do_not_exist(settings: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.of({"treewy": settings})


@pytest.mark.parametrize(
    "changes",
    [
        {"additional_config": {}},
        {"additional_config": {"treewy": {"mamba_state_commit": "store_all"}}},
        {"num_speculative_tokens": 0},
    ],
)
def test_inactive(changes: dict[str, Any]) -> None:
    assert active(configuration(**changes)) is None


def test_a_server_that_can_be_served() -> None:
    assert active(configuration()) == Options()
    assert refusals(configuration()) == []
    plugin.check(configuration(), [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_v2_model_runner": False}, "remove VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; it must be 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"parallel_config__tensor_parallel_size": 6}, "linear_num_key_heads = 2 cannot be split over 6 ranks: lower"),
        (
            {"parallel_config__tensor_parallel_size": 4},
            "linear_num_value_heads = 6 cannot be split over 4 ranks",
        ),
        ({"parallel_config__enable_dbo": True}, "enable_dbo"),
        ({"speculative_config__method": "suffix"}, "the speculative method is suffix; use one of mtp, eagle"),
        ({"model_config__enable_sleep_mode": True}, "enable_sleep_mode is set.*drop --enable-sleep-mode"),
        ({"speculative_config__enable_adaptive_verification": True}, "enable_adaptive_verification"),
        (
            {"speculative_config__method": "draft_model", "speculative_config__draft_model_config__is_hybrid": True},
            "recurrent layers of its own",
        ),
        ({"cache_config__use_replayssm": True}, "drop --use-replayssm"),
        ({"cache_config__mamba_cache_mode": "all"}, "mamba_cache_mode is 'all'"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"model_config__architecture": "OlmoHybridForCausalLM"}, "the model is OlmoHybridForCausalLM; supported are"),
        ({"num_speculative_tokens": 64}, "at most 63 draft nodes"),
        ({"cache_config__mamba_cache_mode": "align", "num_speculative_tokens": 32}, "longer than a block"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin.check(configuration(**changes), [])


def test_the_layout_of_convolution_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "conv_layout", lambda: "DS")
    assert refusals(configuration()) == ["VLLM_SSM_CONV_STATE_LAYOUT is DS; use SD"]


def test_an_engine_that_is_not_known_is_refused_only_when_asked_for() -> None:
    plugin.check(configuration(additional_config={}), ["this is vllm 0.99.0"])
    with pytest.raises(ValueError, match=r"vllm 0\.99\.0"):
        plugin.check(configuration(), ["this is vllm 0.99.0"])


def test_configurations_of_parts_are_not_checked_again() -> None:
    plugin.check(configuration(model_config__runner_type="draft", model_config__architecture="Qwen3_5MTP"), [])
    plugin.check(configuration(model_config__is_submodel_config=True, model_config__architecture="X"), [])
    plugin.check(configuration(model_config=None), [])


def test_a_server_that_does_not_speculate_is_left_alone() -> None:
    plugin.check(configuration(num_speculative_tokens=0, use_v2_model_runner=False), [])
