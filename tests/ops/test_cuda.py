"""The CUDA C++ kernel: the host's part of a launch, then its results beside float64 and the torch implementation.

Without a device the source is compiled for the architecture that it is written for, and it is run by an emulation,
which says more about barriers than a device does. How many rows a window and a ring have, and which dtypes, is compiled
in, so tests share few variants: RING below, and those of CASES.
"""

import ctypes
import itertools
import random
import re
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from tests.ops import emulation
from tests.ops.layers import Layer, Oracle, Plain, random_inputs, random_path, same_bits
from treewy import ops, reference
from treewy.ops import DeviceWindow, GatedNorm, GDNDims, GDNParams, LayerState, support, unsupported_reason
from treewy.ops import triton as triton_kernels
from treewy.ops.cuda import build, launch
from treewy.state import RecurrentState, StateSpec
from treewy.tree import DraftTree, TreeBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")


class Case(NamedTuple):
    """What is compiled in."""

    rows: int
    """0: the kernel of `fold`."""
    capacity: int
    dk: int = 128
    dv: int = 128
    state: torch.dtype = BF16
    inputs: torch.dtype = BF16
    weight: torch.dtype | None = FP32
    """Of the gated norm; None: without it."""
    gates: torch.dtype | None = None
    """Of a and b, if not that of the inputs."""
    heads: tuple[int, int] = (2, 4)
    conv: int = 4
    """Width of the convolution."""

    def __str__(self):
        kinds = "-".join(str(dtype).removeprefix("torch.") for dtype in self[4:8])
        return f"{self.rows}+{self.capacity}-{self.dk}x{self.dv}-{kinds}"

    @property
    def dims(self):
        return GDNDims(*self.heads, self.dk, self.dv, self.conv)


def new_layer(case, requests, slots):
    """A layer of NaN, with nothing pending."""
    rows = max(case.rows, 1)
    depth = min(rows, case.capacity) - 1
    spec = StateSpec(case.dims, 1, "deferred", rows, depth, case.state, case.inputs, case.capacity)
    return LayerState(**{
        name: torch.full((slots if name in ("checkpoint", "conv") else requests, *shape), NAN, device=DEVICE).to(dtype)
        if dtype.is_floating_point
        else torch.zeros(requests, *shape, dtype=dtype, device=DEVICE)
        for name, (shape, dtype) in spec.pieces().items()
    })  # fmt: skip


def random_params(dims, g):
    def rand(*shape):
        return torch.randn(*shape, generator=g)

    params = GDNParams.of(
        dims, 0.4 * rand(dims.conv_dim, dims.conv_width), rand(dims.num_v_heads).clamp(max=1), rand(dims.num_v_heads),
        0.1 * rand(dims.conv_dim),
    )  # fmt: skip
    return params._replace(**{n: getattr(params, n).to(DEVICE) for n in ("taps", "conv_bias", "neg_A", "dt_bias")})


def late_parents(rows, rng):
    """Few rows have other ancestors than the root, and these are the last ones above them."""
    leaves = 3 * rows // 4
    parents = sorted(rng.randint(max(1, leaves - 5), leaves) for _ in range(rows - 1 - leaves))
    return DraftTree((-1, *[0] * min(leaves, rows - 1), *parents))


