"""The command `treewy doctor`, as one types it."""

import logging

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
    front_end = ["--port", "8000", "--api-key", "secret", "--enable-log-requests"]
    result = doctor(str(checkpoint), *SERVER, *MTP, *front_end, "--kv-cache-gib", "1")
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


DRAFT = '{"method": "draft_model", "model": "NoSuch/Draft", "num_speculative_tokens": 3}'
SUFFIX = ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}']


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (MTP, "there is no model: give the model first, as to `vllm serve`"),
        (["/nonexistent/model", *MTP], "the model /nonexistent/model does not exist; give the folder of a model, or a"),
        (["--model", "./none", *MTP], "the model ./none does not exist; give the folder of a model, or a hub name"),
        (["NoSuch/Model", *MTP], "NoSuch/Model cannot be loaded ("),
        (["FOLDER", *MTP], "Invalid repository ID or local directory specified: "),
        (["MODEL", "--nonsense", "4"], "unrecognized arguments: --nonsense 4"),
        (["MODEL", "--max-model-len", "many"], "argument --max-model-len: "),
        (["MODEL", "--speculative-config", '{"methot": "mtp"}'], "methot: "),
        (["MODEL", "--speculative-config", DRAFT], "'NoSuch/Draft'"),
        (["MODEL", *SUFFIX], "the speculative method is suffix; use one of mtp, "),
        (["MODEL", *MTP, "--tensor-parallel-size", "3"], "must be divisible by tensor parallel size (3)"),
        (["MODEL", *MTP, "--additional-config", '{"treewy": {"mode": 1}}'], "treewy: unknown setting 'mode'"),
    ],
)
def test_common_mistakes_are_refused_in_one_line(
    checkpoint, tmp_path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """Whatever vLLM raises, and however much it says."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # vLLM may log to the stderr of a test before
    places = {"MODEL": str(checkpoint), "FOLDER": str(tmp_path)}
    result = doctor(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == EXIT_REFUSED, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("treewy: error: ")]
    assert said in line
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no such file\nmuch more"), "MODEL or a/draft cannot be loaded (no such file); give the folder"),
        (ImportError("a library is required"), "a library is required"),
        (RuntimeError("\nFailed to infer device type\nmuch more"), "Failed to infer device type"),
    ],
)
def test_whatever_vllm_raises_is_one_line(checkpoint, monkeypatch, error: Exception, said: str) -> None:
    def fail(self) -> None:
        raise error

    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs.create_engine_config", fail)
    draft = '{"method": "draft_model", "model": "a/draft", "num_speculative_tokens": 3}'
    result = doctor(str(checkpoint), "--speculative-config", draft)
    assert result.exit_code == EXIT_REFUSED
    assert result.stderr.startswith(f"treewy: error: {said.replace('MODEL', str(checkpoint))}")
    assert len(result.stderr.splitlines()) == 1
