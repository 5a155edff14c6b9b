"""The model that the package ships, through its own MTP head, against `model.generate` of the untouched model, fp32.

Prompts are pieces of text of 1 to 300 tokens. Wherever a test compares texts they are 200 tokens and more.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM

from treewy.acceptance import SamplingParams
from treewy.model import MODEL_DIR
from treewy.state import RecurrentState
from treewy.transformers import HFTarget, SpeculativeDecoder

MODES = ("store_all", "reconstruct", "deferred")
SHAPES = {
    "chain": {"draft_tree_widths": (1, 1, 1)},
    "2,2,2": {"draft_tree_widths": (2, 2, 2)},
    "3,3,3": {"draft_tree_widths": (3, 3, 3)},
    "best-first": {"draft_tree_budget": 15},
    "n-gram": {"drafter": "ngram", "draft_tree_budget": 16},
}
LENGTHS = (1, 20, 117, 300)
NEW_TOKENS = 210
TEXT = Path(torch.nn.functional.__file__).read_text()


@functools.cache
def model():
    shipped = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    shipped.generation_config.eos_token_id = None
    return shipped


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def prompt(length: int) -> list[int]:
    return tokenizer()(TEXT[40 * length :][: 12 * length])["input_ids"][:length]


@functools.cache
def greedy_text(length: int) -> list[int]:
    ids = torch.tensor([prompt(length)])
    output = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0].tolist()


def test_it_is_a_plain_checkpoint_with_an_mtp_head():
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["mtp_num_hidden_layers"], config["mamba_ssm_dtype"]) == (1, "float32")
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (128, 128)
    assert config["layer_types"].count("linear_attention") == 3 * config["layer_types"].count("full_attention")
    assert isinstance(model(), Qwen3_5ForCausalLM)
    assert sum(path.stat().st_size for path in MODEL_DIR.glob("*.safetensors")) <= 20e6
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        names = list(file.keys())
        parameters = sum(file.get_tensor(name).numel() for name in names)
        assert {file.get_tensor(name).dtype for name in names} <= {torch.bfloat16, torch.float32}
    assert sum(name.startswith("mtp.") for name in names) == 15
    assert 8e6 <= parameters <= 10e6


def test_its_tokenizer_gives_the_text_back():
    text = "def f(x):\n    return [y ** 2 for y in x]  # ≥ 0\n"
    assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_four_sequences_are_greedy_as_the_model_is(shape, mode):
    longest = max(LENGTHS)
    ids = torch.tensor([[0] * (longest - n) + prompt(n) for n in LENGTHS])
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in LENGTHS])
    decoder = SpeculativeDecoder(model(), **{"drafter": "mtp", **SHAPES[shape]}, mamba_state_commit=mode)
    output = decoder.generate(ids, mask, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    for sequence, length in zip(output.sequences.tolist(), LENGTHS, strict=True):
        assert sequence[longest - length :] == greedy_text(length)
    assert output.statistics.acceptance_length > (1.2 if shape == "n-gram" else 2.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 117])
def test_one_sequence_is_greedy_as_the_model_is(shape, length):
    decoder = SpeculativeDecoder(model(), **{"drafter": "mtp", **SHAPES[shape]})
    sequence = decoder.generate(torch.tensor([prompt(length)]), max_new_tokens=NEW_TOKENS)
    assert sequence[0].tolist() == greedy_text(length)


@pytest.mark.parametrize("mode", MODES)
def test_state_after_every_round_is_that_of_a_fresh_prefill(mode):
    """Recurrent, convolution and KV state, through 120 tokens of best-first trees."""
    decoder = SpeculativeDecoder(model(), "mtp", draft_tree_budget=15, mamba_state_commit=mode)
    run = decoder.run([prompt(20), prompt(117)], SamplingParams(), 120)
    fresh = HFTarget(model(), 1, max_rows=1)
    attention = [i for i, kind in enumerate(model().config.layer_types) if kind == "full_attention"]
    compared = 0
    for _ in run:
        for request in run.requests:
            fresh.prefill([0], [request.tokens[:-1]])
            assert run.target.committed[request.index] == request.tokens[:-1]
            for layer in range(6):
                mine, its = run.target.state.read(layer, request.index), fresh.state.read(layer, 0)
                for kind in range(2):
                    torch.testing.assert_close(
                        mine[kind], its[kind], rtol=1e-3, atol=1e-4 * float(its[kind].abs().max())
                    )
            for layer in attention:
                for mine, its in zip(run.target.kv.read(layer, request.index), fresh.kv.read(layer, 0), strict=True):
                    torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4 * float(its.abs().max()))
            compared += 1
    assert compared > 40


def test_drafts_gain_with_width_and_with_best_first_growth():
    """The order of the acceptance table, on a few prompts: chain < (2,2,2) < (3,3,3), and best-first over (2,2,2)."""
    lengths = {}
    prompts = [prompt(n) for n in (40, 60, 80, 100, 150, 200)]
    for name, shape in list(SHAPES.items())[:4]:
        run = SpeculativeDecoder(model(), "mtp", **shape).run(prompts, SamplingParams(), 72)
        accepted = [step.accepted for steps in run for step in steps if step.rows and step.remaining > 8]
        lengths[name] = sum(accepted) / len(accepted)
    assert lengths["chain"] < lengths["2,2,2"] < lengths["3,3,3"] < lengths["best-first"]


def test_reconstruct_takes_a_fifteenth_of_store_all():
    """Measured on what is allocated for (3,3,3), one sequence."""
    held = {}
    for mode in MODES:
        decoder = SpeculativeDecoder(model(), "mtp", draft_tree_widths=(3, 3, 3), mamba_state_commit=mode)
        state = decoder.target(1).state
        assert isinstance(state, RecurrentState)
        held[mode] = sum(tensor.untyped_storage().nbytes() for tensor in state.tensors.values())
        assert held[mode] == state.spec.bytes_per_request
    assert held["store_all"] >= 40 * 6 * 2 * 128 * 128 * 4
    assert held["reconstruct"] <= held["store_all"] / 15
    assert held["deferred"] <= held["store_all"] / 15
