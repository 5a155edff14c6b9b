"""What is written can be read again, and what is wrong in a file is said."""

import json
import math

import pytest
from pydantic import ValidationError

from tests.bench.synthetic import check, record, results
from treewy.bench.records import Results


def test_round_trip(tmp_path):
    path = tmp_path / "results.json"
    written = results(checks=[check(), check(error=math.inf)])
    written.write(path)
    assert Results.read(path) == written
    assert [found["passed"] for found in json.loads(path.read_text())["checks"]] == [True, False]
    assert not path.with_suffix(".json.part").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"case": "guess"}, {"us": 0.0}, {"batch": 0}, {"rows": 65}, {"state_dtype": "int8"}, {"speed": 1}, {"layers": 0}],
)
def test_a_record_is_checked(wrong):
    with pytest.raises(ValidationError):
        record(**wrong)


def test_ratios():
    timed = record(us=10.0, us_again=12.0, floor_us=8.0).model_copy(update={"baseline_us": 40.0})
    assert (timed.ratio, timed.over_floor) == (0.25, 1.25)
    assert timed.spread == pytest.approx(0.2)
    assert record(floor_us=None).over_floor is None
    assert record().ratio is None


def test_baselines_are_the_same_work():
    found = results(
        [
            record("peer", "vllm store_all cuda", us=40.0),
            record("peer", "vllm store_all cuda", us=80.0, state_dtype="float32"),
            record("peer", "vllm store_all triton", rows=15, us=90.0),
            record("peer", "sglang store_all", rows=40, us=70.0, with_commit=True),
            record("deferred", "cuda", us=8.0),
            record("deferred", "cuda", us=9.0, with_conv=True),
            record("deferred", "cuda", us=9.0, state_dtype="float32"),
            record("verify", "cuda", rows=15),
            record("deferred", "cuda", rows=40, with_commit=True),
            record("verify", "cuda", rows=40),
            record("commit", "cuda", with_commit=True),
        ]
    ).records
    assert [r.baseline_us for r in found if r.case != "peer"] == [40.0, None, 80.0, 90.0, 70.0, None, None]
    assert found[8].baseline == "sglang store_all"
