"""Results of a run that never was: every kind of record, at times that a formula makes."""

from treewy.bench.kernels import BATCHES, METHOD, with_baselines
from treewy.bench.records import Check, Machine, Record, Refused, Results


def record(case="verify", impl="cuda", batch=64, rows=4, us=10.0, **of):
    settings = {
        "pending": 8, "heads": (16, 32), "state_dtype": "bfloat16", "with_conv": False, "with_norm": True,
        "with_commit": False, "us_again": us * 1.01, "floor_us": us / 1.2, "layers": 30,
    }  # fmt: skip
    return Record(**{**settings, "case": case, "impl": impl, "batch": batch, "rows": rows, "us": us, **of})


def check(error=0.002, impl="cuda", case="verify"):
    return Check(
        impl=impl, case=case, rows=4, heads=(16, 32), state_dtype="bfloat16", with_conv=False, rounds=3, error=error,
        tolerance=0.02,
    )  # fmt: skip


def results(records=None, **of):
    if records is None:
        records = []
        for batch in BATCHES:
            for with_conv in (False, True):
                records.append(record("peer", "vllm store_all cuda", batch, us=4.0 * batch, with_conv=with_conv))
                for impl, factor in (("cuda", 0.2), ("triton", 0.6)):
                    us = 4.0 * batch * factor
                    records.append(record("verify", impl, batch, us=us, with_conv=with_conv))
                    records.append(record("deferred", impl, batch, us=1.2 * us, with_conv=with_conv))
            records.append(record("commit", "cuda", batch, us=1.0, with_commit=True))
            records.append(record("decode", "cuda", batch, 1, us=2.0))
            records.append(record("peer", "vllm decode", batch, 1, us=3.0))
            for rows in (15, 40):
                records.append(record("verify", "cuda", batch, rows, us=0.9 * batch + rows))
                records.append(record("deferred", "cuda", batch, rows, us=batch + rows, with_commit=True))
                records.append(
                    record("peer", "sglang store_all", batch, rows, us=10.0 * (batch + rows), with_commit=True)
                )
            records.append(record("peer", "flashinfer ucache", batch, us=0.7 * batch, floor_us=None))
    settings = {
        "command": "treewy bench kernels", "date": "2026-01-02", "versions": {"torch": "2.11.0", "treewy": "0"},
        "machine": Machine(gpu="A GPU", driver="1", cpu="A CPU", cores=2), "method": METHOD,
        "copy_bytes_per_s": 4e12, "complete": True, "seconds": 1.0, "checks": [check()],
        "refused": [Refused(what="sglang replay", reason="the package sglang is not installed")],
    }  # fmt: skip
    return Results(**{**settings, "records": with_baselines(records), **of})
