"""`SpeculativeDecoder.generate` against `model.generate` of the untouched model, fp32, on tiny random models.

The drafter of most tests knows the coming text and is wrong as often as it is told, so that every shape sees every
length of acceptance. Token streams must be identical, whatever is drafted.
"""

from __future__ import annotations

import functools
import json
import random

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.drafters import KnownText
from tests.transformers.tiny_models import FAMILIES, VOCAB, tiny_model
from treewy.acceptance import SamplingParams
from treewy.drafting import FixedWidths, NodeBudget, Request
from treewy.state import StateSpec
from treewy.transformers import GenerateOutput, HFTarget, MTPHead, SpeculativeDecoder, StopRules

MODES = ("store_all", "reconstruct", "deferred")
SHAPES = {
    "chain": FixedWidths((1, 1, 1)),
    "2,2,2": FixedWidths((2, 2, 2)),
    "3,3,3": FixedWidths((3, 3, 3)),
    "ragged": NodeBudget(24, 8),
}
LENGTHS = (1, 17, 120, 300)
NEW_TOKENS = 200


@functools.cache
def model_of(family: str):
    return tiny_model(family)


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


@functools.cache
def greedy_text(family: str, length: int) -> tuple[int, ...]:
    """Prompt and 200 tokens of `model.generate`."""
    ids = torch.tensor([prompt(length)])
    output = model_of(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return tuple(output[0].tolist())


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def assert_greedy(family, drafter, mode, lengths, **kwargs):
    ids, mask = padded([prompt(n) for n in lengths])
    decoder = SpeculativeDecoder(model_of(family), drafter, mamba_state_commit=mode, **kwargs)
    output = decoder.generate(ids, mask, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
    for sequence, length in zip(output.sequences.tolist(), lengths, strict=True):
        assert tuple(sequence[ids.shape[1] - length :]) == greedy_text(family, length)
    return output.statistics


def known_text(family, lengths, shape):
    return KnownText([greedy_text(family, n) for n in lengths], shape, accuracy=0.8, vocab=VOCAB)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_four_is_greedy_as_the_model_is(family, mode, shape):
    """Prompts of 1 to 300 tokens, other acceptance in every row."""
    statistics = assert_greedy(family, known_text(family, LENGTHS, SHAPES[shape]), mode, LENGTHS)
    assert 1.5 < statistics.acceptance_length < 4
    assert statistics.rounds < NEW_TOKENS


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_sequence_is_greedy_as_the_model_is(shape, length):
    for mode in MODES:
        assert_greedy("qwen3_5", known_text("qwen3_5", [length], SHAPES[shape]), mode, [length])


@pytest.mark.parametrize("family", FAMILIES)
def test_ngram_trees_are_greedy_as_the_model_is(family):
    for mode in MODES:
        assert_greedy(family, "ngram", mode, LENGTHS, draft_tree_budget=16)


@pytest.mark.parametrize(
    "shape", [{"draft_tree_widths": (2, 2)}, {"draft_tree_budget": 12, "max_draft_depth": 4}], ids=str
)
@pytest.mark.parametrize("draft_family", ["qwen3_5", "llama"])
def test_a_draft_model_is_greedy_as_the_target_is(draft_family, shape):
    """A GDN draft model near the target, and one of another family that knows nothing."""
    if draft_family == "llama":
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        draft_model = LlamaForCausalLM(config).eval()
    else:
        draft_model = tiny_model("qwen3_5")
        with torch.no_grad():
            for parameter in draft_model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    statistics = assert_greedy("qwen3_5", "model", "deferred", (1, 17, 120), draft_model=draft_model, **shape)
    assert statistics.acceptance_length > (1.5 if draft_family == "qwen3_5" else 1)


def test_a_draft_model_runs_more_nodes_than_a_window_holds():
    """Growth drops nodes that it has run; all that were run, over all levels, would not fit 64 rows."""
    draft_model = tiny_model("qwen3_5", seed=1)  # uncertain of everything: many nodes are run and dropped
    statistics = assert_greedy(
        "qwen3_5", "model", "deferred", (17,), draft_model=draft_model, draft_tree_budget=60, max_draft_depth=12
    )
    assert statistics.rows / statistics.windows > 40


def save_with_head(model, folder, seed=3):
    model.save_pretrained(folder)
    state = MTPHead.random(model, seed).state_dict()
    save_file({f"mtp.{name}": tensor.contiguous() for name, tensor in state.items()}, folder / "mtp.safetensors")
    names = {f"mtp.{name}": "mtp.safetensors" for name in state}
    names |= {name: "model.safetensors" for name in model.state_dict()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "olmo_hybrid"])
def test_a_random_mtp_head_is_greedy_as_the_model_is(family, tmp_path):
    folder = save_with_head(model_of(family), tmp_path)
    for kwargs in ({"draft_tree_widths": (2, 2, 2)}, {"draft_tree_budget": 15}):
        assert_greedy(family, "mtp", "deferred", (1, 17, 120), mtp_checkpoint=folder, **kwargs)


def test_an_mtp_head_that_is_not_there_is_missed(tmp_path):
    """The error says which drafters would work."""
    model = model_of("qwen3_5")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no MTP head .*n-gram lookup or a draft model"):
        SpeculativeDecoder(model, "mtp", mtp_checkpoint=tmp_path)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("eos", [None, 7, [7, 30]])
def test_stop_tokens_end_each_row_where_the_model_ends_it(do_sample, eos):
    """Greedy rows equal the model's; every row ends with its first stop token and is padded behind it."""
    ids, mask = padded([prompt(n) for n in LENGTHS])
    decoder = SpeculativeDecoder(model_of("qwen3_5"), known_text("qwen3_5", LENGTHS, SHAPES["2,2,2"]))
    output = decoder.generate(
        ids, mask, max_new_tokens=60, do_sample=do_sample, eos_token_id=eos, pad_token_id=1, seed=0,
        return_dict_in_generate=True,
    )  # fmt: skip
    if not do_sample:
        theirs = model_of("qwen3_5").generate(
            ids, attention_mask=mask, max_new_tokens=60, do_sample=False, eos_token_id=eos, pad_token_id=1
        )
        assert torch.equal(output.sequences, theirs)
    stops = {7: [7], None: []}.get(eos if not isinstance(eos, list) else 0, eos)
    for row, reason in zip(output.sequences[:, ids.shape[1] :].tolist(), output.finish_reasons, strict=True):
        ends = [i for i, token in enumerate(row) if token in (stops or [])]
        assert reason == ("stop_token" if ends else "length")
        assert set(row[ends[0] + 1 :] if ends else []) <= {1}


class Letters:
    """A tokenizer of one or two letters a token."""

    def decode(self, tokens):
        return "".join(chr(97 + token % 5) + ("x" if token % 3 == 0 else "") for token in tokens)


def test_stop_strings_end_with_the_token_that_completes_them():
    text = greedy_text("qwen3_5", 17)
    letters = Letters()
    target = letters.decode(text[30:33])
    decoder = SpeculativeDecoder(model_of("qwen3_5"), known_text("qwen3_5", [17], SHAPES["3,3,3"]))
    output = decoder.generate(
        torch.tensor([prompt(17)]), max_new_tokens=60, stop_strings=[target, "zzz"], tokenizer=letters,
        return_dict_in_generate=True,
    )  # fmt: skip
    tokens = output.sequences[0].tolist()
    expected = next(n for n in range(18, 78) if target in letters.decode(text[max(0, n - len(target) - 2) : n]))
    assert tokens == list(text[:expected])
    assert output.finish_reasons == ["stop_string"]


def test_a_stop_string_in_the_prompt_alone_stops_nothing():
    rules = StopRules([], ["bc"], Letters())
    request = Request(0, [1, 2, 4], 2, 9, SamplingParams(), torch.Generator())
    assert Letters().decode(request.tokens) == "bce"
    assert rules(request) is None
    request.tokens = [4, 1, 2]  # begins in the prompt, ends in the new token
    assert rules(request) == "stop_string"


def test_stop_strings_need_a_tokenizer():
    decoder = SpeculativeDecoder(model_of("qwen3_5"), "none")
    with pytest.raises(ValueError, match="stop_strings need the tokenizer"):
        decoder.generate(torch.tensor([prompt(3)]), stop_strings="end")


class Streamer:
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_every_token_once():
    streamer = Streamer()
    decoder = SpeculativeDecoder(model_of("qwen3_5"), known_text("qwen3_5", [17], SHAPES["chain"]))
    sequences = decoder.generate(torch.tensor([prompt(17)]), max_new_tokens=50, streamer=streamer)
    assert streamer.pieces[0] == prompt(17)
    assert max(map(len, streamer.pieces[1:])) > 1
    assert [token for piece in streamer.pieces for token in piece] == sequences[0].tolist()
    assert streamer.ended
    with pytest.raises(ValueError, match="a streamer takes one sequence"):
        decoder.generate(torch.tensor([[1], [2]]), streamer=streamer)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}], ids=str)
