"""The command line: `treewy generate`, `treewy bench kernels`, `treewy doctor`."""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from treewy import __version__
from treewy.model import MODEL_DIR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewy.generation import Statistics
    from treewy.state import StateSpec
    from treewy.transformers import Run, SpeculativeDecoder
    from treewy.vllm.doctor import Engine, Server

EXAMPLE_PROMPT = '''\
class Stack:
    """A last-in, first-out collection of items."""

    def __init__(self):
        self.items = []

    def push(self, item):'''

MAX_DRAFT_NODES = 63  # of a window; `treewy.tree` would tell, but loads torch
# As in `treewy.state` and `treewy.transformers`, which load torch.
CommitMode = Literal["store_all", "reconstruct", "deferred"]
DrafterName = Literal["mtp", "ngram", "model"]

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="treewy",
    help="Speculative decoding of Gated DeltaNet hybrid language models, chains and trees, without state snapshots.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure this package on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class Refusal(Exception):
    """A request that cannot be served; the message names the value, the limit and the mend."""


# Options


def _print_version(asked: bool) -> None:
    if asked:
        print(f"treewy {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(no_args_is_help=False)
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Text to continue; - reads it from stdin. Default: a short example."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a GDN model. Default: the small model that treewy ships.")
    ] = None,
    widths: Annotated[
        str | None, typer.Option(help="Tree of fixed shape: children of a node at each depth, such as 3,3,3.")
    ] = None,
    chain: Annotated[int | None, typer.Option(help="Chain of this many draft tokens. Default: 3.")] = None,
    budget: Annotated[
        int | None, typer.Option(help="Tree that grows best first to this many rows, root included.")
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="Deepest draft token of a best-first tree. Default: 6.")] = None,
    mode: Annotated[
        CommitMode,
        typer.Option(help="How accepted tokens reach the recurrent state."),
    ] = "deferred",
    drafter: Annotated[
        DrafterName | None,
        typer.Option(
            help="Who proposes tokens: the model's own MTP head, repetition in the text, or a draft model. "
            "Default: mtp, or model where --draft-model is given."
        ),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a small model with the same tokenizer.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling. Default: a fresh one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the generation, left out of it; may be repeated.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads. Default: torch's choice, but 1 for the small model that treewy ships."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights; auto is float32 on a CPU and the checkpoint's own elsewhere."),
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda. Default: cuda where there is one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Do not measure plain decoding for comparison.")
    ] = False,
) -> None:
    """Continue a text with draft trees, and show what that gains over plain decoding and what state it takes."""
    with _exit_codes():
        _check_range("--chain", chain, MAX_DRAFT_NODES)
        _check_range("--budget", budget, MAX_DRAFT_NODES + 1)
        for option, value in (("--max-depth", max_depth), ("--max-new-tokens", max_new_tokens), ("--threads", threads)):
            _check_range(option, value)
        text = _read_prompt(prompt, file)
        shape = _shape_options(widths, chain, budget, max_depth)
        drafter = _choose_drafter(drafter, draft_model, shape)

        status = Console(stderr=True)
        with _progress(status, "loading") as (bar, task):
            # Threads that wait for each other cost more than they bring where matrices are small.
            _import_engine(1 if threads is None and model is None else threads)
            from treewy.acceptance import SamplingParams
            from treewy.drafting import FixedWidths

            with _refusals():  # What needs no model is refused before one is loaded.
                sampling = SamplingParams(temperature, top_p, top_k, seed)
                FixedWidths(shape.get("draft_tree_widths", ()))
            session = _Session(model, dtype, _device(device))
            decoder, plain = session.decoder(drafter, draft_model, shape, mode), session.plain_decoder(mode)
            ids = session.encode(text)
            with _refusals():
                run = decoder.run([ids], sampling, max_new_tokens, session.stop_rules(stop or []))
            bar.update(task, description="warming up")
            # The first forwards of a process are slow in ways that say nothing about a mode.
            for warmed in (decoder,) if no_baseline else (decoder, plain):
                for _ in warmed.run([ids[:16]], sampling, 4):
                    pass

        report = Report(session.describe(), drafter, asdict(decoder.drafter.shape), mode, len(ids), run)
        write = _no_text if as_json else partial(typer.echo, nl=False)
        try:
            write(typer.style(text, dim=True))
            _stream(report, TextStream(session.decode_tokens, ids, stop or []), write)
            write("\n\n")
            if not no_baseline and report.new_tokens > 1:
                report.baseline = Speed()
                with _progress(status, "plain decoding for comparison", report.new_tokens) as (bar, task):
                    for emitted in timed(plain.run([ids], sampling, report.new_tokens), report.baseline):
                        bar.advance(task, len(emitted))
        except KeyboardInterrupt:
            report.interrupted = True
        if as_json:
            print(json.dumps(report.as_json()))
        else:
            for table in report.tables():
                Console().print(table)
        if report.interrupted:
            raise KeyboardInterrupt