class Round:
    """One round of `verify_mixed`: trees of all shapes at random places of their rings, and NaN where nothing stands.

    A request has as many pending rows as fit, one has none, one has a head that has folded some already; one place of
    the batch is padding.
    """

    REQUESTS, SLOTS = 6, 9

    def __init__(self, case, seed=0):
        g, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self.case, dims = case, case.dims
        self.params = random_params(dims, g)
        self.params.neg_A[0] = -0.01  # a head that hardly forgets: of the others nobody sees rows far back
        self.state = new_layer(case, self.REQUESTS, self.SLOTS)
        ring = self.state.keys.shape[1]
        rows, heads = max(case.rows, 1), dims.num_v_heads
        self.requests, self.slots = [3, 0, 5, 2, -1], [7, 1, 4, 0, -1]
        # Of a star the last queries meet nobody in most columns, and their tile may be part of one.
        third = DraftTree((-1, *[0] * (rows - 1))) if rows > 32 and rows % 8 else late_parents(rows - rows // 4, rng)
        self.trees = [
            DraftTree.chain(rows - 1), DraftTree.random(rows, rng), third,
            DraftTree.chain(0), DraftTree.chain(0),
        ]  # fmt: skip
        pending = [case.capacity, rng.randint(1, case.capacity), (case.capacity + 1) // 2, 0]
        # The first one's pending rows go over the end of the ring, the second one's window.
        ends = [case.capacity // 2, ring - 1, rng.randrange(ring), 0]

        def rand(*shape, dtype=case.inputs):
            return torch.randn(*shape, generator=g).to(dtype)

        batch = len(self.trees)
        self.queries = rand(batch, rows, dims.num_k_heads, dims.head_k_dim)
        self.a, self.b = (rand(batch, rows, heads, dtype=case.gates or case.inputs) for _ in range(2))
        self.z = rand(batch, rows, heads, dims.head_v_dim)
        self.x = rand(batch, rows, dims.conv_dim)
        for place, tree in enumerate(self.trees):
            used = len(tree) if self.slots[place] >= 0 else 0
            self.queries[place, used:] = 0  # as the convolution leaves it
            for tensor in (self.a, self.b, self.z, self.x):
                tensor[place, used:] = NAN
        self.norm = None
        if case.weight:
            weight = torch.rand(dims.head_v_dim, generator=g).to(case.weight) + 0.5
            self.norm = GatedNorm(self.z.to(DEVICE), weight.to(DEVICE), 1e-5)
        for slot in self.slots[:-1]:
            self.state.checkpoint[slot] = 0.3 * rand(heads, dims.head_v_dim, dims.head_k_dim, dtype=FP32).to(DEVICE)
            self.state.conv[slot] = rand(*self.state.conv.shape[1:]).to(DEVICE)
        for request, end, count, tree in zip(self.requests, ends, pending, self.trees, strict=False):
            at = torch.tensor([(end + row) % ring for row in range(-count, len(tree))])
            for tensor in (self.state.keys, self.state.values):
                tensor[request, at] = rand(len(at), *tensor.shape[2:]).to(DEVICE)
            gates = torch.rand(count, heads, 2, generator=g) * torch.tensor([-0.3, 1.0])
            gates[:, 0, 0] *= 0.03
            self.state.gates[request, at[:count]] = gates.to(DEVICE)
            self.state.end[request] = end
            self.state.pending[request] = count
        self.state.pending[self.requests[2], 0] //= 2
        for request in {*range(self.REQUESTS)} - {*self.requests}:
            self.state.pending[request] = 1  # of nobody in this round
        self.window = DeviceWindow.empty(
            batch,
            rows,
            num_slots=self.SLOTS,
            num_requests=self.REQUESTS,
            device=DEVICE,
            conv_width=case.conv,
            impl="cuda",
        )
        trees = TreeBatch.of(self.trees, rows=rows, conv_width=case.conv)
        self.window.update(trees, torch.tensor(self.slots), torch.tensor(self.requests))
        for place, request in enumerate(self.requests[:-1]):  # what the convolution leaves for verify
            self.window.places[place, 0] = self.state.end[request]
            self.window.places[place, 1] = self.state.pending[request].max()
        self.queries, self.a, self.b, self.x = (t.to(DEVICE) for t in (self.queries, self.a, self.b, self.x))

    def run(self, state, fold_always):
        return launch.verify_mixed(
            state, self.window, self.queries, self.a, self.b, self.params, fold_always=fold_always, norm=self.norm
        )

    def run_whole(self, state, fold_always):
        """From the inputs of the convolution on."""
        return launch.verify(
            state, self.window, self.x, self.a, self.b, self.params, fold_always=fold_always, norm=self.norm
        )

    def expected(self, place):
        """In float64: outputs of the tree, the state after all pending rows, log decay and beta of the tree's rows."""
        dims, params, request, tree = self.case.dims, self.params, self.requests[place], self.trees[place]

        def exact(tensor):
            return tensor.cpu().double()

        own = self.state.pending[request].cpu()
        end, count, ring = int(self.state.end[request]), int(own.max()), self.state.keys.shape[1]
        at = torch.tensor([(end + row) % ring for row in range(-count, len(tree))]).to(DEVICE)
        k, v = (exact(tensor[request, at]) for tensor in (self.state.keys, self.state.values))
        q = torch.cat([k.new_zeros(count, *k.shape[1:]), exact(self.queries[place, : len(tree)])])
        gates = exact(self.state.gates[request, at[:count]])
        gates[torch.arange(count)[:, None] < count - own] = 0  # that head has folded this row
        a, b = (exact(tensor[place, : len(tree)]) for tensor in (self.a, self.b))
        log_alpha = exact(params.neg_A) * torch.nn.functional.softplus(a + exact(params.dt_bias))
        beta = reference.write_strength(b, params.beta_scale)
        parents = [*range(-1, count - 1), *(parent + count for parent in tree.parents)]
        out, states = reference.walk(
            exact(self.state.checkpoint[self.slots[place]]), reference.l2_normalize(q) * dims.head_k_dim**-0.5,
            reference.l2_normalize(k), v, torch.cat([gates[..., 0], log_alpha]), torch.cat([gates[..., 1], beta]),
            parents,
        )  # fmt: skip
        out = out[count:]
        if self.norm is not None:
            z, weight = exact(self.norm.z[place, : len(tree)]), exact(self.norm.weight)
            out = reference.gated_rms_norm(out, z, weight, self.norm.eps)
        return out, states[count - 1] if count else None, torch.stack([log_alpha, beta], dim=-1)


def distance(found, expected):
    """Largest difference, relative to the largest entry."""
    assert found.isfinite().all()
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).abs().max() / expected.abs().max())


def copy_of(state):
    return LayerState(*(tensor.clone() for tensor in state))


# Without a device


COMPILED = [
    Case(1, 12), Case(4, 12), Case(4, 20), Case(4, 12, state=FP32, inputs=FP16, gates=FP32),
    Case(15, 20, state=FP16, inputs=FP16, weight=FP16), Case(40, 20), Case(64, 20, state=FP32, weight=None),
    Case(0, 12), Case(0, 20, state=FP32, inputs=FP16), Case(4, 20, 256, 256), Case(1, 20, 64, 64, FP32, FP16),
    Case(4, 12, 64, 128, weight=BF16), Case(15, 12, 128, 256, FP32), Case(4, 20, 256, 64, weight=None),
    Case(1, 12, 128, 64, FP16, FP16), Case(40, 12, 256, 128),
]  # fmt: skip
BLOCKS = {Case(4, 12): 5, Case(4, 12, state=FP32): 3, Case(15, 12): 4}
"""That an SM is to hold of a window, with the convolution where it is fused."""
ALLOWED_SPILL = 64
"""Bytes a thread, for windows of one and four rows at 128 x 128; in tens of thousands of instructions."""


OF_A_BLOCK, OF_AN_SM = 227 * 1024, 228 * 1024
"""Shared memory on compute capability 9.0, in bytes."""


@pytest.fixture
def launches(monkeypatch):
    """What would be launched: name, definitions, grid."""
    made = []
    monkeypatch.setattr(launch, "unsupported_reason", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launch, "tensor_map", lambda *args: SimpleNamespace(getPtr=lambda: 0))
    monkeypatch.setattr(
        launch, "kernel", lambda name, defines, device: lambda grid, *_: made.append((name, defines, grid))
    )
    return made


def constant(code):
    """The one constant of a kernel, two numbers, from the ELF file that the compiler gives: threads, shared bytes."""
    (table,), (size, count, names) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    for name, *_, at, length in sections:
        start = sections[names][4] + name
        if code[start : code.index(b"\0", start)] == b".nv.constant3":
            assert length == 8
            return struct.unpack_from("<ii", code, at)
    raise AssertionError("no constant")


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_what_users_meet_compiles_and_fits(case, launches):
    """With the definitions that a launch gives; for a head's block and what it asks of an SM."""
    if case.rows:
        round_ = Round(case)
        round_.run(round_.state, fold_always=False)
        if case.rows <= launch.FUSED_ROWS:
            round_.run_whole(round_.state, fold_always=False)
        assert {grid for *_, grid in launches} == {(2, 2, 5)}
    else:
        launch.fold(new_layer(case, 2, 2), torch.tensor([0, 1]), torch.tensor([0, 1]))
        assert [grid for *_, grid in launches] == [(2, 2, 2)]
    said = support._shared_bytes(case.dims, case.state, case.rows, case.rows + case.capacity)
    assert said <= OF_A_BLOCK
    for name, defines, _ in launches:
        code, log = build.compile_source(name, defines, "sm_90")
        threads, shared = constant(code)
        assert threads in (128, 256, 512)
        assert shared <= said
        spilled = int(re.search(r"(\d+) bytes spill stores", log)[1])
        if case.rows in (1, 4) and (case.dk, case.dv) == (128, 128):
            assert spilled <= ALLOWED_SPILL
    assert shared >= said - (256 if 0 < case.rows <= launch.FUSED_ROWS else 1024)  # without a convolution


def held(shared):
    """Blocks of so many bytes that an SM holds."""
    return OF_AN_SM // (-(-shared // build.GRANULE) * build.GRANULE + build.RESERVED)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_how_many_blocks_fit_an_sm(case, launches):
    round_ = Round(case)
    (round_.run_whole if case.rows <= launch.FUSED_ROWS else round_.run)(round_.state, fold_always=False)
    threads, shared = constant(build.compile_source(*launches[0][:2], "sm_90")[0])
    assert threads == 128
    assert held(shared) == BLOCKS[case]


@pytest.mark.parametrize(
    ("blocks", "grid", "each"),
    [
        (5, 32, 5), (5, 330, 5), (5, 331, 3), (5, 512, 4), (5, 528, 4), (5, 529, 5), (5, 2048, 5),  # of 132 SMs
        (7, 660, 5), (8, 900, 7), (3, 256, 2), (3, 132, 3), (2, 256, 2), (2, 133, 2), (1, 132, 1),
    ],
)  # fmt: skip
def test_launches_that_fit_at_once_are_spread(blocks, grid, each):
    """No SM may hold more blocks than it is to have, where two launches do not fit."""
    sm = SimpleNamespace(
        multi_processor_count=132, shared_memory_per_multiprocessor=OF_AN_SM, shared_memory_per_block_optin=OF_A_BLOCK
    )
    needed = (OF_AN_SM // blocks - build.RESERVED) // build.GRANULE * build.GRANULE
    shared = build.Kernel(None, 128, needed, blocks, sm).shared_for(grid)
    assert needed <= shared <= OF_A_BLOCK
    assert held(shared) == each


def test_a_mistake_in_the_source_is_told_with_its_place():
    with pytest.raises(RuntimeError, match=r"verify.cu does not compile for sm_90 with .*'DK': 1[\s\S]*verify.cu\("):
        build.compile_source("verify", (("DK", 1),), "sm_90")


def test_the_host_fills_the_struct_that_the_kernel_reads():
    source = Path(launch.__file__).with_name("verify.cu").read_text()
    body = re.search(r"struct Arguments \{(.*?)\n\};", source, re.DOTALL)[1]
    declared = []
    for line in re.sub(r"//.*", "", body).split(";"):
        match = re.fullmatch(r"(?:const )?(\w+)( ?\*)? ?(\w+(?:, \w+)*)", line.strip())
        if match:
            kind = {"i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
            declared += [(name, ctypes.c_void_p if match[2] else kind[match[1]]) for name in match[3].split(", ")]
    assert declared == launch._Arguments._fields_


class OnCuda(torch.Tensor):
    """Says that it is on a CUDA device."""

    device = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch):
    """`unsupported_reason` of a layer as if it were on a device of this compute capability."""

    def ask(case, capability=(9, 0), **changed):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        properties = SimpleNamespace(shared_memory_per_block_optin=OF_A_BLOCK)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        state = new_layer(case, 1, 2)._replace(**changed)
        return unsupported_reason(
            case.dims, LayerState(*(tensor.as_subclass(OnCuda) for tensor in state)), case.rows, impl="cuda"
        )

    return ask


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the state must be on the CPU")
def test_a_state_on_the_cpu_is_refused_even_where_triton_interprets():
    case = Case(4, 12)
    state = new_layer(case, 1, 1)
    assert unsupported_reason(case.dims, state, 4) is None
    assert unsupported_reason(case.dims, state, 4, impl="cuda") == "the state is on cpu; kernels run on a CUDA device"


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1), Case(4, 12), Case(64, 32), Case(15, 20, state=FP32, inputs=FP16), Case(7, 20, 64, 256),
        Case(4, 20, 256, 256, FP16, FP16),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_taken(case, asked):
    assert asked(case) is None
    assert asked(case, (10, 0)) is None


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(4, 12, 32, 128), "head_k_dim is 32; these kernels take 64, 128 and 256"),
        (Case(4, 12, 128, 512), "head_v_dim is 512; these kernels take 64, 128 and 256"),
        (Case(4, 12, state=FP32, inputs=FP32), "inputs torch.float32; these kernels take inputs in bf16 or fp16"),
        (Case(4, 12, state=FP16, inputs=BF16), "the state is torch.float16 and inputs torch.bfloat16"),
        (Case(1, 1, 256, 256, FP32), "a state of 256 x 256 in torch.float32 with 2 rows takes"),
        (Case(64, 32, 256, 256), "bytes of shared memory; a block has 232448"),
        (Case(64, 33), "33 rows of history and 64 of a window are too many; these kernels take 96 together"),
    ],
)
def test_what_is_refused_says_why(case, reason, asked):
    assert reason in asked(case)