def test_scores_are_those_of_the_model(sampling):
    """Greedy: those of `model.generate`. Sampled: its logits processors applied to the forward of the text so far."""
    ids, mask = padded([prompt(n) for n in (1, 17)])
    model = model_of("qwen3_5")
    decoder = SpeculativeDecoder(model, known_text("qwen3_5", (1, 17), SHAPES["2,2,2"]))
    output = decoder.generate(
        ids, mask, max_new_tokens=30, seed=1, output_scores=True, return_dict_in_generate=True, **sampling
    )
    assert isinstance(output, GenerateOutput)
    assert len(output.scores) == 30
    if not sampling:
        theirs = model.generate(
            ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        torch.testing.assert_close(torch.stack(output.scores), torch.stack(theirs.scores), rtol=1e-4, atol=1e-4)
        return
    for n in (0, 13, 29):
        with torch.inference_mode():
            logits = model(output.sequences[1:, : 17 + n]).logits[0, -1] / 0.7
        kept = output.scores[n][1].isfinite()
        torch.testing.assert_close(output.scores[n][1][kept], logits[kept], rtol=1e-4, atol=1e-4)
        assert kept.sum() <= 9
        assert logits[kept].min() > logits[~kept].max()
        assert kept[output.sequences[1, 17 + n]]


def test_sampling_repeats_with_its_seed_and_not_without():
    decoder = SpeculativeDecoder(model_of("qwen3_5"), known_text("qwen3_5", LENGTHS, SHAPES["2,2,2"]))
    ids, mask = padded([prompt(n) for n in LENGTHS])
    sample = functools.partial(decoder.generate, ids, mask, max_new_tokens=30, do_sample=True)
    first = sample(seed=4)
    decoder.drafter._rng = random.Random(0)
    assert torch.equal(first, sample(seed=4))
    assert not torch.equal(first, sample(seed=5))
    assert not torch.equal(sample(), sample())


def test_drafts_of_fixed_shape_are_drawn_where_a_request_samples(tmp_path):
    """By default and by request; other draws give another text from the same seed, each its own again."""
    folder = save_with_head(model_of("qwen3_5"), tmp_path)
    ids, mask = padded([prompt(n) for n in (1, 17)])
    texts = {}
    for draw in (None, True, False):
        decoder = SpeculativeDecoder(
            model_of("qwen3_5"), "mtp", draft_tree_widths=(2, 2), mtp_checkpoint=folder, draw_drafts=draw
        )
        sample = functools.partial(decoder.generate, ids, mask, max_new_tokens=25, do_sample=True, seed=2)
        texts[draw] = sample()
        assert torch.equal(texts[draw], sample())
    assert torch.equal(texts[None], texts[True])
    assert not torch.equal(texts[True], texts[False])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_close_to_its_own_model(dtype):
    """Logits differ by rounding, so tokens may; each token must be within rounding of the model's best."""
    model = tiny_model("qwen3_5").to(dtype)
    decoder = SpeculativeDecoder(model, "ngram", draft_tree_budget=8)
    sequence = decoder.generate(torch.tensor([prompt(17)]), max_new_tokens=60)[0]
    with torch.inference_mode():
        logits = model(sequence[None, :-1]).logits[0, 16:].float()
    chosen = logits.gather(1, sequence[17:, None]).squeeze(1)
    spacing = torch.finfo(dtype).eps * logits.abs().amax(1)
    assert bool((logits.amax(1) - chosen <= 16 * spacing).all())
    assert (logits.argmax(1) == sequence[17:]).float().mean() > 0.9


def test_state_bytes_are_what_is_allocated():
    """Classes 18 and 20: charged per running request, and the sum shown is the sum held."""
    for mode in MODES:
        run = SpeculativeDecoder(
            model_of("qwen3_5"), known_text("qwen3_5", LENGTHS, SHAPES["3,3,3"]), mamba_state_commit=mode
        ).run([prompt(3)] * 4, SamplingParams(), 4)
        assert run.target.state.nbytes == 4 * run.target.state.spec.bytes_per_request
        assert isinstance(run.target.state.spec, StateSpec)


def test_a_run_may_be_left_at_any_time():
    """Ctrl-C in a notebook: the model is as before, the tokens so far are there, the drafter has forgotten."""
    model = model_of("qwen3_5")
    drafter = known_text("qwen3_5", [17], SHAPES["chain"])
    run = SpeculativeDecoder(model, drafter).run([prompt(17)], SamplingParams(), 100)
    for round_, _ in enumerate(run):
        if round_ == 5:
            break
    text = greedy_text("qwen3_5", 17)
    assert run.requests[0].tokens == list(text[: len(run.requests[0].tokens)])
    assert len(run.requests[0].tokens) > 22
    assert not any("forward" in vars(layer.linear_attn) for layer in model.model.layers[:3])
    assert drafter.observed == {}


def test_defaults_come_from_the_generation_config():
    model = tiny_model("qwen3_5")
    decoder = SpeculativeDecoder(model, "none")
    assert decoder.generate(torch.tensor([prompt(5)])).shape == (1, 25)
    model.generation_config.max_new_tokens = 9
    text = greedy_text("qwen3_5", 17)
    model.generation_config.eos_token_id = text[20]
    sequence = decoder.generate(torch.tensor([prompt(17)]))
    assert sequence[0].tolist() == list(text[: text.index(text[20], 17) + 1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"drafter": "medusa"}, 'drafter is \'medusa\'; it is "mtp", "ngram"'),
        ({"drafter": "ngram", "draft_tree_widths": (2, 2)}, "n-gram drafter grows its trees best first"),
        ({"drafter": "model"}, "needs draft_model"),
        ({"draft_tree_widths": (1,), "draft_tree_budget": 8}, "exclude each other"),
        ({"draft_tree_widths": (4, 4, 4)}, "need at least 85 rows; a window has at most 64"),
        ({"draft_tree_budget": 65}, "from 1 to 64"),
        ({"draft_tree_budget": 8, "draw_drafts": True}, "draw_drafts needs draft_tree_widths"),
        ({"mamba_state_commit": "replay"}, "'replay'; it is one of store_all, reconstruct, deferred"),
        ({"drafter": "none", "history_rows": 0}, "history_rows is 0"),
        ({"drafter": "none", "impl": "numpy"}, "impl is 'numpy'; it is one of torch, triton, cuda"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        SpeculativeDecoder(model_of("qwen3_5"), **kwargs)


@pytest.mark.parametrize(
    ("impl", "runs"), [(None, "torch"), ("torch", "torch"), ("triton", "triton"), ("cuda", "cuda")]
)
def test_kernels_run_where_they_are_asked_for_and_nowhere_else(impl, runs):
    state = SpeculativeDecoder(model_of("qwen3_5"), "none", impl=impl).target(1).state
    assert state.impl == runs


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        ([1, 2], {}, r"shape \(2,\); it is \[batch, tokens\]"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1, VOCAB]], {}, f"outside the vocabulary, 0 .. {VOCAB - 1}"),
        ([[1] * 1000], {"max_new_tokens": 25}, "together they exceed the model's 1024 positions"),
        ([[1, 2]], {"max_new_tokens": 0}, "max_new_tokens is 0; it is 1 or more"),
        ([[1, 2]], {"attention_mask": torch.ones(1, 3)}, r"attention_mask \(1, 3\) does not fit"),
        ([[1, 2]], {"attention_mask": torch.tensor([[1, 0]])}, "pad on the left"),
        ([[1, 2]], {"attention_mask": torch.tensor([[0, 0]])}, "prompt 0 is empty"),
        ([[1, 2]], {"do_sample": True, "temperature": -1.0}, "temperature -1.0"),
    ],
)
def test_input_that_cannot_be_served_is_refused(ids, kwargs, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model_of("qwen3_5"), "none").generate(torch.tensor(ids, dtype=torch.int64), **kwargs)


