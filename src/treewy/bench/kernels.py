"""The run of the kernel benchmark: compile, check against float64, time, write.

Method. Each case is captured in a CUDA graph over 30 layers, or so many that the L2 holds none of them (fewer where the
memory ends), each layer with random state and inputs of its own, and replayed; the median of 10 replays counts, divided
by the layers, and each case is measured twice. Cases whose rounds differ (`deferred`, `decode`) run whole cycles from
fold to fold, with the real commit between the replays or inside them, and the mean of a cycle counts as one replay.
Nothing is timed whose outputs, over a few rounds, are not within a tolerance of the float64 walk over the tree.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import torch

from treewy.bench import peers
from treewy.bench.floors import commit_bytes
from treewy.bench.provenance import provenance
from treewy.bench.records import Check, Machine, Record, Refused, Results
from treewy.bench.timing import GraphTimer, Timer, copy_bandwidth, median_of_cycles
from treewy.bench.workload import (
    PENDING,
    TOLERANCE,
    Inputs,
    Ours,
    OursCuda,
    OursTriton,
    Setting,
    Subject,
    Timed,
    output_error,
)

BATCHES = (1, 8, 32, 64, 128, 256)
TableName = Literal["chain", "conv", "trees", "decode", "peers", "fp32", "heads"]
"""`chain`: 4 rows after the convolution. `conv`: the whole step. `trees`: 15 and 40 rows. `decode`: one row. `peers`:
other kernels for a chain. `fp32`: fp32 states. `heads`: 48 and 64 value heads."""
TABLES: tuple[TableName, ...] = get_args(TableName)
OURS: tuple[type[Ours], ...] = (OursCuda, OursTriton)
CHAIN_CASES: tuple[Timed, ...] = ("verify", "deferred", "reconstruct")
METHOD = " ".join((__doc__ or "").partition("Method. ")[2].split())
CHECK_BATCH = 3
REPEATS = 10
SECONDS_A_MEASUREMENT = 0.25

What = Literal["verify", "round", "commit"]
"""What is timed of a subject: its verify, a whole round, or its commit."""


@dataclass(frozen=True)
class Job:
    """A subject in a setting, and what of it is timed."""

    subject: type[Subject]
    setting: Setting
    whats: tuple[What, ...]

    @property
    def kind(self) -> tuple[type[Subject], Setting]:
        """What compiles and is checked once for all batches."""
        return self.subject, replace(self.setting, batch=CHECK_BATCH)

    def __str__(self) -> str:
        s = self.setting
        conv = " with its convolution" if s.with_conv else ""
        dtype = str(s.state_dtype).removeprefix("torch.")
        return f"{self.subject.impl}, {s.case}, {s.rows} rows, HV {s.heads[1]}, {dtype}{conv}"


def jobs(tables: Sequence[TableName], batches: Sequence[int], skip: Sequence[str] = ()) -> list[Job]:
    """All of a run, table after table; without the implementations whose names begin with an entry of `skip`."""
    made = dict.fromkeys(_jobs(tables, [impl for impl in OURS if not impl.impl.startswith(tuple(skip))], batches))
    return [job for job in made if not job.subject.impl.startswith(tuple(skip))]


def _jobs(tables: Sequence[TableName], impls: Sequence[type[Ours]], batches: Sequence[int]) -> Iterator[Job]:
    bf16, fp32 = torch.bfloat16, torch.float32
    both: tuple[What, ...] = ("verify", "round")

    def chain(**of: Any) -> Iterator[Job]:
        for batch in batches:
            yield Job(peers.VllmStoreAllCuda, Setting("verify", batch, 4, **of), ("verify",))
            for impl in impls:
                for case in CHAIN_CASES:
                    whats: tuple[What, ...] = ("verify", "commit") if case == "verify" else both
                    yield Job(impl, Setting(case, batch, 4, **of), whats)

    def beside(subjects: Sequence[type[Subject]], rows: int, dtype: torch.dtype, case: Timed) -> Iterator[Job]:
        for subject in subjects:
            for batch in batches:
                yield Job(subject, Setting(case, batch, rows, state_dtype=dtype), both)

    for table in tables:
        if table == "chain":
            yield from chain()
        elif table == "conv":
            yield from chain(with_conv=True)
        elif table == "fp32":
            yield from chain(state_dtype=fp32)
            yield from chain(state_dtype=fp32, with_conv=True)
            yield from beside(peers.CHAIN, 4, fp32, "verify")
        elif table == "heads":
            for heads in (48, 64):
                yield from chain(heads=(16, heads))
        elif table == "trees":
            for rows in (15, 40):
                for batch in batches:
                    for impl in impls:
                        for case in CHAIN_CASES:
                            whats = ("verify", "commit") if case == "verify" else both
                            yield Job(impl, Setting(case, batch, rows), whats)
                yield from beside(peers.TREE, rows, bf16, "verify")
        elif table == "decode":
            for batch in batches:
                for with_conv in (False, True):
                    setting = Setting("decode", batch, 1, with_conv=with_conv)
                    yield Job(peers.VllmDecode, setting, ("verify",))
                    for impl in impls:
                        yield Job(impl, setting, both)
            yield from beside(peers.DECODE[1:], 1, bf16, "decode")
        else:
            yield from beside(peers.CHAIN, 4, bf16, "verify")


# One job


def make(job: Job, device: torch.device, layers: int | None = None) -> Subject:
    """The job's subject with its inputs."""
    layers = layers or job.setting.layers(job.subject.bytes_per_request(job.setting))
    return job.subject(Inputs(job.setting, layers, device))


