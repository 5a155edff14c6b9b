"""The runner on a CPU: this package's Triton kernels in the interpreter at the smallest sizes, peers made of torch."""

from dataclasses import replace

import pytest
import torch

from treewy import reference as ref
from treewy.bench import kernels, peers, workload
from treewy.bench.kernels import BATCHES, TABLES, Job, Run, check, jobs, line, make, measure
from treewy.bench.records import Results
from treewy.bench.timing import WallTimer, median_of_cycles
from treewy.bench.workload import Inputs, OursTriton, Setting, Subject, output_error

CPU = torch.device("cpu")
TINY = Setting("deferred", 2, 4, (1, 2), head_dim=16)


class Walk(Subject):
    """A peer that is right, or off by a factor: the recurrence row by row in fp32, a state a row."""

    impl = "walk"
    with_norm = False
    factor = 1.0

    def load(self, states, conv):
        self.states = states.float().clone()

    def begin(self):
        self.load(torch.zeros(self.layers, self.setting.batch, *self.state_shape), None)

    @property
    def state_shape(self):
        dims = self.setting.dims
        return dims.num_v_heads, dims.head_v_dim, dims.head_k_dim

    def verify(self):
        weights, out = self.inputs.weights, []
        self.walked = []
        for layer in range(self.layers):
            q, k, v = (t.float() for t in self.inputs.split(layer))
            rows = [
                ref.walk(
                    self.states[layer, i], ref.l2_normalize(q[i]) * q.shape[-1] ** -0.5, ref.l2_normalize(k[i]), v[i],
                    ref.log_decay(self.inputs.a[layer, i].float(), weights.A_log, weights.dt_bias),
                    ref.write_strength(self.inputs.b[layer, i].float()), self.tree.parents,
                )
                for i in range(self.setting.batch)
            ]  # fmt: skip
            out.append(self.factor * torch.stack([o for o, _ in rows]))
            self.walked.append(torch.stack([s[self.path[-1]] for _, s in rows]))
        return out

    def commit(self):
        self.states = torch.stack(self.walked)


class Wrong(Walk):
    impl = "wrong"
    factor = 1.1


class Broken(Walk):
    impl = "broken"

    def verify(self):
        raise RuntimeError("no such\n  kernel")


def two_layers(monkeypatch):
    monkeypatch.setattr(Setting, "layers", lambda self, each: 2)


# The check


@pytest.mark.parametrize("with_conv", [False, True])
def test_our_outputs_are_right_over_a_fold(with_conv, monkeypatch):
    monkeypatch.setattr(workload, "CAPACITY", 7)
    found = check(Job(OursTriton, replace(TINY, with_conv=with_conv), ("verify",)), CPU)
    assert found.rounds == 4  # a cycle of two, and more
    assert found.error < 0.004


@pytest.mark.parametrize(("case", "rows"), [("reconstruct", 15), ("verify", 4)])
def test_other_cases_are_right(case, rows):
    assert check(Job(OursTriton, replace(TINY, case=case, rows=rows), ("verify",)), CPU).error < 0.004


def test_what_is_wrong_is_seen():
    setting = replace(TINY, rows=15)
    errors = [output_error(subject(Inputs(setting, 1, CPU)), 3) for subject in (Walk, Wrong)]
    assert errors[0] < 1e-5
    assert errors[1] == pytest.approx(0.1, rel=0.01)


# Time


def test_cycles():
    calls = []

    def noted(name):
        return lambda: calls.append(name)

    def replay():
        calls.append("replay")
        return len(calls)

    found = median_of_cycles(replay, 2, begin=noted("begin"), between=noted("between"), repeats=7, seconds=60)
    assert calls == ["begin", *["replay", "between"] * 2] * 4
    assert found == pytest.approx((3 + 18) / 2)  # cycles of means 3, 8, 13, 18
    calls.clear()
    median_of_cycles(replay, 1, begin=noted("begin"), between=noted("between"), repeats=100, seconds=0)
    assert calls.count("replay") == 3


