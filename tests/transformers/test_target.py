"""The target adapter against the untouched model, fp32.

Every row of every window is compared with the model's own forward over the text on the row's path, and after every
commit recurrent, convolution and KV state with a fresh prefill of the same tokens. Bounds are those of fp32 sums in
another order: transformers' own two paths (chunked and step by step) differ by as much.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.transformers.tiny_models import FAMILIES, VOCAB, tiny_model
from treewy.transformers import HFTarget
from treewy.transformers.layers import GDNLayer
from treewy.tree import DraftTree, TreeBatch

MODES = ("store_all", "reconstruct", "deferred")


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def forward(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1]


def assert_state_is_that_of(target: HFTarget, request: int, tokens: list[int], tolerance: float = 3e-4):
    fresh = HFTarget(target.model, 1, max_rows=1)
    fresh.prefill([0], [tokens])
    assert target.committed[request] == tokens
    for place in range(3):
        for mine, its in zip(target.state.read(place, request), fresh.state.read(place, 0), strict=True):
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)
    for mine, its in zip(target.kv.read(3, request), fresh.kv.read(3, 0), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_windows_and_states_equal_the_model_from_scratch(family, mode):
    """Classes 9, 32, 34: ragged random trees in one batch, prompts of 1, 5 and 70 tokens, a subset in some rounds."""
    rng, model = random.Random(1), tiny_model(family)
    target = HFTarget(model, 3, max_rows=16, mode=mode)
    texts = [text(n, n) for n in (1, 5, 70)]
    for request, tokens in enumerate(texts):
        logits = target.prefill([request], [tokens])[0].logits[0, 0]
        torch.testing.assert_close(logits, forward(model, tokens))
    for round_ in range(6):
        requests = [0, 1, 2] if round_ != 3 else [2, 0]
        trees = [DraftTree.random(rng.randint(1, 16), rng) for _ in requests]
        ids = torch.tensor([text(16, 100 * round_ + request) for request in requests])
        output = target.verify(requests, ids, TreeBatch.of(trees, rows=16))
        paths = [tree.path(rng.randrange(len(tree))) for tree in trees]
        for place, request in enumerate(requests):
            for row in {0, len(trees[place]) - 1, paths[place][-1]}:
                path_text = texts[request] + [int(ids[place, i]) for i in trees[place].path(row)]
                torch.testing.assert_close(output.logits[place, row], forward(model, path_text), rtol=1e-4, atol=1e-4)
        longest = max(map(len, paths))
        padded = torch.tensor([[*path, *(0,) * (longest - len(path))] for path in paths])
        target.commit(padded, torch.tensor([len(path) for path in paths]))
        for place, request in enumerate(requests):
            texts[request] += [int(ids[place, i]) for i in paths[place]]
        for request in range(3):
            assert_state_is_that_of(target, request, texts[request])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_as_before(family):
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    config, tokens = copy.deepcopy(model.config), text(9)
    reference = forward(model, tokens)
    target = HFTarget(model, 1, max_rows=4)
    with target.attached():
        target.prefill([0], [tokens])
        target.verify([0], torch.tensor([[1, 2, 3, 4]]), TreeBatch.of([DraftTree.chain(3)]))
        torch.testing.assert_close(forward(model, tokens), reference, rtol=0, atol=0)  # even while it is borrowed
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.config.to_dict() == config.to_dict()
    assert not model.training
    torch.testing.assert_close(forward(model, tokens), reference, rtol=0, atol=0)


def test_a_forward_of_the_users_own_is_put_back():
    """Tools such as accelerate put a `forward` of their own on a module."""
    model = tiny_model("qwen3_5")
    layer = model.model.layers[0].linear_attn
    original, calls = layer.forward, []

    def theirs(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = theirs
    target = HFTarget(model, 1, max_rows=1)
    target.prefill([0], [text(4)])
    assert calls == [1]
    assert layer.forward is theirs


def test_the_model_is_as_before_when_a_forward_fails():
    """Class 21: an error inside a window leaves model, committed state and other requests alone."""
    model = tiny_model("qwen3_5")
    target = HFTarget(model, 2, max_rows=4)
    texts = [text(6, 1), text(11, 2)]
    for request, tokens in enumerate(texts):
        target.prefill([request], [tokens])
    broken = model.model.layers[2].mlp
    original = broken.forward

    def fails(*_):
        raise RuntimeError("out of memory")

    broken.forward = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        target.verify([0, 1], torch.tensor([[1, 2], [3, 4]]), TreeBatch.of([DraftTree.chain(1)] * 2))
    broken.forward = original
    assert not any("forward" in vars(layer.linear_attn) for layer in model.model.layers[:3])
    for request, tokens in enumerate(texts):
        assert_state_is_that_of(target, request, tokens)
    output = target.verify([0, 1], torch.tensor([[1, 2], [3, 4]]), TreeBatch.of([DraftTree.chain(1)] * 2))
    torch.testing.assert_close(output.logits[1, 1], forward(model, [*texts[1], 3, 4]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_crop_gives_the_state_of_the_shorter_text(mode):
    """Class 8: forward 5, crop to 3, forward 1 equals a fresh forward of 4; also after rounds, with rows pending."""
    model = tiny_model("qwen3_5")
    target = HFTarget(model, 1, max_rows=6, mode=mode)
    tokens = text(5)
    target.prefill([0], [tokens])
    target.crop(0, 3)
    output = target.verify([0], torch.tensor([[7]]), TreeBatch.of([DraftTree.chain(0)]))
    torch.testing.assert_close(output.logits[0, 0], forward(model, [*tokens[:3], 7]), rtol=1e-4, atol=1e-4)
    target.commit(torch.tensor([[0]]), torch.tensor([1]))
    target.verify([0], torch.tensor([[1, 2, 3, 4]]), TreeBatch.of([DraftTree.chain(3)]))
    target.commit(torch.tensor([[0, 1, 2]]), torch.tensor([3]))
    assert_state_is_that_of(target, 0, [*tokens[:3], 7, 1, 2, 3])
    target.crop(0, 7)  # its length: nothing to do
    target.crop(0, 5)
    assert_state_is_that_of(target, 0, [*tokens[:3], 7, 1])
    target.crop(0, 0)
    target.prefill([0], [tokens])
    assert_state_is_that_of(target, 0, tokens)


@pytest.mark.parametrize("length", [-1, 6])
def test_crop_refuses_lengths_that_it_does_not_have(length):
    target = HFTarget(tiny_model("qwen3_5"), 1, max_rows=1)
    target.prefill([0], [text(5)])
    with pytest.raises(ValueError, match=f"length {length} is outside 0 .. 5"):
        target.crop(0, length)


@pytest.mark.parametrize("mode", MODES)
def test_forks_do_not_see_each_other(mode):
    """Class 22: a fork is a snapshot; going on with drafts in one and then in the other equals two cold runs."""
    model = tiny_model("olmo_hybrid")
    target = HFTarget(model, 2, max_rows=5, mode=mode)
    tokens = text(20)
    target.prefill([0], [tokens])
    target.verify([0], torch.tensor([[1, 2, 3, 4]]), TreeBatch.of([DraftTree((-1, 0, 0, 1))]))
    target.commit(torch.tensor([[0, 1, 3]]), torch.tensor([3]))
    target.fork(0, 1)
    for request, ids in ((0, [5, 6, 7]), (1, [8, 9, 10]), (0, [11, 12, 13])):
        target.verify([request], torch.tensor([ids]), TreeBatch.of([DraftTree((-1, 0, 0))]))
        target.commit(torch.tensor([[0, 2]]), torch.tensor([2]))
    assert_state_is_that_of(target, 0, [*tokens, 1, 2, 4, 5, 7, 11, 13])
    assert_state_is_that_of(target, 1, [*tokens, 1, 2, 4, 8, 10])


def test_a_released_request_leaves_nothing_behind():
    """Class 17: infinities in one request stay there, and its place serves the next one as if new."""
    model = tiny_model("qwen3_5")
    target = HFTarget(model, 2, max_rows=4)
    for request in range(2):
        target.prefill([request], [text(8, request)])
    for tensor in target.state.tensors.values():
        if tensor.is_floating_point():
            tensor[:, 0] = float("inf")
    output = target.verify([0, 1], torch.tensor([[1, 2], [3, 4]]), TreeBatch.of([DraftTree.chain(1)] * 2))
    assert not output.logits[0].isfinite().all()
    torch.testing.assert_close(output.logits[1, 1], forward(model, [*text(8, 1), 3, 4]), rtol=1e-4, atol=1e-4)
    target.release(0)
    target.prefill([0], [text(5, 7)])
    assert_state_is_that_of(target, 0, text(5, 7))


def test_windows_of_one_row_and_of_many_share_a_batch():
    """Class 10: windows of 1, T and T rows in one batch are planned as such, and each equals itself alone."""
    model = tiny_model("qwen3_5")
    target, alone = HFTarget(model, 3, max_rows=4), HFTarget(model, 1, max_rows=4)
    trees = [DraftTree.chain(0), DraftTree.chain(3), DraftTree((-1, 0, 0, 2))]
    ids = torch.tensor([[1, 0, 0, 0], [2, 3, 4, 5], [6, 7, 8, 9]])
    for request in range(3):
        target.prefill([request], [text(3 + request, request)])
    output = target.verify([0, 1, 2], ids, TreeBatch.of(trees))
    for request, tree in enumerate(trees):
        alone.prefill([0], [text(3 + request, request)])
        expected = alone.verify([0], ids[request : request + 1, : len(tree)], TreeBatch.of([tree]))
        torch.testing.assert_close(output.logits[request, : len(tree)], expected.logits[0], rtol=1e-4, atol=1e-4)


def test_a_model_without_gdn_layers_is_refused_as_a_target():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no GDN layer .* assisted generation"):
        HFTarget(model, 1)
    target = HFTarget(model, 1, need_gdn=False)
    target.prefill([0], [text(5)])
    output = target.verify([0], torch.tensor([[1, 2, 3]]), TreeBatch.of([DraftTree((-1, 0, 0))]))
    torch.testing.assert_close(output.logits[0, 2], forward(model, [*text(5), 1, 3]), rtol=1e-4, atol=1e-4)


def test_a_model_of_another_make_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no decoder layers at model\.model\.layers"):
        HFTarget(model, 1)


def test_attention_without_a_mask_is_refused():
    model = tiny_model("qwen3_5")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', which takes no tree mask; load the model with 'sdpa'"):
        HFTarget(model, 1)


def test_a_model_on_several_devices_is_refused():
    model = tiny_model("qwen3_5")
    model.model.layers[2].to("meta")
    with pytest.raises(ValueError, match=r"spread over cpu and meta; .* load the model onto one"):
        HFTarget(model, 1)


def test_eager_attention_gives_the_same():
    model = tiny_model("qwen3_5")
    model.set_attn_implementation("eager")
    target = HFTarget(model, 2, max_rows=3)
    for request in range(2):
        target.prefill([request], [text(5 + request)])
    output = target.verify([0, 1], torch.tensor([[1, 2, 3], [4, 5, 6]]), TreeBatch.of([DraftTree((-1, 0, 0))] * 2))
    torch.testing.assert_close(output.logits[1, 2], forward(model, [*text(6), 4, 6]), rtol=1e-4, atol=1e-4)


def test_modules_that_are_no_gdn_layers_are_refused():
    model = tiny_model("qwen3_5")
    with pytest.raises(ValueError, match="Qwen3_5MLP is no GDN layer"):
        GDNLayer(model.model.layers[0].mlp)
    model.model.layers[0].linear_attn.activation = "gelu"
    with pytest.raises(ValueError, match="uses 'gelu'; only SiLU"):
        HFTarget(model, 1)


def test_prompts_of_one_length_share_a_forward():
    model = tiny_model("qwen3_next")
    target, calls = HFTarget(model, 5, max_rows=1), []
    prompts = [text(9, 1), text(4, 2), text(9, 3), text(9, 4), text(1, 5)]
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    outputs = target.prefill([4, 3, 2, 1, 0], prompts)
    handle.remove()
    assert calls == [(3, 9), (1, 4), (1, 1)]
    for place, prompt in enumerate(prompts):
        torch.testing.assert_close(outputs[place].logits[0, 0], forward(model, prompt), rtol=1e-4, atol=1e-4)
        assert outputs[place].hidden.shape == (1, len(prompt), 32)
        assert_state_is_that_of(target, 4 - place, prompt)


def test_kv_grows_while_requests_run():
    model = tiny_model("qwen3_5")
    target, tokens = HFTarget(model, 2, max_rows=33), [text(60, 0), text(3, 1)]
    for request in range(2):
        target.prefill([request], [tokens[request]])
    before = target.kv.nbytes
    for round_ in range(5):
        ids = torch.tensor([text(32, round_), text(32, round_ + 50)])
        target.verify([0, 1], ids, TreeBatch.of([DraftTree.chain(31)] * 2))
        target.commit(torch.arange(32).expand(2, -1), torch.tensor([32, 5]))
        tokens = [tokens[0] + ids[0].tolist(), tokens[1] + ids[1, :5].tolist()]
    assert target.kv.nbytes > before
    for request in range(2):
        assert_state_is_that_of(target, request, tokens[request])
