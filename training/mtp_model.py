"""The small Gated DeltaNet hybrid model and its multi-token-prediction (MTP) head, as trained here.

Weights live in Hugging Face's ``Qwen3_5ForCausalLM`` (the trunk) and in :class:`MTPHead` (checkpoint names ``mtp.*``).
The training forward pass is written as a few functions over plain dictionaries of tensors.  That keeps each of them
compilable once and shared by all layers of its kind; ``test_training.py`` checks them against Hugging Face's code.

MTP semantics (the same as vLLM's): the entry at base position ``p`` takes the trunk's hidden state of ``p`` *after*
the final norm and the embedding of token ``p + 1``; deeper entries of the same base take the head's own output and the
embedding of token ``p + d``, sit at rope position ``p + d - 1`` and see the depth-1 entries of all bases up to ``p``
plus the base's own deeper entries.  Depth ``d`` predicts token ``p + d + 1`` through the shared output matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gdn_chunked import chunk_gated_delta_rule
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

Params = dict[str, Tensor]
LOOKAHEAD = 8  # base positions left off at the end of a window, so that depths up to 7 have targets

PRESETS: dict[str, dict[str, int]] = {
    "full": dict(vocab_size=8192, hidden_size=256, num_hidden_layers=8, intermediate_size=704, num_attention_heads=4,
                 num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2,
                 linear_key_head_dim=128, linear_value_head_dim=128),
    "tiny": dict(vocab_size=8192, hidden_size=32, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2,
                 linear_key_head_dim=16, linear_value_head_dim=16),
}  # fmt: skip


def make_config(preset: str) -> Qwen3_5TextConfig:
    """Return the Hugging Face config of a preset: three Gated DeltaNet layers, then one of full attention, repeated."""
    config = Qwen3_5TextConfig(
        **PRESETS[preset],
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        mtp_num_hidden_layers=1,
        mamba_ssm_dtype="float32",
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    )
    config.architectures = ["Qwen3_5ForCausalLM"]
    config._attn_implementation = "sdpa"
    return config


class MTPHead(nn.Module):
    """Container of the MTP weights under their checkpoint names; the arithmetic is in :func:`mtp_entry`."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        one_layer = copy.deepcopy(config)
        one_layer.layer_types = ["full_attention"]
        one_layer.num_hidden_layers = 1
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([hf.Qwen3_5DecoderLayer(one_layer, 0)])
        self.norm = hf.Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = hf.Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_embedding = hf.Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)