def test_more_that_is_refused(asked):
    case = Case(4, 12)
    assert "the window has 65 rows" in unsupported_reason(
        case.dims, LayerState(*(tensor.as_subclass(OnCuda) for tensor in new_layer(case, 1, 1))), 65, impl="cuda"
    )
    assert asked(case, (8, 9)) == "the device has compute capability 8.9; these kernels need 9.0"
    apart = torch.zeros(2, 4 * 128 * 128 + 4, dtype=BF16)[:, :-4].unflatten(1, (4, 128, 128))
    assert "checkpoint are 131080 bytes apart; these kernels need multiples of 16" in asked(case, checkpoint=apart)
    apart = torch.zeros(2, 3 * 1024 + 4, dtype=BF16)[:, :-4].unflatten(1, (3, 1024))
    assert "conv are 6152 bytes apart; these kernels need multiples of 16" in asked(case, conv=apart)
    assert asked(case, checkpoint=torch.zeros(2, 4, 128, 128, dtype=BF16).mT) == (
        "checkpoint is not contiguous below its slots"
    )
    assert asked(case, keys=torch.zeros(1, 16, 2, 256, dtype=BF16)[..., ::2]) == (
        "keys is not contiguous below its first dimension"
    )
    assert asked(case, keys=torch.zeros(1, 16, 2, 128)) == (
        "keys is [1, 16, 2, 128] of torch.float32; this layer's is ['_', 16, 2, 128] of torch.bfloat16"
    )
    assert "conv is [2, 6, 1024] of torch.bfloat16" in asked(case, conv=torch.zeros(2, 6, 1024, dtype=BF16))
    assert "values begins at address" in asked(case, values=torch.zeros(8193, dtype=BF16)[1:].view(1, 16, 4, 128))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the layer must be on the CPU")