@bench.command("kernels", no_args_is_help=False)
def bench_kernels(
    output: Annotated[
        Path | None, typer.Argument(metavar="[OUTPUT]", help="JSON file for the results, kept up to date as it runs.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Time nothing: show the results of an earlier run.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figure, such as kernels.png.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three tables at batch 1 and 64.")] = False,
    table: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only this table: chain, conv, trees, decode, peers, fp32 or heads; may be repeated."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Only this many requests; may be repeated.")] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave out implementations whose name begins so; may be repeated."),
    ] = None,
    budget_seconds: Annotated[float, typer.Option(help="Start nothing further after this time.")] = 300.0,
    workers: Annotated[int | None, typer.Option(help="Processes that compile. Default: cores less two.")] = None,
) -> None:
    """Time the kernels of a GDN layer beside those of vLLM, SGLang and FlashInfer, where these are installed."""
    with _exit_codes():
        if output is not None and show is not None:
            raise Refusal(f"both {output} and --show {show} were given; give one of them")
        try:
            from treewy.bench import command
        except ModuleNotFoundError as error:
            raise Refusal(f"{error}; bench needs the extra: pip install 'treewy[bench]'") from error
        with _refusals():
            command.check_figure(plot)
            if show is not None:
                results = command.read(show)
            else:
                results = command.measure(
                    output, table or [], batch or [], skip or [], Console(stderr=True), quick=quick,
                    budget_seconds=budget_seconds, workers=workers,
                )  # fmt: skip
            command.show(results, Console(), plot)
        if command.failed(results):
            raise typer.Exit(EXIT_FAILED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    arguments: typer.Context,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="Memory for the KV cache per GPU; vLLM logs it as 'Available KV cache memory'."),
    ] = None,
    request_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a request, prompt included. Default: the longest the server takes.")
    ] = None,
) -> None:
    """Look at vLLM and a server's settings: what works, what a request holds, how many fit, what to change.

    Give the arguments of `vllm serve`, model first; without them only the engine is looked at.
    """
    with _exit_codes():
        _check_range("--request-tokens", request_tokens)
        if kv_cache_gib is not None and kv_cache_gib <= 0:
            raise Refusal(f"--kv-cache-gib {kv_cache_gib} is out of range; give more than 0")
        from treewy.vllm import doctor as diagnosis

        engine, server = diagnosis.engine(), None
        problems = list(engine.problems)
        if arguments.args and not problems:
            cache_bytes = None if kv_cache_gib is None else int(kv_cache_gib * 2**30)
            with _refusals():
                settings = diagnosis.settings(arguments.args)
                if "://" not in settings.model:  # vLLM loads from object stores too
                    _check_exists("the model", settings.model)
                server = diagnosis.server(settings, cache_bytes=cache_bytes, context=request_tokens)
            problems += server.problems
        _show_diagnosis(Console(), engine, server, problems)
        if problems:
            raise typer.Exit(EXIT_REFUSED)


def _stream(report: "Report", stream: "TextStream", write: Callable[[str], None]) -> None:
    """Runs to the end, or to an interruption, which still shows all text and is raised again."""
    try:
        for emitted in timed(report.run, report.speed):
            write(stream.add(emitted))
        report.finish_reason = str(report.run.requests[0].finish_reason)
    finally:
        write(stream.end())
        report.text = stream.text
        if report.finish_reason is None:
            write("\n\n")