class TrunkWithMTP(nn.Module):
    """The trunk (``lm``) and the head (``mtp``) together, as one thing to train and to save."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.config = config
        self.lm = Qwen3_5ForCausalLM(config)
        self.mtp = MTPHead(config)
        initialise(self)

    @property
    def embedding(self) -> nn.Parameter:
        """The token embedding, which is also the output matrix of trunk and head."""
        return self.lm.model.embed_tokens.weight


@torch.no_grad()
def initialise(model: TrunkWithMTP) -> None:
    """Start values: residual branches at zero, other matrices at unit gain, short convolutions near the identity."""
    for name, p in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            p.zero_()
        elif name.endswith("conv1d.weight"):
            p.normal_(0, 0.3)
            p[:, 0, -1] += 0.7
        elif "embed_tokens" in name:
            p.normal_(0, 0.05)
        elif p.ndim == 2:
            p.normal_(0, p.shape[1] ** -0.5)
        elif name.endswith("A_log"):
            p.uniform_(0.01, 4).log_()
        elif name.endswith("dt_bias") or name.endswith("linear_attn.norm.weight"):
            p.fill_(1.0)
        else:
            p.zero_()  # the other norms scale by 1 + weight


# --- the pieces of the forward pass -------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm with gain ``1 + weight``, in float32, back in the dtype of ``x``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def mlp(x: Tensor, p: Params) -> Tensor:
    """The gated feed-forward layer."""
    gate = F.silu(F.linear(x, p["mlp.gate_proj.weight"]))
    return F.linear(gate * F.linear(x, p["mlp.up_proj.weight"]), p["mlp.down_proj.weight"])


def delta_net(x: Tensor, p: Params) -> Tensor:
    """The Gated DeltaNet mixer; its sizes follow from the shapes of its weights."""
    batch, time, _ = x.shape
    value_heads = p["linear_attn.A_log"].shape[0]
    dv = p["linear_attn.norm.weight"].shape[0]
    taps = p["linear_attn.conv1d.weight"][:, 0]
    channels, width = taps.shape
    key_width = (channels - value_heads * dv) // 2
    mixed = F.linear(x, p["linear_attn.in_proj_qkv.weight"])
    shifted = F.pad(mixed, (0, 0, width - 1, 0))
    conv = shifted[:, :time].float() * taps[:, 0]
    for j in range(1, width):
        conv = conv + shifted[:, j : j + time].float() * taps[:, j]
    q, k, v = F.silu(conv).to(mixed.dtype).split([key_width, key_width, channels - 2 * key_width], -1)
    # The checkpoint does not store the key head size; in this family it equals the value head size.
    q, k = (t.reshape(batch, time, -1, dv) for t in (q, k))
    v = v.reshape(batch, time, value_heads, dv)
    beta = F.linear(x, p["linear_attn.in_proj_b.weight"]).float().sigmoid()
    step = F.softplus(F.linear(x, p["linear_attn.in_proj_a.weight"]).float() + p["linear_attn.dt_bias"])
    out = chunk_gated_delta_rule(q, k, v, -p["linear_attn.A_log"].float().exp() * step, beta)
    z = F.linear(x, p["linear_attn.in_proj_z.weight"]).reshape(out.shape).float()
    wide = out.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    out = (wide * p["linear_attn.norm.weight"] * F.silu(z)).to(mixed.dtype)
    return F.linear(out.reshape(batch, time, -1), p["linear_attn.out_proj.weight"])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on the first ``cos.shape[-1]`` channels of ``[batch, heads, time, channels]``."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    half = size // 2
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    return torch.cat([(turned * cos + swapped * sin).to(x.dtype), rest], -1)


def project(x: Tensor, p: Params, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values ``[batch, heads, time, channels]`` and the output gate ``[batch, time, width]``."""
    batch, time, _ = x.shape
    dim = p["self_attn.q_norm.weight"].shape[0]
    q, gate = F.linear(x, p["self_attn.q_proj.weight"]).view(batch, time, -1, 2 * dim).chunk(2, -1)
    k = F.linear(x, p["self_attn.k_proj.weight"]).view(batch, time, -1, dim)
    v = F.linear(x, p["self_attn.v_proj.weight"]).view(batch, time, -1, dim).transpose(1, 2)
    q = _rotate(rms_norm(q, p["self_attn.q_norm.weight"]).transpose(1, 2), cos, sin)
    k = _rotate(rms_norm(k, p["self_attn.k_norm.weight"]).transpose(1, 2), cos, sin)
    return q, k, v, gate.reshape(batch, time, -1)


def _finish_attention(mixed: Tensor, gate: Tensor, p: Params) -> Tensor:
    out = mixed.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)
    return F.linear(out, p["self_attn.o_proj.weight"])


def delta_net_block(x: Tensor, p: Params) -> Tensor:
    """One Gated DeltaNet decoder layer."""
    x = x + delta_net(rms_norm(x, p["input_layernorm.weight"]), p)
    return x + mlp(rms_norm(x, p["post_attention_layernorm.weight"]), p)