def test_a_refused_layer_is_refused_by_verify():
    round_ = Round(Case(4, 12))
    with pytest.raises(ValueError, match="the cuda implementation does not take this layer: the state is on cpu"):
        round_.run(round_.state, fold_always=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"queries": lambda t: t[:, :3]}, "queries is (5, 3, 2, 128) of torch.bfloat16"),
        ({"queries": lambda t: t.half()}, "queries is (5, 4, 2, 128) of torch.float16"),
        ({"queries": lambda t: t.repeat(1, 1, 1, 2)[..., ::2]}, "queries has stride 2 in its last dimension"),
        ({"queries": lambda t: t.repeat(1, 2, 1, 1)[:, ::2]}, "they must be contiguous"),
        ({"a": lambda t: t[:4]}, "a is (4, 4, 4)"),
        ({"a": lambda t: t.double()}, "a is (5, 4, 4) of torch.float64"),
        ({"a": lambda t: t.float()}, "b is (5, 4, 4) of torch.bfloat16"),
        ({"b": lambda t: t[..., :3]}, "b is (5, 4, 3)"),
        ({"b": lambda t: t.repeat(1, 1, 2)[..., ::2]}, "b has stride 2 in its last dimension"),
        ({"z": lambda t: t[:, :, :3]}, "z is (5, 4, 3, 128)"),
        ({"z": lambda t: t.float()}, "z is (5, 4, 4, 128) of torch.float32"),
        ({"z": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}, "its heads must be adjacent"),
        ({"z": lambda t: t.mT.contiguous().mT}, "z has stride 4 in its last dimension"),
        (
            {"z": lambda t: F.pad(t, (4, 4, 0, 0))[..., 4:-4]},
            "its rows must be 16 bytes aligned",
        ),
        ({"weight": lambda t: t[:64]}, "norm.weight is (64,)"),
        ({"weight": lambda t: t.half()}, "norm.weight is (128,) of torch.float16"),
        ({"weight": lambda t: F.pad(t, (1, 0))[1:]}, "norm.weight begins at address"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_launch(change, why, launches):
    round_ = Round(Case(4, 12))
    ((name, alter),) = change.items()
    if name in GatedNorm._fields:
        round_.norm = round_.norm._replace(**{name: alter(getattr(round_.norm, name))})
    else:
        setattr(round_, name, alter(getattr(round_, name)))
    before = copy_of(round_.state)
    with pytest.raises(ValueError, match=re.escape(why)):
        round_.run(round_.state, fold_always=True)
    assert launches == []
    assert all(same_bits(*pair) for pair in zip(round_.state, before, strict=True))


def test_inputs_may_be_views_of_wider_rows(launches):
    """As an engine has them: a, b and z side by side, from one projection."""
    round_ = Round(Case(4, 12))
    wide = torch.zeros(5, 4, 16 + 4 * 128, dtype=BF16, device=DEVICE)
    round_.a, round_.b, z, _ = wide.split([4, 4, 4 * 128, 8], dim=2)
    round_.norm = round_.norm._replace(z=z.unflatten(2, (4, 128)))
    round_.run(round_.state, fold_always=False)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("alter", "why"),
    [
        (lambda x: x[:, :3], "x is (5, 3, 1024) of torch.bfloat16"),
        (lambda x: x.float(), "x is (5, 4, 1024) of torch.float32"),
        (lambda x: F.pad(x, (4, 4))[..., 4:-4], "its rows must be 16 bytes aligned"),
        (lambda x: F.pad(x, (0, 4))[..., :-4], "with strides (4112, 1028, 1); its rows must be 16 bytes aligned"),
    ],
)
def test_inputs_of_the_convolution_that_do_not_fit_are_refused_before_a_launch(alter, why, launches):
    round_ = Round(Case(4, 12))
    round_.x = alter(round_.x)
    before = copy_of(round_.state)
    with pytest.raises(ValueError, match=re.escape(why)):
        round_.run_whole(round_.state, fold_always=True)
    round_.window = DeviceWindow.empty(5, 5, num_slots=9, num_requests=6, device=DEVICE, impl="cuda")
    round_.x = torch.zeros(5, 5, 1024, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="a window of 5 rows does not fit a stash of 4"):
        round_.run_whole(round_.state, fold_always=True)
    assert launches == []
    assert all(same_bits(*pair) for pair in zip(round_.state, before, strict=True))


@pytest.mark.parametrize(
    ("name", "alter", "why"),
    [
        ("params", lambda p: p._replace(taps=p.taps.half()), "taps is torch.float16"),
        (
            "params",
            lambda p: p._replace(dt_bias=p.dt_bias.repeat(2)[::2]),
            "dt_bias is torch.float32 with strides (2,)",
        ),
        ("params", lambda p: p._replace(conv_bias=F.pad(p.conv_bias, (1, 0))[1:]), "conv_bias is torch.float32"),
        ("norm", lambda norm: norm._replace(z=norm.z.float()), "z is (5, 15, 4, 128) of torch.float32"),
        (
            "window",
            lambda w: replace(w, conv_ancestors=w.conv_ancestors[..., :2]),
            "a convolution of width 3, the layer",
        ),
        ("b", lambda b: b[:4], "b is (4, 15, 4)"),
    ],
)
@pytest.mark.parametrize("rows", [4, 15])
def test_nothing_is_written_for_what_is_refused(rows, name, alter, why, launches, monkeypatch):
    """Wide windows have a launch of the convolution before the one that takes these."""
    monkeypatch.setattr(triton_kernels.launch, "unsupported_reason", lambda *args, **kwargs: None)
    round_ = Round(Case(rows, 12))
    setattr(round_, name, alter(getattr(round_, name)))
    before = copy_of(round_.state)
    with pytest.raises(ValueError, match=re.escape(why.replace("15", str(rows)))):
        round_.run_whole(round_.state, fold_always=True)
    assert launches == []
    assert all(same_bits(*pair) for pair in zip(round_.state, before, strict=True))


