"""The MTP head and its drafter against a naive reference, on tiny random models of every family with such a head.

The reference knows no cache and no batch: for one request and one path through the draft it runs all entries at once,
under a plain causal mask, at positions 0, 1, 2, ..., node by node. The drafter must give the same logits for every node
that it runs. The head itself is compared with the MTP layer that transformers has for other model families.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM
from transformers.modeling_layers import MtpLayer

from tests.transformers.tiny_models import FAMILIES, VOCAB, tiny_model
from treewy.acceptance import SamplingParams
from treewy.drafting import FixedWidths, Level, NodeBudget, Request, TreeShape, grow_drafts
from treewy.transformers import mtp
from treewy.transformers.mtp import MTPDrafter, MTPHead

WIDTH = 32
GPU = [
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
]
SHAPES = [FixedWidths((1, 1, 1)), FixedWidths((2, 2, 2)), NodeBudget(12, 4)]


def random_head(model) -> MTPHead:
    """Weights that are large enough for every part of the head to show in the logits."""
    head = MTPHead.random(model, seed=1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(15)
    return head


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family != "olmo_hybrid"])
def family_model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_5")


@pytest.fixture(scope="module")
def head(model) -> MTPHead:
    return random_head(model)


class Session:
    """Requests with random text and random target hidden states, and the drafter under test."""

    def __init__(self, head: MTPHead, shape: TreeShape, *, sampled: bool = False) -> None:
        self.head = head
        self.drafter = MTPDrafter(head, shape, sampled=sampled)
        self.random = torch.Generator().manual_seed(2)
        self.hidden: dict[int, Tensor] = {}

    def request(self, index: int, length: int, max_new_tokens: int = 100, temperature: float = 0.0) -> Request:
        self.hidden[index] = torch.zeros(0, WIDTH, device=self.head.fc.weight.device)
        request = Request(
            index, [3], 1, max_new_tokens + length, SamplingParams(temperature), torch.Generator().manual_seed(index)
        )
        self.extend(request, length - 1)
        return request

    def extend(self, request: Request, count: int) -> None:
        """Commits `count` positions and observes them."""
        hidden = torch.randn(count, WIDTH, generator=self.random).to(self.head.fc.weight.device)
        self.hidden[request.index] = torch.cat([self.hidden[request.index], hidden])
        request.tokens += torch.randint(VOCAB, (count,), generator=self.random).tolist()
        self.drafter.observe(request, hidden.to(self.head.fc.weight.dtype))


@torch.no_grad()
def naive_logits(head: MTPHead, hidden: Tensor, tokens: list[int], path: list[int]) -> Tensor:
    """[V] logits after the draft nodes `path` below the last of `tokens`."""
    inputs = hidden
    for node in range(len(path) + 1):
        following = torch.tensor([tokens[1:] + path[:node]], device=hidden.device)
        count = inputs.shape[0]
        mask = inputs.new_full((count, count), torch.finfo(inputs.dtype).min).triu(1)[None, None]
        output = head(inputs[None], following, head.rotary(torch.arange(count, device=hidden.device)[None]), mask)[0]
        inputs = torch.cat([inputs, output[-1:]])
    return head.logits(output[-1])


def recorded(monkeypatch: pytest.MonkeyPatch, session: Session, requests: list[Request]):
    """The drafts of one round, and for each request the logits of every node that was run, by its path of tokens."""
    found: list[dict[tuple[int, ...], Tensor]] = [{} for _ in requests]
    paths: list[list[tuple[int, ...]]] = [[()] for _ in requests]

    def grow(root_tokens, root_logits, shape, next_logits, **kwargs):
        for b, logits in enumerate(root_logits):
            found[b][()] = logits

        def recording(level: Level) -> Tensor:
            logits = next_logits(level)
            for b, request_paths in enumerate(paths):
                new = [
                    (*request_paths[parent], token)
                    for parent, token in zip(level.parents[b].tolist(), level.tokens[b].tolist(), strict=True)
                ]
                request_paths += new
                found[b].update((path, logits[b, i]) for i, path in enumerate(new) if level.valid[b, i])
            return logits

        return grow_drafts(root_tokens, root_logits, shape, recording, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(mtp, "grow_drafts", grow)
        return session.drafter.draft(requests), found


def check(monkeypatch: pytest.MonkeyPatch, session: Session, requests: list[Request]) -> int:
    """Drafts once and compares every node with the reference; returns the number of nodes."""
    drafts, found = recorded(monkeypatch, session, requests)
    for request, draft, logits_of in zip(requests, drafts, found, strict=True):
        assert draft.tokens[0] == request.tokens[-1]
        for path, logits in logits_of.items():
            expected = naive_logits(session.head, session.hidden[request.index], request.tokens, list(path))
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    return sum(map(len, found))


def test_head_equals_the_mtp_layer_of_transformers(family_model):
    head = random_head(family_model)
    layer = MtpLayer(head.config, type(head.layers[0]), type(head.norm), 0)
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    for theirs, ours in {**names, "mtp_block": "layers.0"}.items():
        layer.get_submodule(theirs).load_state_dict(head.get_submodule(ours).state_dict())
    tokens, hidden = torch.randint(VOCAB, (2, 5)), torch.randn(2, 5, WIDTH)
    rotary = head.rotary(torch.arange(5).expand(2, -1))
    embedded = family_model.get_input_embeddings()(tokens)
    with torch.no_grad():
        expected = layer(embedded, hidden, rotary, None, None, None)
        torch.testing.assert_close(head(hidden, tokens, rotary), expected)
        torch.testing.assert_close(head.logits(expected), family_model.lm_head(expected))


class TestDrafts:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_every_node_equals_the_naive_reference(self, family_model, shape, monkeypatch):
        session = Session(random_head(family_model), shape)
        requests = [session.request(index, length) for index, length in enumerate((5, 9, 2))]
        nodes = 0
        for accepted in (1, 3, 2), (1, 1, 1), (4, 1, 1):
            nodes += check(monkeypatch, session, requests)
            for request, count in zip(requests, accepted, strict=True):
                session.extend(request, count)
        assert nodes >= 3 * 3 * 3

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_one_request_alone_and_equal_lengths(self, head, shape, monkeypatch):
        session = Session(head, shape)
        first = session.request(0, 6)
        check(monkeypatch, session, [first])  # no mask in a chain
        session.extend(first, 1)
        second = session.request(1, 7)
        check(monkeypatch, session, [first, second])

    def test_eager_attention(self, monkeypatch):
        model = tiny_model("qwen3_5")
        model.set_attn_implementation("eager")
        head = random_head(model)
        assert head.config._attn_implementation == "eager"
        session = Session(head, FixedWidths((2, 2, 2)))
        check(monkeypatch, session, [session.request(0, 5), session.request(1, 8)])

    def test_the_targets_own_hidden_states(self, family_model, monkeypatch):
        session = Session(random_head(family_model), FixedWidths((2, 1, 1)))
        request = session.request(0, 12)
        with torch.no_grad():
            hidden = family_model.get_decoder()(input_ids=torch.tensor([request.tokens[:-1]])).last_hidden_state[0]
        session.drafter.release(0)
        session.hidden[0] = hidden
        session.drafter.observe(request, hidden)
        check(monkeypatch, session, [request])

    def test_drafts_are_the_most_probable_children(self, head):
        session = Session(head, FixedWidths((3, 2)))
        request = session.request(0, 7)
        (draft,) = session.drafter.draft([request])
        for row, children in enumerate(draft.tree.children[:4]):
            path = [draft.tokens[node] for node in draft.tree.path(row)[1:]]
            expected = naive_logits(head, session.hidden[0], request.tokens, path).topk(len(children)).indices
            assert [draft.tokens[child] for child in children] == expected.tolist()
        assert draft.probs is None

    @pytest.mark.parametrize("device", GPU)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_gpu(self, family_model, device, shape, monkeypatch):
        session = Session(random_head(copy.deepcopy(family_model).to(device)), shape)
        assert session.head.fc.weight.is_cuda
        requests = [session.request(index, length) for index, length in enumerate((5, 70, 2))]
        check(monkeypatch, session, requests)

    @pytest.mark.parametrize("device", ["cpu", *GPU])
    def test_bfloat16(self, device, monkeypatch):
        model = tiny_model("qwen3_5").to(device, torch.bfloat16)
        session = Session(random_head(model), FixedWidths((2, 2)))
        assert session.head.fc.weight.dtype == torch.bfloat16
        requests = [session.request(0, 5), session.request(1, 8)]
        _, found = recorded(monkeypatch, session, requests)
        session.head.float()
        model.float()
        for request, logits_of in zip(requests, found, strict=True):
            for path, logits in logits_of.items():
                assert logits.dtype == torch.bfloat16
                expected = naive_logits(session.head, session.hidden[request.index], request.tokens, list(path))
                assert (logits.float() - expected).norm() < 0.1 * expected.norm()

    def test_drawn_children_have_probabilities_and_depend_on_the_requests_generator_alone(self, head):
        def drafted(indices: list[int]):
            session = Session(head, FixedWidths((2, 2)), sampled=True)
            requests = {index: session.request(index, 5 + index, temperature=1.0) for index in (0, 1, 2)}
            drafts = session.drafter.draft([requests[index] for index in indices])
            return dict(zip(indices, drafts, strict=True))

        together, alone = drafted([0, 1, 2]), drafted([1])
        assert together[1].tokens == alone[1].tokens
        torch.testing.assert_close(together[1].probs, alone[1].probs)
        assert together[1].probs.shape == (len(together[1].tree), VOCAB)


class TestRequests:
    def test_observed_in_pieces_or_at_once(self, head, monkeypatch):
        session = Session(head, FixedWidths((2, 2)))
        request = session.request(0, 4)
        for count in 0, 1, 5, 2:
            session.extend(request, count)
        check(monkeypatch, session, [request])

    def test_long_prompts_run_ahead_in_chunks(self, head, monkeypatch):
        monkeypatch.setattr(mtp, "_PROMPT_CHUNK", 50)
        session = Session(head, FixedWidths((2, 2)))
        requests = [session.request(0, 4), session.request(1, 190), session.request(2, 66), session.request(3, 64)]
        check(monkeypatch, session, requests)
        for request in requests:
            session.extend(request, 2)
        check(monkeypatch, session, requests)

    def test_requests_come_go_and_change_places(self, head, monkeypatch):
        session = Session(head, NodeBudget(8, 3))
        a, b, c = (session.request(index, length) for index, length in ((7, 5), (0, 11), (3, 3)))
        check(monkeypatch, session, [a, b, c])
        session.extend(c, 2)
        session.extend(a, 1)
        check(monkeypatch, session, [c, a])  # another order, and b left out
        session.drafter.release(a.index)
        a = session.request(7, 4)  # the same index and a free row again
        d = session.request(1, 20)
        session.extend(b, 3)
        session.extend(c, 1)
        check(monkeypatch, session, [a, b, c, d])
        for request in a, b, c, d, d:  # releasing twice does nothing
            session.drafter.release(request.index)
        check(monkeypatch, session, [session.request(4, 6)])

    def test_a_released_request_leaves_nothing_behind(self, head, monkeypatch):
        session = Session(head, FixedWidths((2, 2)))
        long = session.request(0, 40)
        broken = Request(1, [1] * 31, 1, 99, SamplingParams(), torch.Generator())
        session.drafter.observe(broken, torch.full((30, WIDTH), torch.nan))
        session.drafter.draft([long, broken])
        session.drafter.release(1)
        session.extend(long, 1)
        check(monkeypatch, session, [long, session.request(2, 4)])

    def test_no_deeper_than_a_request_may_go(self, head, monkeypatch):
        session = Session(head, FixedWidths((1, 1, 1)))
        requests = [session.request(i, 5) for i in range(4)]
        for request, remaining in zip(requests, (1, 2, 3, 50), strict=True):
            request.max_new_tokens = len(request.tokens) - request.prompt_length + remaining
        drafts = session.drafter.draft(requests)
        assert [draft.tree.depth for draft in drafts] == [0, 1, 2, 3]
        assert drafts[0].tokens == requests[0].tokens[-1:]
        assert [draft.tree.depth for draft in session.drafter.draft(requests[:1])] == [0]

    def test_what_was_not_observed(self, head):
        session = Session(head, FixedWidths((1,)))
        request = session.request(0, 5)
        session.drafter.draft([request])
        with pytest.raises(ValueError, match="request 0 was not observed since its last draft"):
            session.drafter.draft([request])
        request.tokens += [1, 2]
        with pytest.raises(ValueError, match="6 positions are committed, but 4 were observed before and 1 now"):
            session.drafter.observe(request, torch.zeros(1, WIDTH))
        with pytest.raises(ValueError, match="request 5 was not observed"):
            session.drafter.draft([Request(5, [1, 2], 1, 9, SamplingParams(), torch.Generator())])


def stored(head: MTPHead, *, one_by_one: bool) -> dict[str, Tensor]:
    """The head as a checkpoint has it."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict(prefix="mtp.").items():
        if one_by_one and ".experts." in name:
            prefix, projection = name.rsplit(".", 1)
            for expert, weight in enumerate(tensor):
                parts = {"down_proj": weight}
                if projection == "gate_up_proj":
                    half = len(weight) // 2
                    parts = {"gate_proj": weight[:half], "up_proj": weight[half:]}
                tensors |= {f"{prefix}.{expert}.{part}.weight": rows.clone() for part, rows in parts.items()}
        else:
            tensors[name] = tensor.clone()
    return tensors