def test_rounds_of_a_cycle_go_on_from_one_another(monkeypatch):
    monkeypatch.setattr(workload, "CAPACITY", 7)
    subject = make(Job(OursTriton, TINY, ("verify",)), CPU, layers=1)
    subject.begin()
    assert sorted(subject.all.pending[0, :, 0].tolist()) == [3, 6]
    before = subject.all.pending.clone()
    for fills in ([3, 6], [3, 6]):  # one request folds in each round
        subject.verify()
        subject.commit()
        subject.between()
        assert sorted(subject.all.pending[0, :, 0].tolist()) == fills
    assert torch.equal(subject.all.pending, before)


def test_measurements(monkeypatch):
    monkeypatch.setattr(workload, "CAPACITY", 7)
    subject = make(Job(OursTriton, replace(TINY, batch=1), ("verify",)), CPU, layers=1)
    for what in ("verify", "round"):
        record = measure(subject, what, WallTimer(), 4e12, repeats=1, seconds=0)
        assert record.pending == 4.5
        assert record.with_commit == (what == "round")
        assert record.case == "deferred"
    assert record.layers == 1
    assert "deferred" in line(record)


def test_commits_alone(monkeypatch):
    two_layers(monkeypatch)
    subject = make(Job(OursTriton, replace(TINY, case="verify", rows=15), ("commit",)), CPU)
    record = measure(subject, "commit", WallTimer(), 4e12, repeats=1, seconds=0)
    assert (record.case, record.with_commit, record.with_norm) == ("commit", True, False)


# The run


def run(monkeypatch, todo, output=None, **of):
    two_layers(monkeypatch)
    said = []
    done = Run(todo, output, said.append, WallTimer(), CPU, 4e12, repeats=1, **of).run()
    return done, said


def test_a_run_writes_and_goes_on_after_failures(tmp_path, monkeypatch):
    setting = replace(TINY, case="verify")
    todo = [Job(s, replace(setting, batch=b), ("verify",)) for b in (1, 2) for s in (Wrong, Broken, Walk, OursTriton)]
    todo.append(Job(peers.SglangDecode, setting, ("verify",)))
    done, said = run(monkeypatch, todo, tmp_path / "run.json")
    assert [(r.impl, r.batch) for r in done.records] == [("walk", 1), ("triton", 1), ("walk", 2), ("triton", 2)]
    assert [r.reason.partition(" is ")[0] for r in done.refused] == [
        "it", "its error", "its check raised RuntimeError: no such kernel",
    ]  # fmt: skip
    assert done.complete
    assert Results.read(tmp_path / "run.json") == done
    assert sum("triton" in told for told in said) == 2


def test_a_run_keeps_to_its_budget(monkeypatch):
    done, said = run(monkeypatch, [Job(Walk, TINY, ("verify",))], budget_seconds=-1)
    assert not done.records
    assert not done.complete
    assert "used up" in said[-1]


def test_what_fails_after_its_check_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "measure", lambda *_, **__: 1 / 0)
    done, _ = run(monkeypatch, [Job(Walk, TINY, ("verify",))])
    assert "ZeroDivisionError" in done.refused[0].reason


def test_all_jobs():
    todo = jobs(TABLES, BATCHES)
    assert len(todo) == len(set(todo))
    assert {job.setting.rows for job in todo} == {1, 4, 15, 40}
    assert {job.setting.heads[1] for job in todo} == {32, 48, 64}
    assert {job.subject for job in todo} > set(peers.ALL)
    assert {job.setting.batch for job in jobs(("chain",), (7,))} == {7}
    assert {job.subject.impl for job in jobs(("chain",), BATCHES, ("vllm", "cuda"))} == {"triton"}


# Peers


@pytest.mark.parametrize("peer", peers.ALL)
def test_peers_say_why_they_are_not_timed(peer, monkeypatch):
    monkeypatch.setattr(peer, "not_installed", lambda: "the package is not installed")
    rows = peer.rows[0]
    assert peer.unavailable(Setting("verify", 1, rows)).endswith("not installed")
    assert "rows" in peer.unavailable(Setting("verify", 1, 40 if rows == 1 else 1))
    assert "float16" in peer.unavailable(Setting("verify", 1, rows, state_dtype=torch.float16))
    if not peer.convolves:
        assert "convolution" in peer.unavailable(Setting("verify", 1, rows, with_conv=True))


def test_a_package_that_cannot_be_imported_says_so():
    assert "Error" in peers._why_not("json.nothing", "at_all")
    assert peers._why_not("json", "loads") is None