def test_nothing_to_fold_is_no_launch(launches):
    nobody, layer = torch.tensor([], dtype=torch.int64), new_layer(Case(4, 12), 1, 1)
    ops.fold(layer, nobody, nobody, impl="cuda")
    with pytest.raises(ValueError, match=re.escape("requests are [2] on cpu; both are [n] on cpu")):
        ops.fold(layer, nobody.new_zeros(1), nobody.new_zeros(2), impl="cuda")
    assert launches == []


# One launch beside the float64 walk, on the device or emulated


runs_kernels = pytest.mark.gpu if DEVICE.type == "cuda" else pytest.mark.usefixtures("emulated")
"""On the device where there is one, else in the emulation of `tests.ops.emulation`, every launch in another order."""


@pytest.fixture
def emulated(monkeypatch):
    seeds = itertools.count(1)
    for module in (launch, triton_kernels.launch):
        monkeypatch.setattr(module, "unsupported_reason", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launch, "tensor_map", emulation.tensor_map)
    monkeypatch.setattr(
        launch, "kernel", lambda name, defines, device: emulation.kernel(name, defines, device, seed=next(seeds))
    )


CASES = [
    Case(4, 12), Case(4, 20), Case(4, 4, weight=None, heads=(1, 1)), Case(4, 20, state=FP32, gates=FP32),
    Case(15, 20, state=FP32, inputs=FP16), Case(15, 20, state=FP16, inputs=FP16, weight=FP16, heads=(2, 6)),
    Case(40, 20, heads=(1, 8)), Case(64, 20, state=FP32, heads=(1, 2)), Case(64, 32),
    Case(60, 20, 64, 64, heads=(1, 1)), Case(7, 16, 64, 64, FP16, FP16, heads=(2, 2)),
    Case(4, 20, 256, 256, heads=(1, 2)), Case(5, 16, 64, 128, heads=(1, 2)),
    Case(5, 16, 128, 64, FP32, weight=None, heads=(1, 2)), Case(9, 16, 128, 256, weight=BF16, heads=(1, 2)),
    Case(9, 16, 256, 128, heads=(1, 2)), Case(1, 16, heads=(1, 3)),
]  # fmt: skip
ONE_ULP = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-18}
"""Of the largest entry; for fp32 what arithmetic in fp32 leaves of it."""


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_beside_float64(case):
    round_ = Round(case)
    expected = [round_.expected(place) for place in range(4)]
    for fold_always in (False, True):
        state = copy_of(round_.state)
        out = round_.run(state, fold_always)
        assert not out[4].any()
        for place, (request, slot, tree) in enumerate(
            zip(round_.requests[:-1], round_.slots, round_.trees, strict=False)
        ):
            outputs, folded, gates = expected[place]
            assert distance(out[place, : len(tree)], outputs) < 1.5 * ONE_ULP[case.inputs]
            assert not out[place, len(tree) :].any()
            ring, end = state.keys.shape[1], int(state.end[request])
            at = torch.tensor([(end + row) % ring for row in range(len(tree))]).to(DEVICE)
            assert distance(state.gates[request, at], gates) < 1e-5
            own = round_.state.pending[request]
            folds = (own > 0) & (fold_always | (own + tree.depth + 1 > case.capacity))
            assert torch.equal(state.pending[request], torch.where(folds, 0, own))
            assert torch.equal(state.checkpoint[slot, ~folds], round_.state.checkpoint[slot, ~folds])
            if folds.any():
                found, exact = state.checkpoint[slot, folds], folded[folds.cpu()]
                assert distance(found, exact) < 1.2 * ONE_ULP[case.state]
        others = [slot for slot in range(Round.SLOTS) if slot not in round_.slots]
        assert state.checkpoint[others].isnan().all()
        for name in ("keys", "values", "end"):
            assert same_bits(getattr(state, name), getattr(round_.state, name)), name
        nobody = [request for request in range(Round.REQUESTS) if request not in round_.requests]
        assert state.gates[nobody].isnan().all()
        assert (state.pending[nobody] == 1).all()


@runs_kernels
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.rows <= launch.FUSED_ROWS),
        Case(8, 12), Case(8, 24), Case(4, 40), Case(4, 20, 256, 64, heads=(1, 2)), Case(1, 1, weight=None),
        Case(2, 12), Case(3, 16, 64, 64, FP32), Case(6, 12), Case(8, 60, heads=(1, 2)), Case(5, 12, conv=2),
        Case(8, 12, conv=6),
    ],
    ids=str,
)  # fmt: skip
def test_one_launch_is_the_convolution_and_the_rest(case):
    """Beside Triton's convolution with the launch of the test before; what differs is the rounding of its outputs."""
    round_ = Round(case, seed=1)
    if case.rows > 4:  # half of the cases have no bias
        round_.params = round_.params._replace(conv_bias=None)
    convolved = copy_of(round_.state)
    round_.queries = triton_kernels.convolve(convolved, round_.window, round_.x, round_.params)
    for fold_always in (False, True):
        one, two = copy_of(round_.state), copy_of(convolved)
        found = round_.run_whole(one, fold_always)
        expected = round_.run(two, fold_always)
        assert not found[4].any()
        assert distance(found, expected) < 8 * ONE_ULP[case.inputs]
        for name in ("window_inputs", "window_rows", "gates", "end", "pending", "conv"):
            assert same_bits(getattr(one, name), getattr(two, name)), name
        for name in ("keys", "values", "checkpoint"):
            mine, other = getattr(one, name), getattr(two, name)
            assert same_bits(mine.isnan(), other.isnan()), name
            assert distance(mine.nan_to_num(), other.nan_to_num()) < 4 * ONE_ULP[case.inputs], name


