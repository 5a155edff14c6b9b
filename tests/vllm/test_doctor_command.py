"""The command `treewy doctor`, as one types it."""

import pytest
from typer.testing import CliRunner

from treewy.cli import EXIT_REFUSED, app
from treewy.vllm import hooks

SERVER = ["--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--block-size", "32"]
MTP = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_engine_alone() -> None:
    result = doctor()
    assert result.exit_code == 0
    assert f"all {len(hooks.HOOKS)} found" in result.stdout
    assert "verdict  ready; give the arguments" in result.stdout


def test_a_server(checkpoint) -> None:
    result = doctor(str(checkpoint), *SERVER, *MTP, "--kv-cache-gib", "1")
    assert result.exit_code == 0
    for line in ("runner   V2", "model    Qwen3_5ForCausalLM, 3 GDN and 2", "window   4 rows", "verdict  ready"):
        assert line in result.stdout
    assert "deferred *" in result.stdout


def test_what_to_change(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor(str(checkpoint), *SERVER)
    assert result.exit_code == EXIT_REFUSED
    assert "change   the server does not speculate" in result.stdout
    monkeypatch.setattr(hooks, "version", lambda name: "0.31.0")
    result = doctor()
    assert result.exit_code == EXIT_REFUSED
    assert "hooks    missing" in result.stdout
    assert "change   this is vllm 0.31.0" in result.stdout


def test_what_is_out_of_range() -> None:
    result = doctor("--kv-cache-gib", "0")
    assert result.exit_code == EXIT_REFUSED
    assert "give more than 0" in result.stderr
