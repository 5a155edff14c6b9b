"""Fast CPU tests of the training code: the chunked recurrence, the forward pass, the optimiser and the export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from evaluation import in_exact_loop, load_exported, tokens_per_round
from export import exported_tensors
from gdn_chunked import chunk_gated_delta_rule, sequential_gated_delta_rule, unit_lower_inverse
from mtp_model import Forward, Ops, TrunkWithMTP, branch_attention, make_config
from muon import Muon, orthogonalise
from text_data import Windows


def test_unit_lower_inverse() -> None:
    torch.manual_seed(0)
    a = torch.randn(3, 32, 32, dtype=torch.float64)
    expected = torch.linalg.inv(torch.eye(32, dtype=torch.float64) + a.tril(-1))
    torch.testing.assert_close(unit_lower_inverse(a), expected, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize(("time", "chunk"), [(37, 16), (64, 16), (5, 8), (40, 64)])
def test_chunked_rule_matches_recurrence(time: int, chunk: int) -> None:
    torch.manual_seed(1)
    shapes = [(2, time, 2, 8), (2, time, 2, 8), (2, time, 4, 6), (2, time, 4), (2, time, 4)]
    q, k, v, g, beta = (torch.randn(s, dtype=torch.float64) for s in shapes)
    inputs = [t.requires_grad_() for t in (q, k, v, -F.softplus(g).detach(), beta.sigmoid().detach())]
    weight = torch.randn(2, time, 4, 6, dtype=torch.float64)
    expected = sequential_gated_delta_rule(*inputs)
    expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)
    actual = chunk_gated_delta_rule(*inputs, chunk=chunk)
    actual_grads = torch.autograd.grad((actual * weight).sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    for a, e in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def model() -> TrunkWithMTP:
    torch.manual_seed(2)
    model = TrunkWithMTP(make_config("tiny"))
    with torch.no_grad():
        for p in model.parameters():  # no zeros left, so that every branch counts
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def test_trunk_matches_hugging_face(model: TrunkWithMTP) -> None:
    ids = torch.randint(0, 8192, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.lm.model(ids, use_cache=False).last_hidden_state
        forward = Forward(model, Ops(), 50)
        actual = forward.trunk(forward.embed(ids))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_head_matches_one_base_at_a_time(model: TrunkWithMTP) -> None:
    """All bases at once give what the Hugging Face layer gives for one base with an explicit sequence of entries."""
    ids = torch.randint(0, 8192, (1, 20), generator=torch.Generator().manual_seed(1))
    forward = Forward(model, Ops(), 20)
    depths, base = 4, 9
    head, layer = model.mtp, model.mtp.layers[0]
    with torch.no_grad():
        embedded = forward.embed(ids)
        hidden = forward.trunk(embedded)
        outputs = forward.heads(embedded, hidden, depths, 20 - depths - 1)

        def entry(h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            return head.fc(torch.cat([head.pre_fc_norm_embedding(e), head.pre_fc_norm_hidden(h)], -1))

        x = entry(hidden[:, : base + 1], embedded[:, 1 : base + 2])
        for d in range(1, depths + 1):
            rope = forward.cos[None, : x.shape[1]], forward.sin[None, : x.shape[1]]
            out = head.norm(layer(x, position_embeddings=rope, attention_mask=None))[:, -1:]
            torch.testing.assert_close(outputs[d - 1][:, base : base + 1], out, rtol=1e-4, atol=1e-4)
            x = torch.cat([x, entry(out, embedded[:, base + d + 1 : base + d + 2])], 1)


def test_branch_attention_against_masked_softmax() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    own_k, own_v = [torch.randn(2, 2, 6, 8) for _ in range(2)], [torch.randn(2, 2, 6, 8) for _ in range(2)]
    causal, diagonal = torch.ones(6, 6, dtype=torch.bool).tril(), torch.eye(6, dtype=torch.bool)
    mask = torch.cat([causal, diagonal, diagonal], 1)
    expected = F.scaled_dot_product_attention(
        q, torch.cat([k, *own_k], 2), torch.cat([v, *own_v], 2), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(branch_attention(q, k, v, own_k, own_v), expected, rtol=1e-4, atol=1e-5)


def test_losses_have_gradients_where_they_should(model: TrunkWithMTP) -> None:
    ids = torch.randint(0, 8192, (1, 24))
    forward = Forward(model, Ops(), 24)
    main, drafts = forward.joint_losses(ids, 2)
    (main + sum(drafts)).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    sum(forward.distil_losses(ids, 2)).backward()
    assert all(p.grad is not None for p in model.mtp.parameters())
    assert model.lm.model.layers[0].mlp.up_proj.weight.grad is None
    model.zero_grad()


def test_muon_flattens_singular_values_and_reduces_a_loss() -> None:
    torch.manual_seed(4)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(2, 24, 16)).float())
    assert values.min() > 0.4
    assert values.max() < 1.4
    weight, target = torch.nn.Parameter(torch.zeros(8, 4)), torch.randn(8, 4)
    optimizer = Muon([weight], lr=torch.tensor(0.1), weight_decay=0.0)
    for _ in range(60):
        weight.grad = weight.detach() - target
        optimizer.step()
    assert (weight - target).norm() < 0.5 * target.norm()


def test_windows_cover_the_text_once_a_pass() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    windows = Windows(tokens, batch=3, length=10, seed=0)
    seen = torch.cat([windows(i) for i in range(windows.per_pass)]).flatten()
    assert seen.unique().numel() == seen.numel() > 950
    assert torch.equal(Windows(tokens, 3, 10, 0)(40), windows(40))


def test_export_round_trip(model: TrunkWithMTP, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = exported_tensors(model)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= set(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path)
    back = load_exported(tmp_path, "cpu")
    for (name, a), b in zip(model.named_parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(b, a.bfloat16().float() if "A_log" not in name else a, msg=name)


def test_loops_and_rounds() -> None:
    assert in_exact_loop([9] * 3 + [1, 2, 3] * 40)
    assert not in_exact_loop(list(range(128)))
    ranks = torch.tensor([[[0, 0], [0, 1], [1, 0], [0, 0]]])  # one row, four bases, two depths
    assert tokens_per_round(ranks, prompt=1, depth=1) == pytest.approx(5 / 3)  # bases 0, 2, 3
    assert tokens_per_round(ranks, prompt=1, depth=2) == pytest.approx(3.0)  # bases 0 and 3