@runs_kernels
@pytest.mark.parametrize(
    "case", [Case(0, 4), Case(0, 20), Case(0, 20, state=FP32), Case(0, 40), Case(0, 1, 256, 64)], ids=str
)
def test_a_fold_beside_float64(case):
    round_ = Round(case)
    state, before = copy_of(round_.state), round_.state
    slots, requests = (torch.tensor(where, device=DEVICE) for where in (round_.slots, round_.requests))
    ops.fold(state, slots, requests, impl="cuda")
    for place, (request, slot) in enumerate(zip(round_.requests[:-1], round_.slots, strict=False)):
        assert not state.pending[request].any()
        _, folded, _ = round_.expected(place)
        if folded is None:
            assert torch.equal(state.checkpoint[slot], before.checkpoint[slot])
        else:
            assert distance(state.checkpoint[slot], folded) < 1.2 * ONE_ULP[case.state]
    nobody = [request for request in range(Round.REQUESTS) if request not in round_.requests]
    assert (state.pending[nobody] == 1).all()
    assert state.checkpoint[[slot for slot in range(Round.SLOTS) if slot not in round_.slots]].isnan().all()
    assert same_bits(state.gates, before.gates)


@runs_kernels
@pytest.mark.parametrize("beta", [1.0, 1.999])
@pytest.mark.parametrize(("rows", "capacity", "dk", "written"), [(4, 12, 64, 0), (24, 40, 64, 0), (4, 12, 256, 1)])
def test_equal_keys_reach_a_state_of_fp32_as_by_the_plain_recurrence(rows, capacity, dk, written, beta):
    """The worst that keys can be: every row takes back what the one before wrote, and errors with it.

    `written`: the state is what such a row has left, and its products with the keys are sums of one sign.
    """
    case, errors = Case(rows, capacity, dk, 64, FP32, FP16, heads=(1, 2)), []
    for seed in range(8):
        round_ = Round(case, seed)
        request, slot, state = round_.requests[0], round_.slots[0], round_.state
        end, ring = int(state.end[request]), state.keys.shape[1]
        at = torch.tensor([(end + row) % ring for row in range(-capacity, 0)])
        state.keys[request] = state.keys[request, at[0]].clone()
        state.gates[request, at] *= torch.tensor([0.2, 0.0], device=DEVICE)
        state.gates[request, at] += torch.tensor([0.0, beta], device=DEVICE)
        k, v, gates = (t[request, at].cpu().float() for t in (state.keys, state.values, state.gates))
        k, chain = reference.l2_normalize(k), range(-1, capacity - 1)
        if written:
            state.checkpoint[slot] = (v[-1, :, :, None] * k[0, :, None]).to(DEVICE)
        _, plain = reference.walk(state.checkpoint[slot].cpu(), k, k, v, *gates.unbind(-1), chain)
        exact, after = round_.expected(0)[1], copy_of(state)
        round_.run(after, fold_always=True)
        errors.append([distance(after.checkpoint[slot], exact), distance(plain[-1], exact)])
    ours, plains = torch.tensor(errors).median(dim=0).values
    assert ours < 2 * plains


@runs_kernels
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0xFFC00000 - 2**32])
def test_what_is_not_a_number_in_a_state_of_fp32_shows(bits):
    """With every bit set too, as the machine has it: rounding by an addition would make it zero."""
    round_ = Round(Case(4, 12, 64, 64, FP32, FP16, heads=(1, 2)))
    slot, state = round_.slots[0], round_.state
    state.checkpoint[slot].view(torch.int32).fill_(bits)
    out = round_.run(state, fold_always=True)
    assert out[0].isnan().all()
    assert state.checkpoint[slot].isnan().all()


# Rounds beside the torch implementation

RING = 8
"""Rows of the largest window and of the history: the same variant in all rounds and in both modes."""
DIMS = GDNDims(2, 4, 64, 64)
TOLERANCE = 1.6e-2
"""Of the largest entry: four units in the last place of bf16, in which inputs are rounded more than once."""


class Pair:
    """The same requests in the torch implementation and in the kernels."""

    def __init__(self, mode="deferred", requests=4, dims=DIMS, state=BF16):
        spec = StateSpec(dims, 1, mode, RING, RING - 1, state, BF16, RING if mode == "deferred" else None)
        self.torch = RecurrentState(spec, requests, DEVICE)
        self.cuda = RecurrentState(spec, requests, DEVICE, impl="cuda")
        self.g = torch.Generator().manual_seed(0)
        self.dims, self.params = dims, random_params(dims, self.g)
        for request in range(requests):
            S = 0.3 * torch.randn(dims.num_v_heads, dims.head_v_dim, dims.head_k_dim, generator=self.g)
            conv = torch.randn(dims.conv_width - 1, dims.conv_dim, generator=self.g)
            for side in (self.torch, self.cuda):
                side.load(0, request, S.to(DEVICE), conv.to(DEVICE))
        for name in ("keys", "values", "gates", "window_inputs"):
            self.cuda.tensors[name].fill_(NAN)

    def spoil(self):
        """Whatever is not pending may be anything."""
        tensors = self.cuda.tensors
        ring = tensors["keys"].shape[2]
        age = (tensors["end"][:, :, None] - 1 - torch.arange(ring, device=DEVICE)) % ring
        unused = age >= tensors["pending"].amax(2, keepdim=True)
        for name in ("keys", "values", "gates"):
            tensors[name][unused] = NAN

    def inputs_of(self, trees, rows=RING):
        """x, a, b; NaN in rows past the trees."""
        inputs = [tensor.to(DEVICE) for tensor in random_inputs(self.dims, len(trees), rows, self.g, BF16)]
        for tensor in inputs:
            for place, tree in enumerate(trees):
                tensor[place, len(tree) :] = NAN
        return inputs

    def verify(self, trees, requests, rows=RING):
        """Runs a window on both sides, whose outputs agree; gives the plans."""
        self.spoil()
        batch = TreeBatch.of(trees, rows=rows, device=DEVICE)
        requests = torch.tensor(requests, device=DEVICE)
        inputs = self.inputs_of(trees, rows)
        plans, outputs = [], []
        for side in (self.torch, self.cuda):
            plans.append(side.plan(batch, requests))
            outputs.append(side.verify(0, plans[-1], *inputs, self.params))
        expected, found = outputs
        self.close(found, expected)
        for place, tree in enumerate(trees):
            assert not found[place, len(tree) if requests[place] >= 0 else 0 :].any()
        return plans

    def commit(self, plans, paths):
        path = torch.full((len(paths), max(map(len, paths))), -9)
        for place, chosen in enumerate(paths):
            path[place, : len(chosen)] = torch.tensor(chosen)
        accepted = torch.tensor([len(chosen) for chosen in paths], device=DEVICE)
        for side, window in zip((self.torch, self.cuda), plans, strict=True):
            side.commit(window, path.to(DEVICE), accepted)
        self.same()

    def round(self, trees, requests, rng, rows=RING):
        self.commit(self.verify(trees, requests, rows), [random_path(tree, rng) for tree in trees])

    def same(self):
        for name in ("end", "pending", "window_rows", "conv"):
            assert torch.equal(self.cuda.tensors[name], self.torch.tensors[name]), name
        self.close(self.cuda.tensors["checkpoint"], self.torch.tensors["checkpoint"])

    def same_folded(self):
        """After a fold on both sides."""
        everyone = range(self.torch.num_requests)
        self.torch.fold(everyone)
        self.cuda.fold(everyone)
        assert not self.cuda.tensors["pending"].any()
        self.same()

    @staticmethod
    def close(found, expected):
        assert distance(found, expected) < TOLERANCE