def attention_block(x: Tensor, p: Params, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One full-attention decoder layer; also returns its keys and values."""
    q, k, v, gate = project(rms_norm(x, p["input_layernorm.weight"]), p, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + _finish_attention(mixed, gate, p)
    return x + mlp(rms_norm(x, p["post_attention_layernorm.weight"]), p), k, v


def branch_attention(q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor]) -> Tensor:
    """Attention of deeper MTP entries: causal over the depth-1 entries ``k, v``, plus each base's own deeper entries.

    ``own_k[i][:, :, p]`` is the entry of base ``p`` at depth ``i + 2``; only base ``p`` itself sees it.

    The softmax is written out: scaled by the largest causal score, and with the few own scores added one by one,
    because Triton 3.6 fails to compile the fused kernel if they are stacked into one tensor.
    """
    batch, heads, time, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q = q.reshape(batch, kv_heads, group * time, dim) * dim**-0.5
    shape = (batch, kv_heads, group, time)
    scores = (q @ k.transpose(-1, -2)).reshape(*shape, time).float()
    row = torch.arange(time, device=q.device)
    scores = scores.masked_fill(row[None, :] > row[:, None], float("-inf"))
    q = q.reshape(*shape, dim)
    own = [(q.float() * key[:, :, None].float()).sum(-1, keepdim=True) for key in own_k]
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp((scores - top).clamp_max(60.0))
    total = weights.sum(-1, keepdim=True)
    mixed = (weights.to(v.dtype).reshape(batch, kv_heads, group * time, time) @ v).reshape(*shape, dim).float()
    for score, value in zip(own, own_v, strict=True):
        weight = torch.exp((score - top).clamp_max(60.0))
        total = total + weight
        mixed = mixed + weight * value[:, :, None].float()
    return (mixed / total).to(v.dtype).reshape(batch, heads, time, dim)


def mtp_entry(
    hidden: Tensor, embedded: Tensor, p: Params, cos: Tensor, sin: Tensor, keys: list[Tensor], values: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One MTP depth for all base positions at once.

    Args:
        hidden: ``[batch, bases, width]``, the trunk's hidden state (depth 1) or the head's previous output.
        embedded: embedding of the token that this depth consumes.
        p: MTP weights; cos, sin: rope of this depth's positions.
        keys, values: those of the shallower depths, shallowest first; empty at depth 1.

    Returns:
        The head's output after its final norm, and this depth's keys and values.
    """
    both = [
        rms_norm(embedded, p["pre_fc_norm_embedding.weight"]),
        rms_norm(hidden, p["pre_fc_norm_hidden.weight"]),
    ]
    x = F.linear(torch.cat(both, -1), p["fc.weight"])
    if keys:
        q, k, v, gate = project(rms_norm(x, p["input_layernorm.weight"]), p, cos, sin)
        mixed = branch_attention(q, keys[0], values[0], [*keys[1:], k], [*values[1:], v])
        x = x + _finish_attention(mixed, gate, p)
        x = x + mlp(rms_norm(x, p["post_attention_layernorm.weight"]), p)
    else:
        x, k, v = attention_block(x, p, cos, sin)
    return rms_norm(x, p["norm.weight"]), k, v


def token_loss(hidden: Tensor, embedding: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the shared output matrix against token ids."""
    logits = F.linear(hidden, embedding).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def distil_loss(hidden: Tensor, embedding: Tensor, teacher_logits: Tensor) -> Tensor:
    """Mean KL divergence from the trunk's full next-token distribution to the head's."""
    student = F.log_softmax(F.linear(hidden, embedding).float(), -1)
    teacher = F.log_softmax(teacher_logits.float(), -1)
    return (teacher.exp() * (teacher - student)).sum(-1).mean()


def embed(ids: Tensor, embedding: Tensor) -> Tensor:
    """Rows of the embedding."""
    return F.embedding(ids, embedding)


def logits_of(hidden: Tensor, embedding: Tensor) -> Tensor:
    """Logits through the shared output matrix."""
    return F.linear(hidden, embedding)


# --- the whole forward pass ---------------------------------------------------------------------------------------


@dataclass
class Ops:
    """The functions that make up a forward pass, compiled or not."""

    embed: Callable = embed
    delta_net_block: Callable = delta_net_block
    attention_block: Callable = attention_block
    mtp_entry: Callable = mtp_entry
    token_loss: Callable = token_loss
    distil_loss: Callable = distil_loss

    def compiled(self) -> Ops:
        """The same functions through ``torch.compile``."""
        torch._dynamo.config.recompile_limit = 64
        return Ops(**{name: torch.compile(f, dynamic=False) for name, f in vars(self).items()})


class Forward:
    """Runs trunk and head of a :class:`TrunkWithMTP` with a given set of operations."""

    def __init__(self, model: TrunkWithMTP, ops: Ops, max_length: int) -> None:
        self.model, self.ops = model, ops
        self.layers: list[Params] = [dict(layer.named_parameters()) for layer in model.lm.model.layers]
        self.mtp: Params = {}
        for name, p in model.mtp.named_parameters():
            self.mtp[name.removeprefix("layers.0.")] = p
        device = model.embedding.device
        positions = torch.arange(max_length + LOOKAHEAD, device=device)[None, None].expand(3, 1, -1)
        cos, sin = model.lm.model.rotary_emb(torch.zeros(1, device=device), positions)
        self.cos, self.sin = cos[0], sin[0]

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, shared by trunk and head."""
        return self.ops.embed(ids, self.model.embedding)

    def trunk(self, x: Tensor) -> Tensor:
        """Hidden states after the final norm, ``[batch, time, width]``, from token embeddings of that shape."""
        time = x.shape[1]
        for p in self.layers:
            if "linear_attn.A_log" in p:
                x = self.ops.delta_net_block(x, p)
            else:
                x, _, _ = self.ops.attention_block(x, p, self.cos[:time], self.sin[:time])
        return rms_norm(x, self.model.lm.model.norm.weight)

    def heads(self, embedded: Tensor, hidden: Tensor, depths: int, bases: int) -> list[Tensor]:
        """Outputs of the MTP head at depths ``1 .. depths`` for base positions ``0 .. bases - 1``."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        current = hidden[:, :bases]
        for d in range(1, depths + 1):
            rope = self.cos[d - 1 : d - 1 + bases], self.sin[d - 1 : d - 1 + bases]
            current, k, v = self.ops.mtp_entry(current, embedded[:, d : d + bases], self.mtp, *rope, keys, values)
            keys, values = [*keys, k], [*values, v]
            outputs.append(current)
        return outputs

    def joint_losses(self, ids: Tensor, depths: int) -> tuple[Tensor, list[Tensor]]:
        """Next-token loss of the trunk and token losses of the head per depth (gradients reach the trunk)."""
        bases = ids.shape[1] - LOOKAHEAD
        embedded = self.embed(ids)
        hidden = self.trunk(embedded)
        main = self.ops.token_loss(hidden[:, :-1], self.model.embedding, ids[:, 1:])
        drafts = []
        for d, out in enumerate(self.heads(embedded, hidden, depths, bases), 1):
            drafts.append(self.ops.token_loss(out, self.model.embedding, ids[:, d + 1 : d + 1 + bases]))
        return main, drafts

    def distil_losses(self, ids: Tensor, depths: int) -> list[Tensor]:
        """KL divergences of the head from the frozen trunk's own distributions, per depth."""
        bases = ids.shape[1] - LOOKAHEAD
        with torch.no_grad():
            embedded = self.embed(ids)
            hidden = self.trunk(embedded)
            teacher = logits_of(hidden, self.model.embedding)
        losses = []
        for d, out in enumerate(self.heads(embedded, hidden, depths, bases), 1):
            losses.append(self.ops.distil_loss(out, self.model.embedding, teacher[:, d : d + bases]))
        return losses


@torch.no_grad()
def round_trunk_to_bfloat16(model: TrunkWithMTP) -> None:
    """Round the trunk's weights to the values that are shipped, so that the head learns to follow exactly those."""
    for name, p in model.lm.named_parameters():
        if not name.endswith("A_log"):
            p.copy_(p.bfloat16())
