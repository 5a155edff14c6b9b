"""A tiny Qwen3.5 hybrid whose multi-token prediction is right as often as one wants, for tests of the engine.

The next token is mostly a permutation of the last one (the head's row of perm[i] is the embedding of i), and the MTP
module passes the embedding through, so it predicts the same. Everything else in the model is noise on top: the louder
it is, the more often the model departs from the permutation and a draft is rejected. The noise comes from the GDN and
attention layers, so it depends on the whole text, and a wrong recurrent state changes tokens.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB = 128
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def write_checkpoint(
    folder: Path,
    *,
    noise: float = 0.3,
    hidden: int = 128,
    key_heads: int = 1,
    value_heads: int = 2,
    head_dim: int = 64,
    attention_heads: int = 2,
    attention_dim: int = 256,
    state_dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Writes a checkpoint of 4 layers, 3 of them GDN, with a tokenizer that knows t4 … t127.

    Blocks of vLLM hold at least as many tokens as make the attention layer's share as large as a recurrent state: the
    wide attention heads and the few small states here allow blocks of 32 tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = ["linear_attention"] * 3 + ["full_attention"]
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": attention_heads,
        "num_key_value_heads": attention_heads,
        "head_dim": attention_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "layer_types": layers,
        "mtp_num_hidden_layers": 1,
        "attn_output_gate": True,
        "mamba_ssm_dtype": state_dtype,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    )
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.05) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * scale

    key_dim, value_dim = key_heads * head_dim, value_heads * head_dim
    tensors: dict[str, torch.Tensor] = {}

    width = attention_heads * attention_dim

    def attention(prefix: str, loud: float) -> None:
        tensors[prefix + "q_proj.weight"] = draw(2 * width, hidden, scale=0.2)
        tensors[prefix + "k_proj.weight"] = draw(width, hidden, scale=0.2)
        tensors[prefix + "v_proj.weight"] = draw(width, hidden)
        tensors[prefix + "o_proj.weight"] = draw(hidden, width, scale=loud)
        tensors[prefix + "q_norm.weight"] = torch.zeros(attention_dim)
        tensors[prefix + "k_norm.weight"] = torch.zeros(attention_dim)

    def mlp(prefix: str, loud: float) -> None:
        tensors[prefix + "gate_proj.weight"] = draw(2 * hidden, hidden)
        tensors[prefix + "up_proj.weight"] = draw(2 * hidden, hidden)
        tensors[prefix + "down_proj.weight"] = draw(hidden, 2 * hidden, scale=loud)

    for index, kind in enumerate(layers):
        prefix = f"model.layers.{index}."
        tensors[prefix + "input_layernorm.weight"] = torch.zeros(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.zeros(hidden)
        mlp(prefix + "mlp.", 0.3 * noise)
        if kind == "full_attention":
            attention(prefix + "self_attn.", 0.3 * noise)
            continue
        prefix += "linear_attn."
        tensors[prefix + "in_proj_qkv.weight"] = draw(2 * key_dim + value_dim, hidden)
        tensors[prefix + "in_proj_z.weight"] = draw(value_dim, hidden)
        tensors[prefix + "in_proj_b.weight"] = draw(value_heads, hidden)
        tensors[prefix + "in_proj_a.weight"] = draw(value_heads, hidden)
        tensors[prefix + "conv1d.weight"] = draw(2 * key_dim + value_dim, 1, 4, scale=0.4)
        tensors[prefix + "dt_bias"] = torch.full((value_heads,), -2.0)
        tensors[prefix + "A_log"] = torch.log(torch.rand(value_heads, generator=rng) * 2 + 0.1)
        tensors[prefix + "norm.weight"] = torch.ones(head_dim)
        tensors[prefix + "out_proj.weight"] = draw(hidden, value_dim, scale=0.9 * noise)
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "layers.0.input_layernorm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden)
    tensors["mtp.layers.0.post_attention_layernorm.weight"] = torch.zeros(hidden)
    mlp("mtp.layers.0.mlp.", 0.1 * noise)
    attention("mtp.layers.0.self_attn.", 0.1 * noise)

    embedding = draw(VOCAB, hidden, scale=1.0)
    embedding *= hidden**0.5 / embedding.norm(dim=-1, keepdim=True)
    ordinary = VOCAB - len(SPECIAL)
    permutation = torch.cat([torch.arange(4), 4 + torch.randperm(ordinary, generator=rng)])
    head = torch.zeros(VOCAB, hidden)
    head[permutation] = embedding / hidden**0.5 * 0.5
    head[: len(SPECIAL)] = 0
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = head
    tensors["model.norm.weight"] = torch.zeros(hidden)
    save_file(
        {name: t.float() if name.endswith("A_log") else t.bfloat16().contiguous() for name, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )

    words = {word: index for index, word in enumerate(SPECIAL)}
    words |= {f"t{index}": index for index in range(len(SPECIAL), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names})
    )
    return folder