@runs_kernels
@pytest.mark.parametrize("mode", ["deferred", "reconstruct"])
def test_rounds(mode):
    """Chains, trees, padding, plain decoding in a window of one row, until the ring has gone round."""
    rng, pair = random.Random(0), Pair(mode)
    pair.round([DraftTree.chain(7), DraftTree.chain(3), DraftTree.chain(0)], [2, 0, 3], rng)
    for count in (4, 3):
        trees = [DraftTree.random(rng.randint(1, RING), rng) for _ in range(count)]
        requests = rng.sample(range(4), count)
        requests[1] = -1
        pair.round(trees, requests, rng)
    pair.commit(pair.verify([DraftTree.chain(7)] * 2, [1, 3]), [range(6), range(3)])
    for _ in range(2):
        pair.round([DraftTree.chain(0)] * 4, [3, 1, -1, 0], rng, rows=1)
    scattered = DraftTree((-1, 0, 0, 1, 2, 2, 5))
    pair.commit(pair.verify([scattered, DraftTree.chain(2)], [1, 2]), [(0, 2, 5, 6), (0, 1)])
    pair.round([DraftTree.random(RING, rng) for _ in range(4)], [0, 1, 2, 3], rng)
    pair.same_folded()


@runs_kernels
def test_the_last_window_before_a_commit_counts():
    rng, pair = random.Random(0), Pair(requests=2)
    pair.round([DraftTree.chain(5)] * 2, [0, 1], rng)
    pair.verify([DraftTree.chain(7), DraftTree.chain(1)], [0, 1])
    pair.round([DraftTree((-1, 0, 0, 1, 2)), DraftTree.chain(4)], [1, 0], rng)
    pair.round([DraftTree.chain(2)] * 2, [0, 1], rng)
    pair.same_folded()


@runs_kernels
@pytest.mark.parametrize("rows", [2, 3])
def test_a_head_that_has_folded_already(rows):
    """As a launch that was cut short leaves it; two rows fit beside the six of the other heads, three do not."""
    pair, where = Pair(requests=1), torch.tensor([0], device=DEVICE)
    pair.commit(pair.verify([DraftTree.chain(5)], [0]), [range(6)])
    for side in (pair.torch, pair.cuda):
        layer = side._layers[0]
        layer.checkpoint[0, 1] = ops.folded_state(layer, where, where)[0, 1]
        layer.pending[0, 1] = 0
    pair.same()
    plans = pair.verify([DraftTree.chain(rows - 1)], [0])
    assert pair.cuda.tensors["pending"].tolist() == [[[6, 0, 6, 6] if rows == 2 else [0] * 4]]
    pair.commit(plans, [range(rows)])
    pair.same_folded()


@runs_kernels
def test_slots_far_apart_in_a_large_pool():
    pair = Pair(requests=2, dims=GDNDims(1, 1, 64, 64))
    far, head = 2**31 + 64, 64 * 64
    pool = torch.empty(far + head, dtype=BF16, device=DEVICE).as_strided((2, 1, 64, 64), (far, head, 64, 1))
    pool.copy_(pair.torch._layers[0].checkpoint)
    untouched = pool[0].clone()
    pair.cuda._layers[0] = pair.cuda._layers[0]._replace(checkpoint=pool)
    plans = pair.verify([DraftTree.chain(7)], [1])
    path, accepted = torch.arange(8, device=DEVICE)[None], torch.tensor([8], device=DEVICE)
    for side, window in zip((pair.torch, pair.cuda), plans, strict=True):
        side.commit(window, path, accepted)
    pair.verify([DraftTree.chain(7)], [1])  # folds
    assert not pair.cuda._layers[0].pending.any()
    pair.close(pool, pair.torch._layers[0].checkpoint)
    assert torch.equal(pool[0], untouched)


