"""Tables and figure of results that a formula made, and what the command refuses without a GPU."""

import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.bench.synthetic import check, record, results
from treewy import cli
from treewy.bench.plot import best_verify
from treewy.bench.tables import chain_verdict, floor_verdict, rivals, summary, tables


def run(*arguments, columns=200):
    return CliRunner().invoke(cli.app, ["bench", "kernels", *map(str, arguments)], env={"COLUMNS": str(columns)})


def text(found):
    console = Console(width=200, record=True, quiet=True)
    with console.capture() as capture:
        for table in tables(found):
            console.print(table)
    return capture.get() or console.export_text()


def test_every_table_has_its_rows():
    titles = [str(table.title) for table in tables(results())]
    assert len(titles) == 9
    for begin in ("After the convolution", "The whole step", "Distance", "Whole rounds", "Plain", "Every other", "Not"):
        assert any(title.startswith(begin) for title in titles)
    assert [str(table.title) for table in tables(results([], refused=[], checks=[]))] == []


def test_limits():
    met, missed = (record("verify", batch=64, us=us).model_copy(update={"baseline_us": 40.0}) for us in (9.9, 10.1))
    assert chain_verdict(met).text().plain == "0.247 <= 0.250"
    assert chain_verdict(missed).text().plain == "0.253 >  0.250"
    wide = missed.model_copy(update={"heads": (16, 48)})
    assert chain_verdict(wide).bar == pytest.approx(0.2625)
    assert chain_verdict(met.model_copy(update={"batch": 7})).bar is None
    assert chain_verdict(met.model_copy(update={"rows": 15})) is None
    assert floor_verdict(record(rows=40, floor_us=8.0)).bar == 1.5
    assert floor_verdict(record(rows=40, batch=8, floor_us=8.0)).bar is None


def test_peers_are_set_beside_the_faster_of_ours():
    records = [
        record("peer", "flashinfer ucache", us=5.0),
        record("peer", "sglang replay", us=9.0, with_commit=True),
        record("peer", "sglang replay", us=9.0, with_commit=True, state_dtype="float32"),
        record("verify", "triton", us=6.0),
        record("verify", "cuda", us=4.0),
        record("reconstruct", "cuda", us=7.0, with_commit=True),
        record("deferred", "cuda", us=8.0, with_commit=True, state_dtype="float32"),
    ]
    assert [(peer.impl, ours.case, ours.us) for peer, ours in rivals(records)] == [
        ("flashinfer ucache", "verify", 4.0),
        ("sglang replay", "reconstruct", 7.0),
        ("sglang replay", "deferred", 8.0),
    ]


def test_summary_counts_the_limits():
    told = summary(results(complete=False))
    assert "A GPU, driver 1, 2026-01-02" in told
    assert "copy 4.00 TB/s" in told
    assert "24 of 48 limits" in told
    assert "the budget ended" in told


def test_show_prints_and_plots(tmp_path):
    results().write(tmp_path / "run.json")
    done = run("--show", tmp_path / "run.json", "--plot", tmp_path / "figure.png")
    assert done.exit_code == 0, done.output
    assert "vLLM us" in done.output
    assert "the package sglang is not installed" in done.output
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {r.impl for r in best_verify(results().records)} == {"cuda"}


def test_a_figure_of_nothing(tmp_path):
    results([]).write(tmp_path / "run.json")
    assert run("--show", tmp_path / "run.json", "--plot", tmp_path / "figure.svg").exit_code == 0


def test_a_failed_check_is_a_failure(tmp_path):
    results(checks=[check(error=0.5)]).write(tmp_path / "run.json")
    assert run("--show", tmp_path / "run.json").exit_code == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    done = run("--quick")
    assert done.exit_code == 2
    for words in ("no CUDA device", "--show FILE"):
        assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--table", "everything"], ["--table everything is unknown", "chain, conv"]),
        (["--batch", 0], ["--batch 0 is out of range", "1 or more"]),
        (["missing/run.json"], ["missing/run.json cannot be written", "folder does not exist"]),
        (["--table", "chain", "--skip", "vllm", "--skip", "cuda", "--skip", "triton"], ["leaves nothing to run"]),
        (["--show", "missing.json"], ["missing.json cannot be read"]),
        (["out.json", "--show", "run.json"], ["both out.json and --show run.json"]),
    ],
)
def test_refusals(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    for word in words:
        assert word in done.stderr


def test_files_that_hold_something_else(tmp_path):
    (tmp_path / "other.json").write_text('{"records": []}')
    refused = run("--show", tmp_path / "other.json").stderr
    assert "holds no results of this benchmark (command: Field required)" in refused
    assert "give a file that `treewy bench kernels` wrote" in refused


@pytest.mark.parametrize("name", ["figure.unknown", "figure", "missing/figure.png"])
def test_a_figure_that_cannot_be_written_is_refused_before_anything_is_printed(tmp_path, name):
    results().write(tmp_path / "run.json")
    for arguments in (["--show", tmp_path / "run.json"], ["--quick"]):
        done = run(*arguments, "--plot", tmp_path / name)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{name} cannot be written" in done.stderr


def test_a_figure_without_matplotlib(tmp_path, monkeypatch):
    results().write(tmp_path / "run.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("--show", tmp_path / "run.json", "--plot", tmp_path / "figure.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "treewy: error: --plot needs matplotlib: pip install 'treewy[plot]'\n"


def test_a_commit_is_listed_once():
    both = [record("commit", us=us, with_commit=True) for us in (1.0, 2.0)]
    others = [record("commit", rows=15, with_commit=True), record("commit", state_dtype="float32", with_commit=True)]
    (table,) = tables(results([*both, *others], checks=[], refused=[]))
    assert table.row_count == 3
    assert list(table.columns[5].cells) == ["1.00", "10.00", "10.00"]


def test_missing_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "treewy.bench.command", None)
    monkeypatch.delattr("treewy.bench.command", raising=False)
    assert "pip install 'treewy[bench]'" in run("--quick").stderr


def test_a_narrow_terminal_loses_nothing(tmp_path):
    file = tmp_path / "kernels.json"
    file.write_text(results().model_dump_json())
    narrow, wide = (run("--show", file, columns=columns).output.split() for columns in (60, 200))
    assert narrow == wide
    assert not any("…" in word for word in narrow)