def measure(
    subject: Subject, what: What, timer: Timer, copy_rate: float, *, repeats: int = REPEATS,
    seconds: float = SECONDS_A_MEASUREMENT,
) -> Record:  # fmt: skip
    """Times a subject twice."""

    def work() -> object:
        out = None if what == "commit" else subject.verify()
        if what != "verify":
            subject.commit()
        return out

    def between() -> None:
        if what == "verify" and subject.rounds > 1:
            subject.commit()
        subject.between()

    with timer.scope():
        replay = timer.prepare(work, subject.begin)
        times = [
            median_of_cycles(
                replay, subject.rounds, begin=subject.begin, between=between, repeats=repeats, seconds=seconds
            )
            for _ in range(2)
        ]
        subject.check()
    setting, floor = subject.setting, _floor(subject, what)
    us, again = (round(seconds / subject.layers * 1e6, 3) for seconds in times)
    return Record(
        case="commit" if what == "commit" else setting.case if isinstance(subject, Ours) else "peer",
        impl=subject.impl,
        batch=setting.batch,
        rows=setting.rows,
        pending=PENDING if what == "commit" else round(subject.mean_pending, 3),
        heads=setting.heads,
        state_dtype=str(setting.state_dtype).removeprefix("torch."),  # type: ignore[arg-type]
        with_conv=setting.with_conv and what != "commit",
        with_norm=subject.with_norm and what != "commit",
        with_commit=what != "verify",
        us=us,
        us_again=again,
        floor_us=None if floor is None else round(floor / copy_rate * 1e6, 3),
        layers=subject.layers,
    )


def _floor(subject: Subject, what: What) -> float | None:
    if not isinstance(subject, Ours):
        return subject.floor_bytes() if what == "verify" else None
    setting = subject.setting
    moved = commit_bytes(setting.dims, setting.tree, setting.path, setting.batch)
    return {"verify": subject.floor_bytes(), "round": subject.floor_bytes() + moved, "commit": moved}[what]