def captured(work):
    """A graph of `work`, which has run once before: a function that replays it, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = work()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, kept


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["deferred", "reconstruct"])
def test_one_graph_serves_every_round(mode):
    """Two layers; other trees, other acceptance, fewer requests and padding than it was captured with."""
    layers, batch, guard = 2, 4, 7.0
    mine = [1, 3, 5, 7]  # every other request belongs to nobody
    spec = StateSpec(DIMS, layers, mode, RING, RING - 1, BF16, BF16, RING if mode == "deferred" else None)
    replayed, eager = (RecurrentState(spec, 9, DEVICE, impl="cuda") for _ in range(2))
    g, rng = torch.Generator().manual_seed(0), random.Random(0)
    for tensor in replayed.tensors.values():
        tensor[:, ::2] = guard
    for layer in range(layers):
        for request in mine:
            S, conv = (0.3 * torch.randn(*shape[2:], generator=g) for shape in
                       (replayed.tensors["checkpoint"].shape, replayed.tensors["conv"].shape))  # fmt: skip
            replayed.load(layer, request, S.to(DEVICE), conv.to(DEVICE))
    for name, tensor in replayed.tensors.items():
        eager.tensors[name].copy_(tensor)
    params = random_params(DIMS, g)
    sizes = (DIMS.conv_dim, DIMS.num_v_heads, DIMS.num_v_heads)
    x, a, b = (torch.zeros(layers, batch, RING, size, dtype=BF16, device=DEVICE) for size in sizes)
    path = torch.zeros(batch, RING, dtype=torch.int64, device=DEVICE)
    accepted = torch.ones(batch, dtype=torch.int64, device=DEVICE)
    window = DeviceWindow.empty(batch, RING, num_slots=9, num_requests=9, device=DEVICE, impl="cuda")

    def work():  # first with padding alone, which compiles and touches nothing
        outputs = [replayed.verify(layer, window, x[layer], a[layer], b[layer], params) for layer in range(layers)]
        ops.commit(replayed._all, window, path, accepted)
        return outputs

    replay, outputs = captured(work)
    before = build.kernel.cache_info().misses
    for _ in range(15):
        count = rng.randint(1, batch)
        trees = [DraftTree.random(rng.randint(1, RING), rng) for _ in range(count)]
        trees[0] = DraftTree.chain(rng.randrange(RING))
        requests = rng.sample(mine, count)
        if count > 1:
            requests[rng.randrange(count)] = -1
        where = torch.tensor(requests, device=DEVICE)
        trees_of_all = TreeBatch.of(trees, rows=RING, device=DEVICE)
        for buffer in (x, a, b):
            buffer.copy_(torch.randn(*buffer.shape, generator=g))
            for place in range(batch):
                buffer[:, place, len(trees[place]) if place < count else 0 :] = NAN
        for place, tree in enumerate(trees):
            chosen = random_path(tree, rng)
            path[place, : len(chosen)] = torch.tensor(chosen, device=DEVICE)
            accepted[place] = len(chosen)
        window.update(trees_of_all, where, where)
        replay()
        window.check()
        plan = eager.plan(trees_of_all, where)
        for layer, found in enumerate(outputs):
            expected = eager.verify(layer, plan, x[layer, :count], a[layer, :count], b[layer, :count], params)
            assert found.isfinite().all()
            assert torch.equal(found[:count], expected)
            assert not found[count:].any()
        eager.commit(plan, path[:count], accepted[:count])
        for name, tensor in replayed.tensors.items():
            assert same_bits(tensor, eager.tensors[name]), name
            assert (tensor[:, ::2] == guard).all(), name
    assert replayed.tensors["checkpoint"].isfinite().all()
    assert build.kernel.cache_info().misses == before


@pytest.mark.gpu
def test_nothing_is_compiled_after_the_first_round():
    pair, rng = Pair(), random.Random(0)
    side = pair.cuda
    counts = []
    for number in range(51):
        count = rng.randint(1, 4)
        trees = [DraftTree.random(rng.randint(1, RING), rng) for _ in range(count)]
        where = torch.tensor(rng.sample(range(4), count), device=DEVICE)
        window = side.plan(TreeBatch.of(trees, rows=RING, device=DEVICE), where)
        side.verify(0, window, *pair.inputs_of(trees), pair.params)
        paths = [random_path(tree, rng) for tree in trees]
        path = torch.tensor([[*chosen, *[0] * (RING - len(chosen))] for chosen in paths], device=DEVICE)
        side.commit(window, path, torch.tensor([len(chosen) for chosen in paths], device=DEVICE))
        if number % 10 == 0:
            side.fold(where.tolist())
        counts.append(build.kernel.cache_info().misses)
    assert counts[0] == counts[-1]


@runs_kernels
def test_many_rounds_drift_no_further_than_the_plain_recurrence():
    """As in test_numerics: root mean square errors beside the float64 walk, over those of the same dtypes, below 2.

    Emulated, 125 rounds.
    """
    dims = GDNDims(1, 2, 64, 64)
    layer = Layer.random(dims, decay="faint").to(FP32)
    params = layer.params(FP32)
    params = params._replace(**{n: getattr(params, n).to(DEVICE) for n in ("taps", "conv_bias", "neg_A", "dt_bias")})
    rng, g = random.Random(1), torch.Generator().manual_seed(1)
    oracle, kinds = Oracle(layer), (BF16, FP32)
    plain = {kind: Plain(layer, kind, BF16) for kind in kinds}
    cuda = {
        kind: RecurrentState(
            StateSpec(dims, 1, "deferred", RING, RING - 1, kind, BF16, RING), 1, DEVICE, impl="cuda"
        )
        for kind in kinds
    }  # fmt: skip
    where, exact = torch.tensor([0], device=DEVICE), []
    outputs = {(kind, who): [] for kind in kinds for who in ("cuda", "plain")}

    def rms(found, expected):
        found = found.cpu().double()
        return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    for number in range(500 if DEVICE.type == "cuda" else 125):
        tree = DraftTree.random(rng.randint(1, 5), rng)
        chosen = random_path(tree, rng)
        x, a, b = random_inputs(dims, 1, len(tree), g, BF16)
        window = (x[0], a[0], b[0], tree.parents)
        padded = [torch.nn.functional.pad(t, (0, 0, 0, RING - len(tree))).to(DEVICE) for t in (x, a, b)]
        trees = TreeBatch.of([tree], rows=RING, device=DEVICE)
        path, accepted = (torch.tensor(value, device=DEVICE) for value in ([chosen], [len(chosen)]))
        exact.append(oracle.verify(*window))
        oracle.commit(chosen)
        for kind in kinds:
            planned = cuda[kind].plan(trees, where)
            outputs[kind, "cuda"].append(cuda[kind].verify(0, planned, *padded, params)[0, : len(tree)])
            cuda[kind].commit(planned, path, accepted)
            outputs[kind, "plain"].append(plain[kind].verify(*window))
            plain[kind].commit(chosen)
        if number % 125 == 124:
            for kind in kinds:
                mine, others = (
                    rms(torch.cat(outputs[kind, who][-125:]), torch.cat(exact[-125:])) for who in ("cuda", "plain")
                )
                assert mine < 2 * others, f"outputs, {kind} state: {mine:.1e}, plain recurrence {others:.1e}"
                mine, others = (rms(S, oracle.state) for S in (cuda[kind].read(0, 0)[0], plain[kind].state))
                assert mine < 2 * others, f"{kind} state: error {mine:.1e}, plain recurrence {others:.1e}"