@pytest.mark.parametrize("peer", peers.ALL)
def test_peers_lay_out_their_state(peer):
    setting = replace(TINY, case="verify", rows=peer.rows[-1])
    subject = peer(Inputs(setting, 2, CPU))
    dims = setting.dims
    states = torch.randn(2, 2, dims.num_v_heads, dims.head_v_dim, dims.head_k_dim)
    subject.load(states.bfloat16(), torch.zeros(2, 2, 3, dims.conv_dim).bfloat16())
    subject.begin()
    subject.arrive()
    assert subject.rounds >= 1
    assert subject.mean_pending >= 0
    assert subject.bytes_per_request(setting) >= 2 * 16 * 16 * 2
    floor = subject.floor_bytes()
    assert floor is None or floor > 2 * 2 * 16 * 16 * 2
    pool = subject.states[:, subject.slots.long()] if hasattr(subject, "slots") else None
    if pool is not None:
        assert torch.equal(pool, states.bfloat16())


def pretended(calls):
    """Stands for other packages: every function notes its call and gives outputs of the shape that it should."""

    def function(module, name):
        def call(*args, **kwargs):
            calls.append(name)
            if name == "causal_conv1d_update":
                return kwargs["out"].zero_()
            if name == "fused_sigmoid_gating_delta_rule_update":
                out = torch.zeros_like(kwargs["v"])
                return (out, None) if module.startswith("vllm") else out
            return kwargs.get("output")

        return call

    return function


@pytest.mark.parametrize("peer", [p for p in peers.ALL if p is not peers.VllmStoreAllCuda])
@pytest.mark.parametrize("with_conv", [False, True])
def test_calls_of_peers(peer, with_conv, monkeypatch):
    if with_conv and not peer.convolves:
        return
    calls = []
    monkeypatch.setattr(peers, "_function", pretended(calls))
    setting = replace(TINY, case="verify", rows=peer.rows[0], with_conv=with_conv)
    subject = peer(Inputs(setting, 2, CPU))
    for out in subject.verify():
        assert out.numel() == 2 * setting.rows * 2 * 16
    assert calls.count(peer.needs[1]) == 2
    assert calls.count("causal_conv1d_update") == 2 * with_conv
    assert calls.count("layer_norm_fwd") == 2 * peer.with_norm
    subject.commit()


def test_calls_of_the_fused_op(monkeypatch):
    schema = (
        "(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor state_indices, Tensor cu_seqlens, "
        "Tensor num_accepted_tokens, Tensor(a!) state, Tensor output_gate, Tensor norm_weight, Tensor(b!) out, "
        "float scale, float norm_eps=1e-5, str output_gate_activation='silu') -> ()"
    )
    library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        library.define(f"fused_gdn_decode_post_conv_mtp{schema}")
    seen = {}

    def op(qkv, a, b, A_log, dt_bias, indices, starts, accepted, state, gate, weight, out, scale, *rest):
        seen.update(indices=indices, starts=starts.tolist(), accepted=accepted.tolist())
        assert state.shape[0] == 9
        out.fill_(scale)

    library.impl("fused_gdn_decode_post_conv_mtp", op, "CPU")
    subject = peers.VllmStoreAllCuda(Inputs(replace(TINY, case="verify"), 1, CPU))
    assert (subject.verify()[0] == 0.25).all()
    assert seen["starts"] == [0, 4, 8]
    assert seen["accepted"] == [3, 3]
    assert sorted(seen["indices"].flatten().tolist()) == list(range(1, 9))


def test_cycles_of_peers_with_rings():
    setting = replace(TINY, case="verify", state_dtype=torch.float32)
    assert peers.SglangReplay(Inputs(setting, 1, CPU)).phases == [0, 3, 6]
    assert peers.SglangReplay(Inputs(replace(setting, state_dtype=torch.bfloat16), 1, CPU)).phases == [0]
    flush = peers.FlashinferUcacheFlush(Inputs(replace(setting, state_dtype=torch.bfloat16), 1, CPU))
    assert flush.phases == [3, 6, 9, 12, 15]
    flush.filled.copy_(torch.tensor([12, 15]))
    flush.base.copy_(torch.tensor([30, 30]))
    flush.commit()
    assert flush.filled.tolist() == [15, 3]
    assert flush.base.tolist() == [30, 13]
