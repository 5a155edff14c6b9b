"""The entry point: called by vLLM once in every process, before any configuration exists.

Each replacement asks the configuration first and hands on to vLLM where TreeWY is not asked for.
"""

from __future__ import annotations

import functools
from typing import Any

from treewy.vllm import hooks
from treewy.vllm.options import Options, active, refusals


def register() -> None:
    """Installs the plugin, once a process. Never raises: on an engine it does not know, only asking for it does."""
    from vllm.config import VllmConfig

    if hasattr(VllmConfig.__post_init__, "__treewy__"):
        return
    reasons = hooks.unsupported()
    _check_configurations(VllmConfig, reasons)
    if not reasons:
        _replace_layer()
        _replace_page_size()
        _replace_model_state()


def _check_configurations(config_cls: Any, reasons: list[str]) -> None:
    original = config_cls.__post_init__

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        check(self, reasons)

    post_init.__treewy__ = True  # type: ignore[attr-defined]
    config_cls.__post_init__ = post_init


def check(vllm_config: Any, reasons: list[str]) -> None:
    """Refuses a server that asks for TreeWY and cannot have it; does nothing where it does not ask.

    Args:
        vllm_config: of the server.
        reasons: why TreeWY cannot work with this vLLM at all.

    Raises:
        ValueError: unknown settings, or settings that cannot be served; each with what to change.
    """
    options = Options.of(vllm_config.additional_config)
    model = vllm_config.model_config
    if options is None or options.mamba_state_commit == "store_all" or model is None:
        return
    # A draft model's configuration, or the text part of a multimodal one, is a copy of the one already checked.
    if model.runner_type == "draft" or getattr(model, "is_submodel_config", False):
        return
    if not reasons:
        if active(vllm_config) is None:
            from vllm.logger import init_logger

            init_logger("vllm.treewy").warning(
                "treewy: the server does not speculate, so nothing is replaced; add --speculative-config"
            )
            return
        reasons = refusals(vllm_config)
    if reasons:
        mode = options.mamba_state_commit
        raise ValueError(f"treewy: mamba_state_commit={mode} cannot be served: " + "; ".join(reasons))


def _replace_layer() -> None:
    from vllm.model_executor.custom_op import PluggableLayer

    from treewy.vllm.layer import GatedDeltaNetLayer

    PluggableLayer.register_oot(name="QwenGatedDeltaNetAttention")(GatedDeltaNetLayer)


def _replace_page_size() -> None:
    """The size of a block comes from the model class: without the rows that speculation adds to the convolution."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLMBase, Qwen3_5ForConditionalGeneration
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

    for model in (Qwen3_5ForCausalLMBase, Qwen3_5ForConditionalGeneration, Qwen3NextForCausalLM):
        _shape_without_speculation(model)


def _shape_without_speculation(model: Any) -> None:
    original = model.get_mamba_state_shape_from_config.__func__

    @functools.wraps(original)
    def shape(cls: Any, vllm_config: Any) -> Any:
        if active(vllm_config) is None:
            return original(cls, vllm_config)
        return original(cls, _WithoutSpeculation(vllm_config))

    model.get_mamba_state_shape_from_config = classmethod(shape)


class _WithoutSpeculation:
    """A configuration as it would be if the server did not speculate."""

    speculative_config = None
    num_speculative_tokens = 0

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllm_config, name)


def _replace_model_state() -> None:
    from vllm.v1.worker.gpu import model_states

    original = model_states.resolve_model_state_cls

    @functools.wraps(original)
    def resolve(vllm_config: Any, model: Any) -> Any:
        chosen = original(vllm_config, model)
        if active(vllm_config) is None:
            return chosen
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

        from treewy.vllm.model_state import TreeWYModelState

        if chosen is not MambaHybridModelState:
            raise ValueError(f"treewy: the model brings a model state of its own, {chosen.__name__}: not supported")
        return TreeWYModelState

    model_states.resolve_model_state_cls = resolve