def check(job: Job, device: torch.device) -> Check:
    """Beside float64, at a small batch and in one layer; over a fold where the case has one."""
    torch.manual_seed(job.setting.rows)
    subject = make(Job(*job.kind, job.whats), device, layers=1)
    rounds = subject.rounds + 2
    setting = job.setting
    return Check(
        impl=subject.impl,
        case=setting.case if isinstance(subject, Ours) else "peer",
        rows=setting.rows,
        heads=setting.heads,
        state_dtype=str(setting.state_dtype).removeprefix("torch."),  # type: ignore[arg-type]
        with_conv=setting.with_conv,
        rounds=rounds,
        error=output_error(subject, rounds),
        tolerance=TOLERANCE,
    )


def compile_kinds(kinds: Sequence[tuple[type[Subject], Setting]], big: bool) -> None:
    """In a process of its own, into the cache on disk that all processes share."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for subject, setting in kinds:
        # What goes wrong here goes wrong again in the check, which says so.
        with suppress(Exception):
            setting = replace(setting, batch=65 if big and setting.rows <= 15 else 2)
            made = make(Job(subject, setting, ("round",)), torch.device("cuda"), layers=1)
            made.begin()
            made.verify()
            made.commit()
            torch.cuda.synchronize()


# The run


@dataclass
class Run:
    """A run under way.

    Args:
        todo: jobs, in order.
        output: file that is written again after every table's batch; None writes nothing.
        say: shows a line of progress.
        timer: how work is timed.
        device: where.
        copy_rate: bytes per second; measured if None.
        budget_seconds: no further job starts after these.
    """

    todo: list[Job]
    output: Path | None
    say: Callable[[str], None]
    timer: Timer | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    copy_rate: float | None = None
    budget_seconds: float = 300.0
    repeats: int = REPEATS
    workers: int = 0
    checks: dict[tuple[type[Subject], Setting], Check | None] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self._began = perf_counter()
        self._where = provenance("triton", "vllm", "sglang", "flashinfer-python", "nvidia-cutlass-dsl")

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return perf_counter() - self._began

    def results(self) -> Results:
        """What there is so far."""
        where = self._where
        machine = Machine(**where["machine"])
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            machine = machine.model_copy(
                update={"l2_bytes": properties.L2_cache_size, "memory_bytes": properties.total_memory}
            )
        return Results(
            command=" ".join(["treewy", *sys.argv[1:]]),
            date=where["date"],
            machine=machine,
            versions=where["versions"],
            method=METHOD,
            copy_bytes_per_s=self.copy_rate or 1.0,
            complete=self.complete,
            seconds=round(self.seconds, 1),
            checks=[checked for checked in self.checks.values() if checked is not None],
            refused=self.refused,
            records=with_baselines(self.records),
        )

    def write(self) -> None:
        """The results so far."""
        if self.output is not None:
            self.results().write(self.output)

    def run(self) -> Results:
        """All of it, or as much as the budget allows."""
        possible = [job for job in self.todo if self._possible(job)]
        self._compile(possible)
        if self.timer is None:
            self.timer = GraphTimer()
        if self.copy_rate is None:
            copy_bandwidth()  # warms the clocks up
            self.copy_rate = copy_bandwidth()
            self.say(f"copy {self.copy_rate / 1e12:.2f} TB/s")
        batch = None
        for job in possible:
            if self.seconds > self.budget_seconds:
                self.say(f"the budget of {self.budget_seconds:.0f} s is used up")
                break
            if job.setting.batch != batch:
                batch = job.setting.batch
                self.write()
            if self._checked(job):
                self._measure(job)
            if self._lost():
                self._refuse("everything after that", "the device answers no more; leave out what broke it: --skip")
                break
        else:
            self.complete = True
        self.write()
        return self.results()

    def _lost(self) -> bool:
        """A kernel that broke the device's context leaves nothing to run in this process."""
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def _possible(self, job: Job) -> bool:
        reason = job.subject.unavailable(job.setting)
        if reason is not None:
            self._refuse(str(job) if "not installed" not in reason else job.subject.impl, reason)
        return reason is None

    def _refuse(self, what: str, reason: str) -> None:
        refusal = Refused(what=what, reason=reason)
        if refusal not in self.refused:
            self.refused.append(refusal)
            self.say(f"not timed: {what}: {reason}")

    def _compile(self, possible: list[Job]) -> None:
        """Triton's kernels in other processes while this one compiles and checks what lives in a process."""
        kinds = list(dict.fromkeys(job.kind for job in possible))
        here = ("cuda", "flashinfer")
        elsewhere = [kind for kind in kinds if not kind[0].impl.startswith(here)]
        if self.workers and elsewhere:
            tasks = [([kind], False) for kind in elsewhere]
            tasks += [([kind], True) for kind in elsewhere if kind[0].impl.startswith("sglang store_all")]
            with multiprocessing.get_context("spawn").Pool(min(self.workers, len(tasks))) as pool:
                compiled = pool.starmap_async(compile_kinds, tasks, chunksize=1)
                for job in possible:
                    if job.subject.impl.startswith(here):
                        self._checked(job)
                while not compiled.ready() and self.seconds < 0.6 * self.budget_seconds:
                    compiled.wait(1)
            self.say(f"compiled {len(kinds)} kinds of launches, {self.seconds:.0f} s")

    def _checked(self, job: Job) -> bool:
        if job.kind not in self.checks:
            checked: Check | None = None
            try:
                checked = check(job, self.device)
            except Exception as error:  # another package's kernel may raise anything; the other jobs still count
                self._refuse(str(job), f"its check raised {type(error).__name__}: {_short(error)}")
            else:
                if not checked.passed:
                    self._refuse(str(job), f"its error is {checked.error:.3g}, the tolerance {checked.tolerance:.3g}")
            self.checks[job.kind] = checked
        found = self.checks[job.kind]
        return found is not None and found.passed

    def _measure(self, job: Job) -> None:
        assert self.timer is not None
        assert self.copy_rate is not None
        try:
            subject = make(job, self.device)
            for what in job.whats:
                record = measure(subject, what, self.timer, self.copy_rate, repeats=self.repeats)
                self.records.append(record)
                self.say(line(record))
        except Exception as error:
            self._refuse(f"{job}, batch {job.setting.batch}", f"{type(error).__name__}: {_short(error)}")
        finally:
            subject = None  # type: ignore[assignment]
            if self.device.type == "cuda":
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def line(record: Record) -> str:
    """A record in one line."""
    what = " ".join(
        word for word, there in (("conv", record.with_conv), ("commit", record.with_commit)) if there
    )  # fmt: skip
    floor = f"{record.over_floor:6.2f} x floor" if record.over_floor else ""
    return (
        f"{record.case:11} {record.impl:23} {record.state_dtype:8} HV {record.heads[1]:2} T {record.rows:2} "
        f"B {record.batch:3} {what:11} {record.us:9.2f} {record.us_again:9.2f} us {floor}"
    )


def with_baselines(records: Sequence[Record]) -> list[Record]:
    """The same records, ours with the peer beside them that they are to be compared with."""
    times = {}
    for record in records:
        key = (record.impl, record.batch, record.rows, record.heads, record.state_dtype, record.with_conv)
        if record.case == "peer":
            times[(*key, record.with_commit)] = record.us
    found = []
    for record in records:
        names: tuple[tuple[str, bool], ...] = ()
        if record.case in ("verify", "deferred", "reconstruct"):
            if record.rows == 4:
                names = ((peers.VllmStoreAllCuda.impl, False),)
            else:
                names = tuple((peer.impl, record.with_commit) for peer in peers.TREE)
        elif record.case == "decode":
            names = ((peers.VllmDecode.impl, False),)
        for name, with_commit in names:
            place = (record.batch, record.rows, record.heads, record.state_dtype, record.with_conv, with_commit)
            us = times.get((name, *place))
            if us is not None:
                record = record.model_copy(update={"baseline": name, "baseline_us": us})
                break
        found.append(record)
    return found