def save(model, tensors: dict[str, Tensor], path, *, sharded: bool = False) -> None:
    """A checkpoint of `model` with the tensors of an MTP head."""
    model.save_pretrained(path)
    trunk = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if not sharded:
        save_file({**trunk, **tensors}, path / "model.safetensors", metadata={"format": "pt"})
        return
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": {**trunk, names[0]: tensors[names[0]]}}
    shards["model-2.safetensors"] = {name: tensors[name] for name in names[1:]}
    for file, content in shards.items():
        save_file(content, path / file, metadata={"format": "pt"})
    weight_map = {name: file for file, content in shards.items() for name in content}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class TestCheckpoints:
    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("one_by_one", [False, True])
    def test_round_trip(self, family_model, tmp_path, sharded, one_by_one):
        head = random_head(family_model)
        save(family_model, stored(head, one_by_one=one_by_one), tmp_path, sharded=sharded)
        loaded = MTPHead.from_checkpoint(family_model, tmp_path)
        torch.testing.assert_close(loaded.state_dict(), head.state_dict(), rtol=0, atol=0)

    def test_names_are_those_of_published_checkpoints(self, head):
        assert set(stored(head, one_by_one=True)) == {
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.pre_fc_norm_embedding.weight",
            *(f"mtp.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
            *(f"mtp.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
            *(f"mtp.layers.0.self_attn.{name}_norm.weight" for name in "qk"),
            "mtp.layers.0.input_layernorm.weight",
            "mtp.layers.0.post_attention_layernorm.weight",
        }

    def test_where_the_model_came_from_in_its_dtype(self, model, head, tmp_path):
        save(model, stored(head, one_by_one=False), tmp_path)
        target = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        loaded = MTPHead.from_checkpoint(target)
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
        torch.testing.assert_close(loaded.fc.weight, head.fc.weight.bfloat16(), rtol=0, atol=0)

    def test_no_head(self, model, tmp_path):
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=rf"{tmp_path} has no MTP head .*n-gram lookup or a draft model"):
            MTPHead.from_checkpoint(model, tmp_path)

    def test_no_checkpoint(self, model, tmp_path):
        with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
            MTPHead.from_checkpoint(model, tmp_path)
        with pytest.raises(ValueError, match="not loaded from a checkpoint"):
            MTPHead.from_checkpoint(model)

    def test_missing_and_unexpected_names(self, tmp_path):
        model = tiny_model("qwen3_5_moe")
        tensors = stored(random_head(model), one_by_one=True)
        del tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"]
        tensors["mtp.embed_tokens.weight"] = torch.zeros(1)
        save(model, tensors, tmp_path)
        with pytest.raises(
            ValueError, match=r"missing: mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight; unexpected: mtp\.embed"
        ):
            MTPHead.from_checkpoint(model, tmp_path)

    def test_wrong_shape(self, model, head, tmp_path):
        save(model, stored(head, one_by_one=False) | {"mtp.norm.weight": torch.zeros(1)}, tmp_path)
        with pytest.raises(ValueError, match=r"mtp.norm.weight in .* has shape \[1\]; the model needs \[32\]"):
            MTPHead.from_checkpoint(model, tmp_path)

    def test_models_without_a_known_head(self):
        with pytest.raises(ValueError, match="olmo_hybrid has no known MTP layer"):
            MTPHead(tiny_model("olmo_hybrid"))
        model = tiny_model("qwen3_5")
        model.config.mtp_num_hidden_layers = 2
        with pytest.raises(ValueError, match="mtp_num_hidden_layers is 2"):
            MTPHead(model)


class TestTarget:
    def test_is_unchanged(self, family_model):
        def picture() -> tuple[object, ...]:
            return (
                {name: tensor.clone() for name, tensor in family_model.state_dict().items()},
                [name for name, _ in family_model.named_modules()],
                [name for name, _ in family_model.named_buffers()],
                [module.training for module in family_model.modules()],
                copy.deepcopy(family_model.config.to_dict()),
                family_model.config.get_text_config()._attn_implementation,
            )

        before = picture()
        session = Session(random_head(family_model), FixedWidths((2, 2)))
        session.drafter.draft([session.request(0, 70), session.request(1, 5)])
        for now, then in zip(picture(), before, strict=True):
            if isinstance(then, dict) and then.get("lm_head.weight") is not None:
                torch.testing.assert_close(now, then, rtol=0, atol=0)
            else:
                assert now == then

    def test_matrices_are_shared_not_registered(self, head, model):
        registered = {id(parameter) for parameter in head.parameters()}
        assert not registered & {id(parameter) for parameter in model.parameters()}
        assert head._shared == (model.model.embed_tokens, model.lm_head)
        assert {name.split(".")[0] for name, _ in head.named_children()} == {
            "fc",
            "layers",
            "norm",
            "pre_fc_norm_hidden",
            "pre_fc_norm_embedding",
            "rotary_embedding",
        }
