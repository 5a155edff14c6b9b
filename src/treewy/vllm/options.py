"""What the operator asks for in `--additional-config '{"treewy": {…}}'`, and what is refused, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from treewy.ops import Impl
from treewy.state import CommitMode
from treewy.tree import MAX_ROWS

KEY = "treewy"
"""Of `additional_config`."""
ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models whose GDN layers are replaced."""
CHAINS = ("mtp", "eagle", "eagle3", "draft_model", "ngram", "ngram_gpu", "dflash", "dspark")
"""Speculative methods whose drafts are chains."""


@dataclass(frozen=True)
class Options:
    """The settings under `"treewy"`.

    Raises:
        ValueError: a value that is none of the setting's.
    """

    mamba_state_commit: CommitMode = "deferred"
    """`store_all` leaves vLLM as it is."""
    history_rows: int | None = None
    """Rows of pending history in the mode `deferred`; default as `treewy.state.StateSpec`."""
    impl: Impl | None = None
    """Kernels; default `cuda` on a CUDA device, `torch` on a CPU."""

    def __post_init__(self) -> None:
        for name, value, legal in (
            ("mamba_state_commit", self.mamba_state_commit, get_args(CommitMode)),
            ("impl", self.impl, (None, *get_args(Impl))),
        ):
            if value not in legal:
                known = ", ".join(str(choice) for choice in legal if choice)
                raise ValueError(f"treewy: {name} is {value!r}; it is one of {known}")
        rows = self.history_rows
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise ValueError(f"treewy: history_rows is {rows!r}; it is a number of rows, at least 1")

    @staticmethod
    def of(additional_config: object) -> Options | None:
        """The settings in an `additional_config`; None where it has none.

        Raises:
            ValueError: an unknown setting, or a value that is none of the setting's.
        """
        if not isinstance(additional_config, Mapping) or additional_config.get(KEY) is None:
            return None
        settings = additional_config[KEY]
        if not isinstance(settings, Mapping):
            raise ValueError(f'treewy: the settings are {settings!r}; write them as {{"{KEY}": {{"name": value}}}}')
        known = {field.name for field in fields(Options)}
        if unknown := sorted(set(settings) - known):
            raise ValueError(
                f"treewy: unknown setting {', '.join(map(repr, unknown))}; there are {', '.join(sorted(known))}"
            )
        return Options(**settings)


def active(vllm_config: Any) -> Options | None:
    """The settings of a server on which TreeWY replaces something; None where it leaves vLLM as it is."""
    options = Options.of(vllm_config.additional_config)
    if options is None or options.mamba_state_commit == "store_all" or not vllm_config.num_speculative_tokens:
        return None
    return options


def window_rows(vllm_config: Any) -> int:
    """Rows of the largest window, root included."""
    return 1 + int(vllm_config.num_speculative_tokens)


def refusals(vllm_config: Any) -> list[str]:
    """Every setting of this server that TreeWY cannot serve, each with what to change; empty where all is well."""
    parallel, cache, speculative = (
        vllm_config.parallel_config,
        vllm_config.cache_config,
        vllm_config.speculative_config,
    )
    rows = window_rows(vllm_config)
    found = []
    architecture = vllm_config.model_config.architecture
    if architecture not in ARCHITECTURES:
        found.append(f"the model is {architecture}; supported are {', '.join(ARCHITECTURES)}")
    if not vllm_config.use_v2_model_runner:
        found.append(
            "this server uses model runner V1; TreeWY needs V2: remove VLLM_USE_V2_MODEL_RUNNER=0 and the setting that "
            "vLLM's log names beside 'Model Runner V2 does not yet support'"
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            found.append(f"{name} is {size}; it must be 1 (use tensor_parallel_size)")
    found += unsplit_heads(vllm_config)
    if getattr(parallel, "enable_dbo", False):
        found.append("enable_dbo is set; switch it off")
    if speculative.method not in CHAINS:
        found.append(no_chain(speculative.method))
    if getattr(speculative, "enable_adaptive_verification", False):
        found.append("enable_adaptive_verification is set in --speculative-config; switch it off")
    if speculative.method == "draft_model" and getattr(speculative.draft_model_config, "is_hybrid", False):
        found.append("the draft model has recurrent layers of its own; use method mtp or a draft model without them")
    if getattr(cache, "use_replayssm", False):
        found.append("use_replayssm is set; it and TreeWY replace the same thing: drop --use-replayssm")
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        found.append("kv_transfer_config is set; transfer of recurrent states between servers is not supported yet")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        found.append("enable_sleep_mode is set; sleep may discard what is kept beside blocks: drop --enable-sleep-mode")
    if cache.mamba_cache_mode not in ("none", "align"):
        found.append(f"mamba_cache_mode is {cache.mamba_cache_mode!r}; use 'none' or 'align'")
    if conv_layout() != "SD":
        found.append(f"VLLM_SSM_CONV_STATE_LAYOUT is {conv_layout()}; use SD")
    if rows > MAX_ROWS:
        found.append(f"num_speculative_tokens is {rows - 1}; a window has at most {MAX_ROWS - 1} draft nodes")
    if cache.mamba_cache_mode == "align" and cache.block_size and rows > cache.block_size:
        found.append(
            f"num_speculative_tokens is {rows - 1} with blocks of {cache.block_size} tokens; a window must not be "
            "longer than a block: raise block_size, or switch prefix caching off"
        )
    return found


def no_chain(method: str) -> str:
    """Why a speculative method is refused."""
    return f"the speculative method is {method}; use one of {', '.join(CHAINS)}"


def unsplit_heads(vllm_config: Any) -> list[str]:
    """Why the heads of the GDN layers cannot be shared out to the tensor-parallel ranks; empty where they can."""
    model, ranks = vllm_config.model_config.hf_text_config, vllm_config.parallel_config.tensor_parallel_size
    return [
        f"tensor_parallel_size is {ranks}, and {name} = {heads} cannot be split over {ranks} ranks: lower it"
        for name in ("linear_num_key_heads", "linear_num_value_heads")
        if (heads := getattr(model, name, 0)) % ranks
    ]


def conv_layout() -> str:
    """vLLM's layout of convolution states: SD (time, channels) or DS."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return "DS" if is_conv_state_dim_first() else "SD"
