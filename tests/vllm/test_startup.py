"""What vLLM's own configuration says, where a server cannot be served: at start, before any weights are loaded."""

from typing import Any

import pytest

from treewy.vllm.options import CHAINS


def configure(checkpoint, **settings: Any):
    """The configuration of a server with these settings, as `vllm serve` makes it."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "max_model_len": 256,
        "block_size": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
        "additional_config": {"treewy": {}},
    }
    return EngineArgs(**arguments | settings).create_engine_config()


def refused(checkpoint, message: str, **settings: Any) -> None:
    """The server is refused with TreeWY's message, and vLLM alone would start it."""
    with pytest.raises(ValueError, match=rf"treewy: mamba_state_commit=deferred cannot be served: .*{message}"):
        configure(checkpoint, **settings)
    configure(checkpoint, **settings, additional_config={})


def test_a_server_that_can_be_served(checkpoint) -> None:
    assert configure(checkpoint).use_v2_model_runner


def test_heads_that_ranks_cannot_share(checkpoint) -> None:
    """Class 30: one key head."""
    refused(
        checkpoint,
        "tensor_parallel_size is 2, and linear_num_key_heads = 1 cannot be split over 2 ranks",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )


def test_pipeline_parallelism(checkpoint) -> None:
    refused(
        checkpoint,
        r"pipeline_parallel_size is 2; it must be 1 \(use tensor_parallel_size\)",
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
    )


def test_model_runner_v1(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    refused(checkpoint, "model runner V1; TreeWY needs V2: remove VLLM_USE_V2_MODEL_RUNNER=0")


def test_windows_of_too_many_rows(checkpoint) -> None:
    refused(
        checkpoint,
        "num_speculative_tokens is 64; a window has at most 63 draft nodes",
        speculative_config={"method": "mtp", "num_speculative_tokens": 64},
    )


def test_a_method_that_makes_vllm_fall_back(checkpoint) -> None:
    """A proposer of the operator's own, which model runner V2 does not have."""
    refused(
        checkpoint,
        "model runner V1.*the speculative method is custom_class; use one of mtp,",
        speculative_config={"method": "custom_class", "model": "some.Proposer", "num_speculative_tokens": 3},
    )


def test_methods_without_chains(checkpoint) -> None:
    """Nothing is drafted, only hidden states are read out."""
    refused(
        checkpoint,
        "the speculative method is extract_hidden_states; use one of mtp",
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
        },
    )


def test_the_methods_are_vllm_s() -> None:
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    known = {name for part in get_args(SpeculativeMethod) for name in (get_args(part) or (part,))}
    assert set(CHAINS) <= known | {"ngram"}


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        {"kv_offloading_size": 1.0},
    ],
)
def test_blocks_that_leave_the_server(checkpoint, settings: dict[str, Any]) -> None:
    """To another server, or to the host's memory and back."""
    refused(checkpoint, "kv_transfer_config is set", **settings)


def test_sleep(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Platforms that have it: vLLM for CPUs refuses it by itself."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    refused(checkpoint, "enable_sleep_mode is set.*drop --enable-sleep-mode", enable_sleep_mode=True)
