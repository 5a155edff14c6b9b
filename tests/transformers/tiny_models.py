"""Tiny random models of every supported class, fp32: grouped heads, experts, negative eigenvalues."""

from __future__ import annotations

import torch
from transformers import (
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 61

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_QWEN_3_5 = {"head_dim": 16, "mtp_num_hidden_layers": 1}

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen3_5_multimodal")


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose recurrent layers matter: weights are large enough that logits differ clearly."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**_COMMON, **_MOE, head_dim=16, mlp_only_layers=[0]))
    elif family == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_COMMON, **_QWEN_3_5))
    elif family == "qwen3_5_moe":
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_COMMON, **_MOE, **_QWEN_3_5))
    elif family == "olmo_hybrid":
        model = OlmoHybridForCausalLM(OlmoHybridConfig(**_COMMON, linear_allow_neg_eigval=True))
    elif family == "qwen3_5_multimodal":
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        config = Qwen3_5Config(text_config={**_COMMON, **_QWEN_3_5}, vision_config=vision, tie_word_embeddings=False)
        model = Qwen3_5ForConditionalGeneration(config)
    else:
        raise ValueError(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "visual" not in name:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5 if "conv1d" not in name else 0.5)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3, 0)
            elif name.endswith("A_log"):
                parameter.uniform_(-3, 1)
    model.generation_config.eos_token_id = None
    return model.eval()
