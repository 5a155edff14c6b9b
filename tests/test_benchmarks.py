"""What scripts in benchmarks/ do without a GPU: keep their files, show them, and refuse what they cannot show."""

import json
import sys

import pytest

from benchmarks import serving


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(concurrency):
    return {"arm": "none", "gpu_memory_utilization": 0.6, "concurrency": concurrency, "tokens_per_s": 1.0}


def test_a_point_more_keeps_what_was_noted_by_hand(results):
    serving.save("mine", record(1), "a command")
    file = results / "mine.json"
    head = json.loads(file.read_text())
    file.write_text(json.dumps({"run": "on a host with β GPUs", **head}))
    serving.save("mine", record(8), "another command")
    found = json.loads(file.read_text())
    assert found == {**head, "run": "on a host with β GPUs", "command": "another command", "records": found["records"]}
    assert [each["concurrency"] for each in found["records"]] == [1, 8]
    assert list(found)[-1] == "records"


@pytest.mark.parametrize(("breakable", "how"), [(None, "without"), ("1", "without"), ("0", "through")])
def test_the_file_says_how_graphs_were_captured(results, monkeypatch, breakable, how):
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    if breakable:
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    serving.save("mine", record(1), "a command")
    assert f"captured by vLLM {how} torch.compile" in json.loads((results / "mine.json").read_text())["method"]


def test_results_that_do_not_exist_are_not_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serving.py", "--show", "--name", "missing"])
    with pytest.raises(SystemExit) as stopped:
        serving.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "missing.json does not exist; give --name, such as serving-h200\n"