def _no_text(text: str) -> None:
    pass


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        print(f"treewy: error: {refusal}", file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        print("treewy: interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def _refusals(hint: str = "") -> Iterator[None]:
    """What the library refuses is refused here; its messages already name value, limit and mend."""
    try:
        yield
    except ValueError as error:
        raise Refusal(f"{error}{hint}") from error


@contextmanager
def _progress(console: Console, description: str, total: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task(description, total=total)


def _check_range(option: str, value: int | None, most: int | None = None) -> None:
    if value is not None and (value < 1 or (most is not None and value > most)):
        limit = (
            "1 or more"
            if most is None
            else f"from 1 to {most}, because a window has at most {MAX_DRAFT_NODES + 1} rows"
        )
        raise Refusal(f"{option} {value} is out of range; give {limit}")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt; an editor or `echo` ends a text with a newline, which is not part of it."""
    if prompt is not None and file is not None:
        raise Refusal(f"both PROMPT and --file {file} were given; give one of them")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise Refusal(f"--file {file} cannot be read: {reason}; give a readable text file") from error
    elif prompt == "-":
        text = sys.stdin.read().removesuffix("\n")
    else:
        text = EXAMPLE_PROMPT if prompt is None else prompt
    if not text:
        raise Refusal("the prompt is empty; give at least one character as PROMPT, in --file, or on stdin with -")
    return text


def _shape_options(widths: str | None, chain: int | None, budget: int | None, max_depth: int | None) -> dict[str, Any]:
    """The tree's shape as arguments of `SpeculativeDecoder`."""
    given = [
        f"{name} {value}"
        for name, value in (("--widths", widths), ("--chain", chain), ("--budget", budget))
        if value is not None
    ]
    if len(given) > 1:
        raise Refusal(f"{' and '.join(given)} exclude each other: a draft has one shape; give one of them")
    if max_depth is not None and (widths is not None or chain is not None):
        raise Refusal(f"--max-depth {max_depth} belongs to a best-first tree; {given[0]} has its depth: leave it out")
    if chain is not None:
        return {"draft_tree_widths": (1,) * chain}
    if widths is not None:
        try:
            return {"draft_tree_widths": tuple(int(width) for width in widths.split(","))}
        except ValueError:
            raise Refusal(f"--widths {widths!r}: it is a list of whole numbers with commas, such as 3,3,3") from None
    return {
        name: value
        for name, value in (("draft_tree_budget", budget), ("max_draft_depth", max_depth))
        if value is not None
    }


def _choose_drafter(drafter: DrafterName | None, draft_model: str | None, shape: dict[str, Any]) -> DrafterName:
    if drafter is None:
        drafter = "mtp" if draft_model is None else "model"
    if drafter == "model" and draft_model is None:
        raise Refusal("--drafter model needs --draft-model NAME, a small model with the same tokenizer")
    if drafter != "model" and draft_model is not None:
        raise Refusal(f"--drafter {drafter} takes no --draft-model {draft_model}; leave one of them out")
    if drafter == "ngram" and "draft_tree_widths" in shape:
        raise Refusal(
            "--drafter ngram grows its trees best first and takes no fixed shape; give --budget ROWS and --max-depth D "
            "instead of --widths or --chain"
        )
    return drafter


def _import_engine(threads: int | None) -> None:
    try:
        import torch
        from transformers.utils import logging

        import treewy.transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refusal(f"{error}; generate needs the extra: pip install 'treewy[transformers]'") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise Refusal(f"--device {name} cannot be used here ({reason}); use --device cpu") from error
    return name


def _check_exists(option: str, name: str) -> None:
    """A name that can only be a path must be there; other names may be the hub's."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().exists():
        raise Refusal(f"{option} {name} does not exist; give the folder of a model, or a hub name such as owner/name")


# Model and runs


class _Session:
    """A loaded model with its tokenizer.

    Args:
        name: folder or hub name; None for the shipped model.
        dtype: of the weights, or "auto".
        device: where the model runs.
    """

    def __init__(self, name: str | None, dtype: str, device: str) -> None:
        self._name, self._dtype, self._device = name, dtype, device
        self.model, self.tokenizer = self._load("--model", name or str(MODEL_DIR))

    def _load(self, option: str, name: str) -> "tuple[PreTrainedModel, Any]":
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        path = Path(name).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise Refusal(f"{option} {name} is no model: the folder has no config.json; give one that has")
            what = "cannot be loaded"
        elif path.exists():
            raise Refusal(f"{option} {name} is a file; give the folder that holds config.json and the weights")
        else:
            _check_exists(option, name)
            what = "is neither a folder here nor a model that the hub gives"
        dtype = self._dtype
        if dtype == "auto" and self._device == "cpu":
            dtype = "float32"  # Few CPUs multiply 16-bit numbers fast.
        source = str(path) if path.is_dir() else name
        try:
            config = AutoConfig.from_pretrained(source)
            layers = getattr(config.get_text_config(), "layer_types", None) or []
            if option == "--model" and "linear_attention" not in layers:  # before a hub sends gigabytes
                raise Refusal(
                    f"{option} {name} has no GDN layer (it is a {config.model_type} model): its KV cache can be "
                    "cut back, so it needs no TreeWY; give a Qwen3-Next, Qwen3.5 or OLMo-Hybrid checkpoint"
                )
            tokenizer = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
            model.to(self._device)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Refusal(
                f"{option} {name} {what} ({reason}); give a Hugging Face checkpoint of a GDN model"
            ) from error
        return model.eval(), tokenizer

    def decoder(
        self,
        drafter: DrafterName,
        draft_model: str | None,
        shape: dict[str, Any],
        mode: CommitMode,
    ) -> "SpeculativeDecoder":
        from treewy.transformers import SpeculativeDecoder

        draft = None
        if draft_model is not None:
            draft, tokenizer = self._load("--draft-model", draft_model)
            if tokenizer.get_vocab() != self.tokenizer.get_vocab():
                raise Refusal(
                    f"--draft-model {draft_model} has another tokenizer ({len(tokenizer)} entries against "
                    f"{len(self.tokenizer)}); give a draft model that shares the model's"
                )
        hint = " (--drafter ngram, or --draft-model NAME)" if drafter == "mtp" else ""
        with _refusals(hint):
            return SpeculativeDecoder(self.model, drafter, draft_model=draft, mamba_state_commit=mode, **shape)

    def plain_decoder(self, mode: CommitMode) -> "SpeculativeDecoder":
        from treewy.transformers import SpeculativeDecoder

        return SpeculativeDecoder(self.model, "none", mamba_state_commit=mode)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def decode_tokens(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stop_rules(self, strings: list[str]) -> Any:
        from treewy.transformers import StopRules

        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.eos_token_id
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return StopRules(ids, strings, self.tokenizer)

    def describe(self) -> dict[str, Any]:
        """What was measured on what."""
        import torch
        import transformers

        return {
            "model": self._name or "the shipped model",
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "threads": torch.get_num_threads(),
            "treewy": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }


@dataclass
class Speed:
    """Time of one run; the prefill and what the reader of the tokens does are not part of the decoding time."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded_tokens: int = 0
    """Tokens after the first, which is the prefill's."""

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first round."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else None


def timed(run: "Run", speed: Speed) -> Iterator[list[int]]:
    """Tokens of a run of one sequence as its rounds emit them; `speed` is kept up to date."""
    rounds = iter(run)
    began = perf_counter()
    for steps in rounds:
        seconds, tokens = perf_counter() - began, steps[0].emitted
        if speed.prefill_seconds:
            speed.decode_seconds += seconds
            speed.decoded_tokens += len(tokens)
        else:
            speed.prefill_seconds = seconds
        yield tokens
        began = perf_counter()


class TextStream:
    """Text of tokens as they come: whole characters, and nothing of a stop string.

    Args:
        decode: tokens to text.
        prompt: what comes before; its end decides how the first new token is spelled.
        stops: strings that end the text and are left out of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int], stops: list[str]) -> None:
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._context = prompt[-8:]
        self._start = len(decode(self._context))
        self._tokens: list[int] = []
        self._shown = 0
        self.text = ""
        """All text so far, also what is still held back."""

    def add(self, tokens: list[int]) -> str:
        """Text that is certain now and was not before."""
        self._tokens += tokens
        self.text = self._decode(self._context + self._tokens)[self._start :]
        cuts = [place for stop in self._stops if (place := self.text.find(stop)) >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        certain = len(self.text.rstrip("\ufffd"))  # The rest of a character may be in the next token.
        for stop in self._stops:
            for length in range(min(len(stop) - 1, certain), 0, -1):
                if self.text.endswith(stop[:length], 0, certain):
                    certain -= length
                    break
        return self._show(certain)

    def end(self) -> str:
        """What was held back."""
        return self._show(len(self.text))

    def _show(self, upto: int) -> str:
        new = self.text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return new


# What is shown


@dataclass
class Report:
    """What a run did: text, speed against plain decoding, acceptance, and bytes of recurrent state."""

    machine: dict[str, Any]
    drafter: str
    shape: dict[str, Any]
    mode: str
    prompt_tokens: int
    run: "Run"
    speed: Speed = field(default_factory=Speed)
    baseline: Speed | None = None
    finish_reason: str | None = None
    """None where the run was interrupted before its end."""
    interrupted: bool = False
    text: str = ""

    @property
    def statistics(self) -> "Statistics":
        """Of the speculative run."""
        return self.run.statistics

    @property
    def new_tokens(self) -> int:
        """Tokens generated, the prefill's included."""
        return self.speed.decoded_tokens + (1 if self.speed.prefill_seconds else 0)

    @property
    def speedup(self) -> float | None:
        """Tokens per second over plain decoding's; None where one of them was not measured."""
        mine = self.speed.tokens_per_second
        plain = self.baseline.tokens_per_second if self.baseline else None
        return mine / plain if mine and plain else None

    def state_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of recurrent state per sequence, by piece, of this mode and of store_all."""
        assert self.run.target.state is not None
        spec: StateSpec = self.run.target.state.spec
        return {mode: replace(spec, mode=mode).bytes_by_piece() for mode in dict.fromkeys((spec.mode, "store_all"))}

    def as_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        speed, statistics = self.speed, self.statistics
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "interrupted": self.interrupted,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "drafter": self.drafter,
            "shape": self.shape,
            "mamba_state_commit": self.mode,
            "tokens_per_second": speed.tokens_per_second,
            "baseline_tokens_per_second": self.baseline.tokens_per_second if self.baseline else None,
            "speedup": self.speedup,
            "prefill_seconds": speed.prefill_seconds,
            "decode_seconds": speed.decode_seconds,
            "seconds_by_phase": statistics.seconds,
            "rounds": statistics.rounds,
            "rows": statistics.rows,
            "acceptance_length": statistics.acceptance_length,
            "acceptance_per_depth": statistics.per_depth,
            "state_bytes_per_sequence": self.state_bytes(),
            "machine": self.machine,
        }

    def tables(self) -> Iterator[Table]:
        """The same for people."""
        yield self._decoding()
        yield self._state()

    def _decoding(self) -> Table:
        machine, statistics = self.machine, self.statistics
        table = Table(title="Decoding", title_justify="left", caption_justify="left")
        for name in ("", "tokens/s", "speed-up", "tokens a round", "rows a round"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        if self.baseline:
            table.add_row("plain", _number(self.baseline.tokens_per_second), "1.00", "1.00", "1.0")
        rows = statistics.rows / statistics.windows if statistics.windows else None
        accepted = statistics.acceptance_length if statistics.windows else None
        table.add_row(
            f"{self.mode}, {self.drafter}",
            _number(self.speed.tokens_per_second),
            _number(self.speedup, 2),
            _number(accepted, 2),
            _number(rows),
        )
        depths = " ".join(f"{share:.2f}" for share in statistics.per_depth) or "-"
        end = self.finish_reason or "interruption"
        table.caption = (
            f"accepted at depth 1, 2, ...: {depths}\n"
            f"{self.new_tokens} tokens after a prompt of {self.prompt_tokens}, ended by: {end}\n"
            f"{machine['model']}, {machine['dtype']} on {machine['device']}, {machine['threads']} threads, "
            f"torch {machine['torch']}"
        )
        return table

    def _state(self) -> Table:
        by_mode = self.state_bytes()
        table = Table(title="Recurrent state per sequence", title_justify="left", show_footer=True)
        table.add_column("", "all")
        for mode, pieces in by_mode.items():
            table.add_column(mode, _size(sum(pieces.values())), justify="right")
        for piece in dict.fromkeys(piece for pieces in by_mode.values() for piece in pieces):
            table.add_row(piece, *(_size(pieces[piece]) if piece in pieces else "" for pieces in by_mode.values()))
        return table


def _show_diagnosis(console: Console, engine: "Engine", server: "Server | None", problems: list[str]) -> None:
    missing = "missing" if engine.problems else f"all {engine.hooks} found"
    lines = [("engine", engine.name or "none"), ("hooks", missing)]
    if server is not None:
        layers = f"{server.gdn_layers} GDN and {server.attention_layers} attention layers"
        caching = f"prefix caching {'on' if server.prefix_caching else 'off'}"
        lines += [
            ("runner", server.runner),
            ("model", f"{server.architecture}, {layers}"),
            ("window", f"{server.window} rows; {caching}"),
        ]
    lines += [("change", problem) for problem in problems]
    if not problems:
        lines.append(("verdict", "ready" if server else "ready; give the arguments of `vllm serve` for more"))
    for name, text in lines:
        console.print(f"{name:8} {text}", highlight=False, markup=False, soft_wrap=True)
    if server is not None and server.holdings:
        console.print(_holdings(server))


def _holdings(server: "Server") -> Table:
    """What a request holds by mode, as a table."""
    title = f"A request of {server.context} tokens, of {server.requested} at once"
    table = Table(title=title, title_justify="left")
    for name in ("mamba_state_commit", "states", "in blocks", "beside them", "requests that fit"):
        table.add_column(name, justify="left" if name == "mamba_state_commit" else "right")
    for holding in server.holdings:
        name = f"{holding.mode} *" if holding.mode == server.mode else holding.mode
        fit = "--kv-cache-gib?" if holding.concurrency is None else str(holding.concurrency)
        table.add_row(name, str(holding.blocks), _size(holding.states), _size(holding.running), fit)
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