def test_every_prompt_needs_its_sampling_params():
    with pytest.raises(ValueError, match="2 prompts came with 1 SamplingParams"):
        SpeculativeDecoder(model_of("qwen3_5"), "none").run([[1], [2]], [SamplingParams()], 3)


def test_a_draft_model_is_released_with_its_request():
    model = model_of("qwen3_5")
    decoder = SpeculativeDecoder(model, "model", draft_model=tiny_model("qwen3_5"), draft_tree_widths=(1, 1))
    decoder.generate(torch.tensor([prompt(100)]), max_new_tokens=10)
    assert decoder.drafter._target.committed[0] == []
    assert isinstance(decoder.drafter._target, HFTarget)
    assert len(decoder.drafter._target.committed) == 1  # sized for the requests that there are
    again = decoder.generate(torch.tensor([prompt(17)]), max_new_tokens=50, return_dict_in_generate=True)
    assert again.sequences[0].tolist() == list(greedy_text("qwen3_5", 17)[:67])
    assert again.statistics.acceptance_length > 2.8  # the same model drafts: all is accepted, but at the end


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_is_greedy_as_its_model_is(family, mode):
    """The model's own text on that device; fp32 products without TF32."""
    model = tiny_model(family).cuda()
    ids, mask = (tensor.cuda() for tensor in padded([prompt(n) for n in LENGTHS]))
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    texts = [sequence[-n - NEW_TOKENS :] for sequence, n in zip(theirs.tolist(), LENGTHS, strict=True)]
    for shape in SHAPES.values():
        drafter = KnownText(texts, shape, accuracy=0.8, vocab=VOCAB)
        decoder = SpeculativeDecoder(model, drafter, mamba_state_commit=mode)
        assert torch.equal(decoder.generate(ids, mask, max_new_tokens=NEW_TOKENS), theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_decodes_in_half_precision_close_to_its_own_model(dtype):
    model = tiny_model("qwen3_5").to("cuda", dtype)
    decoder = SpeculativeDecoder(model, "ngram", draft_tree_budget=8)
    sequence = decoder.generate(torch.tensor([prompt(17)], device="cuda"), max_new_tokens=60)[0]
    with torch.inference_mode():
        logits = model(sequence[None, :-1]).logits[0, 16:].float()
    chosen = logits.gather(1, sequence[17:, None]).squeeze(1)
    spacing = torch.finfo(dtype).eps * logits.abs().amax(1)
    assert bool((logits.amax(1) - chosen <= 16 * spacing).all())


@pytest.mark.gpu
def test_a_gpu_samples_the_same_with_the_same_seed():
    model = tiny_model("qwen3_5").cuda()
    ids = torch.tensor([prompt(17)], device="cuda")
    decoder = SpeculativeDecoder(
        model, "model", draft_model=tiny_model("qwen3_5", 1).cuda(), draft_tree_widths=(2, 2), draw_drafts=True
    )
    sample = functools.partial(decoder.generate, ids, max_new_tokens=30, do_sample=True)
    assert torch.equal(sample(seed=1), sample(seed=1))
    assert not torch.equal(sample(seed=1), sample(seed=2))
