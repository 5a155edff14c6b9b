"""`treewy generate` on a tiny random model that is written to disk once, in the terminal's place through CliRunner.

The model reads and writes single characters, so any text of its alphabet is a prompt. As a draft model it is its own
perfect drafter: every draft is accepted, which the acceptance figures must show. One test runs the real program and
interrupts it with SIGINT.
"""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner, Result

import treewy.cli as cli
from tests.transformers.tiny_models import VOCAB, tiny_model
from treewy import __version__
from treewy.transformers import MTPHead

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;()[]{}_=+-*/'\"?!#@&"
assert len(ALPHABET) == VOCAB


def save(model: PreTrainedModel, folder: Path, alphabet: str = ALPHABET) -> None:
    """Model and character tokenizer as a checkpoint folder."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(folder)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an MTP head."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3_5")
    save(model, folder)
    head = MTPHead.random(model, seed=1)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"mtp.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without an MTP head."""
    folder = tmp_path_factory.mktemp("headless")
    save(tiny_model("qwen3_5"), folder)
    return folder


@pytest.fixture(autouse=True)
def same_threads():
    """--threads holds for the process, and here that is the test's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["generate", *map(str, arguments)], input=text)


def run_json(*arguments: object, text: str | None = None) -> dict:
    result = run(*arguments, "--json", text=text)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: object, text: str | None = None) -> str:
    """The message of a run that must be refused: one line, no traceback, nothing on stdout."""
    result = run(*arguments, text=text)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("treewy: error: ")
    return lines[0]


# What it prints


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"treewy {__version__}\n")


def test_text_then_tables(folder: Path) -> None:
    result = run("abc", "--model", folder, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.stderr
    text, _, tables = result.stdout.partition("\n\nDecoding")
    assert text.startswith("abc")
    assert len(text) == len("abc") + 12
    for word in (
        "tokens/s",
        "speed-up",
        "plain",
        "deferred, mtp",
        "accepted at depth",
        "Recurrent state",
        "checkpoint",
    ):
        assert word in tables
    assert "store_all" in tables


def test_without_baseline(folder: Path) -> None:
    result = run("abc", "--model", folder, "--max-new-tokens", 4, "--no-baseline")
    assert result.exit_code == 0
    assert "plain" not in result.stdout


def test_json_alone_on_stdout(folder: Path) -> None:
    report = run_json("abc", "--model", folder, "--max-new-tokens", 12, "--threads", 1)
    assert (report["prompt_tokens"], report["new_tokens"], report["finish_reason"]) == (3, 12, "length")
    assert len(report["text"]) == 12
    assert report["speedup"] == pytest.approx(report["tokens_per_second"] / report["baseline_tokens_per_second"])
    assert report["machine"]["threads"] == 1
    assert report["shape"] == {"widths": [1, 1, 1]}
    state = report["state_bytes_per_sequence"]
    # One state of 3 layers x 4 heads x 8 x 8 in fp32; store_all holds one for each of the window's four rows.
    assert state["deferred"]["checkpoint"] == 3 * 4 * 8 * 8 * 4
    assert state["store_all"]["snapshots"] == 4 * state["deferred"]["checkpoint"]


def test_greedy_text_is_the_same_for_every_drafter_shape_and_mode(folder: Path) -> None:
    def text(*options: object) -> str:
        return run_json("abcabcab", "--model", folder, "--max-new-tokens", 24, "--no-baseline", *options)["text"]

    expected = text("--chain", 1)
    for options in (
        ["--widths", "3,3,3"],
        ["--widths", "2,2", "--mode", "store_all"],
        ["--budget", 12, "--max-depth", 4, "--mode", "reconstruct"],
        ["--drafter", "ngram"],
        ["--draft-model", folder, "--chain", 4],
    ):
        assert text(*options) == expected, options


def test_a_perfect_drafter_is_accepted_at_every_depth(folder: Path) -> None:
    report = run_json("abc", "--model", folder, "--draft-model", folder, "--chain", 4, "--max-new-tokens", 26)
    assert report["acceptance_length"] == pytest.approx(5)
    assert report["acceptance_per_depth"] == [1.0] * 4
    assert (report["rounds"], report["rows"]) == (5, 25)


def test_state_of_store_all_stands_alone(folder: Path) -> None:
    report = run_json("abc", "--model", folder, "--mode", "store_all", "--max-new-tokens", 3, "--no-baseline")
    assert list(report["state_bytes_per_sequence"]) == ["store_all"]
    assert report["baseline_tokens_per_second"] is None
    assert report["speedup"] is None


def test_one_token_has_no_speed(folder: Path) -> None:
    result = run("abc", "--model", folder, "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert "1 tokens after a prompt of 3" in " ".join(result.stdout.split())


def test_sampling_repeats_with_its_seed(folder: Path) -> None:
    options = ["abc", "--model", folder, "--temperature", 1, "--top-p", 0.95, "--top-k", 20, "--max-new-tokens", 24]
    first, again, other = (run_json(*options, "--no-baseline", "--seed", seed)["text"] for seed in (1, 1, 2))
    assert first == again != other


def test_stop_is_left_out(folder: Path) -> None:
    options = ["abc", "--model", folder, "--max-new-tokens", 24, "--no-baseline"]
    whole = run_json(*options)["text"]
    stop = whole[9:12]
    report = run_json(*options, "--stop", "never there", "--stop", stop)
    assert report["text"] == whole[: whole.index(stop)]
    assert report["finish_reason"] == "stop_string"


def test_16_bit_weights(folder: Path) -> None:
    report = run_json("abc", "--model", folder, "--dtype", "bfloat16", "--max-new-tokens", 4, "--no-baseline")
    assert report["machine"]["dtype"] == "bfloat16"


def test_prompt_from_file_and_stdin(folder: Path, tmp_path: Path) -> None:
    options = ["--model", folder, "--max-new-tokens", 3, "--no-baseline"]
    (tmp_path / "prompt.txt").write_text("abc\n")
    expected = run_json("abc", *options)
    for report in (run_json("--file", tmp_path / "prompt.txt", *options), run_json("-", *options, text="abc\n")):
        assert (report["prompt_tokens"], report["text"]) == (3, expected["text"])


def test_shipped_model() -> None:
    """No options at all: a trained head, whose drafts are mostly accepted."""
    report = run_json("--max-new-tokens", 64)
    assert report["machine"]["model"] == "the shipped model"
    assert report["machine"]["threads"] == 1
    assert report["acceptance_length"] > 2
    assert "self.items.append(item)" in report["text"]


def test_no_prompt_takes_the_example(folder: Path) -> None:
    result = run("--model", folder, "--max-new-tokens", 2, "--no-baseline")
    assert result.stdout.startswith(cli.EXAMPLE_PROMPT)


# What it refuses: every message names the value, the limit and the mend


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chain", 64], ["--chain 64", "1 to 63"]),
        (["--chain", 0], ["--chain 0", "1 to 63"]),
        (["--budget", 65], ["--budget 65", "1 to 64"]),
        (["--max-depth", 0], ["--max-depth 0", "1 or more"]),
        (["--max-new-tokens", 0], ["--max-new-tokens 0", "1 or more"]),
        (["--threads", -1], ["--threads -1", "1 or more"]),
        (["--widths", "3,x"], ["--widths '3,x'", "3,3,3"]),
        (["--widths", "4,4,4"], ["(4, 4, 4)", "85 rows", "at most 64", "smaller widths"]),
        (["--widths", "2,0"], ["(2, 0)", "1 or more"]),
        (["--widths", "2", "--chain", 2], ["--widths 2", "--chain 2", "exclude each other"]),
        (["--chain", 2, "--max-depth", 2], ["--max-depth 2", "--chain 2", "leave it out"]),
        (["--drafter", "ngram", "--chain", 2], ["--drafter ngram", "--budget ROWS"]),
        (["--drafter", "model"], ["--drafter model", "--draft-model NAME"]),
        (["--drafter", "mtp", "--draft-model", "x"], ["--drafter mtp", "--draft-model x"]),
        (["--temperature", -1], ["temperature -1", "use 0"]),
        (["--top-p", 1.5], ["top_p 1.5", "at most 1"]),
        (["--device", "nowhere"], ["--device nowhere", "--device cpu"]),
        (["--file", "missing.txt"], ["PROMPT", "--file missing.txt", "one of them"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_options_that_do_not_fit(folder: Path, options: list[object], words: list[str]) -> None:
    message = refused("abc", "--model", folder, *options)
    for word in words:
        assert word in message


def test_empty_prompt(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    for arguments, text in ([""], None), (["-"], ""), (["--file", tmp_path / "empty.txt"], None):
        assert "the prompt is empty; give" in refused(*arguments, "--model", folder, text=text)


def test_unreadable_prompt_file(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused("--file", tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused("--file", tmp_path / "binary")


def test_prompt_longer_than_the_context(folder: Path) -> None:
    message = refused("a" * 1020, "--model", folder, "--max-new-tokens", 10)
    for word in ("1020 tokens", "10", "1024 positions", "shorten"):
        assert word in message


def test_no_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in refused("abc", "--model", tmp_path / "missing")
    assert "no config.json" in refused("abc", "--model", tmp_path)
    assert "is a file" in refused("abc", "--model", folder / "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    message = refused("abc", "--model", tmp_path)
    assert str(tmp_path) in message
    assert "cannot be loaded" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("abc", "--model", "nobody/nothing")
    assert "nobody/nothing is neither a folder here nor a model that the hub gives" in message


def test_model_without_mtp_head_names_the_other_drafters(headless: Path) -> None:
    message = refused("abc", "--model", headless)
    for word in (str(headless), "no MTP head", "--drafter ngram", "--draft-model NAME"):
        assert word in message
    assert run("abc", "--model", headless, "--drafter", "ngram", "--max-new-tokens", 3).exit_code == 0


def test_model_without_gdn_layer(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
    llama = LlamaConfig(
        **sizes, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    gpt2 = GPT2Config(**sizes, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    for name, model in ("llama", LlamaForCausalLM(llama)), ("gpt2", GPT2LMHeadModel(gpt2)):
        save(model, tmp_path / name)
        assert "has no GDN layer" in refused("abc", "--model", tmp_path / name)


def test_draft_model_with_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    save(tiny_model("qwen3_5"), tmp_path, ALPHABET[::-1])
    message = refused("abc", "--model", folder, "--draft-model", tmp_path)
    assert f"--draft-model {tmp_path} has another tokenizer" in message


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "treewy.transformers", None)
    assert "pip install 'treewy[transformers]'" in refused("abc")


# Interruption


def interrupt_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """Ctrl-C in the given round, counted over the measured runs: the speculative one, then the plain one."""
    timed, left = cli.timed, [rounds]

    def interrupted(*arguments):
        for tokens in timed(*arguments):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            yield tokens

    monkeypatch.setattr(cli, "timed", interrupted)


def test_interrupted_generation_shows_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 3)
    result = run("abc", "--model", folder, "--max-new-tokens", 30, "--json")
    assert result.exit_code == 130
    assert result.stderr == "treewy: interrupted\n"
    report = json.loads(result.stdout)
    assert report["interrupted"]
    assert report["finish_reason"] is None
    assert len(report["text"]) >= 3
    assert report["baseline_tokens_per_second"] is None


def test_interrupted_baseline_keeps_the_generation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 12)  # a perfect drafter needs 6 of them
    options = ["--draft-model", folder, "--chain", 4, "--max-new-tokens", 26]
    result = run("abc", "--model", folder, *options, "--json")
    assert result.exit_code == 130
    report = json.loads(result.stdout)
    assert report["interrupted"]
    assert report["finish_reason"] == "length"
    assert report["speedup"] > 0


def test_interrupted_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._Session, "_load", load)
    result = run("abc", "--model", folder)
    assert result.exit_code == 130
    assert result.stdout == ""


def test_ctrl_c_in_the_real_program(folder: Path) -> None:
    # A test run in the background of a shell inherits that Ctrl-C is ignored; the program is to hear it.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{listens}; from treewy.cli import app; app()", "generate", "abc"]
    options = ["--model", str(folder), "--max-new-tokens", "1000", "--threads", "1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        seen, deadline = b"", monotonic() + 120
        while len(seen) < 30 and monotonic() < deadline:
            if select.select([program.stdout], [], [], 1)[0]:
                seen += os.read(program.stdout.fileno(), 4096)
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=60)
    text, _, tables = (seen + rest).decode().partition("\n\nDecoding")
    assert program.returncode == 130
    assert text.startswith("abc")
    assert 30 <= len(text) < 1003
    assert "ended by: interruption" in " ".join(tables.split())
    assert "Recurrent state" in tables
    assert errors == b"treewy: interrupted\n"


# Text of a stream


def characters(text: str) -> list[int]:
    return list(text.encode())


def from_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_stream_shows_whole_characters() -> None:
    stream = cli.TextStream(from_bytes, characters("x"), [])
    e_acute = characters("é")
    assert [stream.add(e_acute[:1]), stream.add(e_acute[1:]), stream.end()] == ["", "é", ""]


def test_stream_shows_half_a_character_at_its_end() -> None:
    stream = cli.TextStream(from_bytes, characters("x"), [])
    assert [stream.add(characters("aé")[:-1]), stream.end()] == ["a", "\ufffd"]


def test_stream_holds_back_what_may_become_a_stop() -> None:
    stream = cli.TextStream(from_bytes, [], ["END", ""])
    assert [stream.add(characters(part)) for part in ("xE", "y", "EN", "Dz")] == ["x", "Ey", "", ""]
    assert stream.end() == ""
    assert stream.text == "xEy"


def test_stream_end_gives_back_what_was_no_stop() -> None:
    stream = cli.TextStream(from_bytes, [], ["END"])
    assert [stream.add(characters("xEN")), stream.end()] == ["x", "EN"]


def test_stream_spells_the_first_token_in_its_context() -> None:
    words = ["The", "cat"]
    stream = cli.TextStream(lambda tokens: " ".join(words[token] for token in tokens), [0], [])
    assert stream.add([1]) == " cat"


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes(count: int, shown: str) -> None:
    assert cli._size(count) == shown
