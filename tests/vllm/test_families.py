"""Other models than the dense Qwen3.5 of the other tests, and other dtypes of the state.

The random models' experts choose by small differences, so their tokens are not compared; the states of their GDN layers
are. What a layer adds is small, so that bf16 does not add up from layer to layer. Drafts come from n-gram lookup.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.vllm.checkpoint import VOCAB, write_checkpoint
from tests.vllm.engine import Oracle, compare_states, play, running

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "qwen3_next":
        made = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, mlp_only_layers=[0, 1, 2]))
    else:
        made = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "conv1d" in name:
                parameter.normal_(0, 0.4)
            elif "embed" in name:
                parameter.normal_()
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.02 if "down" in name or "o_proj" in name or "out_proj" in name else 0.1)
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_states_of_other_families(checkpoint, family: str, tmp_path: Path) -> None:
    model(family).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path)
    oracle, compared = Oracle(tmp_path), 0
    with running(tmp_path, "deferred", draft_tokens=0, speculative_config=NGRAM, block_size=128) as engine:
        for length in (1, 7, 15):
            engine.add([*[5, 6, 7, 8] * 6, *range(20, 20 + length)], 24)
        while engine.busy:
            engine.step()
            compared += compare_states(engine, oracle)
        assert engine.drafts()[0] > 20
    assert compared > 20


def test_the_multimodal_class(checkpoint, oracle: Oracle, tmp_path: Path) -> None:
    """Its language model, with the weights of the dense one under the names they have there; without an encoder."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    text = json.loads((checkpoint / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5", **vision},
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(checkpoint / "model.safetensors")
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: weight
        for name, weight in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with running(tmp_path, "deferred", language_model_only=True) as engine:
        assert type(engine.runner.model).__name__ == "Qwen3_5ForConditionalGeneration"
        run = play(engine, oracle, 0, requests=3, tokens=20, compare_every=3)
        assert run.states > 0
        assert engine.drafts()[1] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_of_the_state(tmp_path: Path, dtype: str) -> None:
    """Class 29."""
    checkpoint = write_checkpoint(tmp_path, noise=0.5, state_dtype=dtype)
    with running(checkpoint, "deferred") as engine:
        assert engine.runner.model_state.running.spec.state_dtype == getattr(torch, dtype)
        run = play(engine, Oracle(checkpoint), 0, requests=4, tokens=40, compare_every=4)
        assert run.states > 0
