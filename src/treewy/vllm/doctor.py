"""What `treewy doctor` finds out: engine, hooks, and what a server's settings mean for memory and concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from math import ceil
from typing import Any, NoReturn, get_args

from treewy.state import CommitMode, StateSpec
from treewy.vllm import hooks
from treewy.vllm.options import CHAINS, KEY, Options, no_chain, refusals, unsplit_heads
from treewy.vllm.running import IN_BLOCK, state_spec


@dataclass(frozen=True)
class Holding:
    """What one running request holds in one mode, on one rank, in bytes."""

    mode: CommitMode
    blocks: int
    """Recurrent states a GDN layer keeps."""
    states: int
    """All of them, convolution inputs included."""
    running: int
    """Window and pending rows beside them, allocated for `max_num_seqs` requests."""
    concurrency: int | None
    """Requests of the given context that fit; None where the memory for the cache is not known."""


@dataclass(frozen=True)
class Engine:
    """The installed engine."""

    name: str | None
    hooks: int
    problems: list[str]


@dataclass(frozen=True)
class Server:
    """A server with the settings in question."""

    mode: CommitMode
    runner: str
    architecture: str
    gdn_layers: int
    attention_layers: int
    prefix_caching: bool
    window: int
    """Rows, root included."""
    requested: int
    """max_num_seqs."""
    context: int
    holdings: list[Holding]
    problems: list[str]


def engine() -> Engine:
    """The engine that is installed, and what of it is missing."""
    return Engine(hooks.engine(), len(hooks.HOOKS), hooks.unsupported())


def settings(arguments: Sequence[str]) -> Any:
    """The arguments of `vllm serve` as vLLM parses them; nothing is looked up yet.

    Args:
        arguments: as after `vllm serve`, the model first or as --model.

    Raises:
        ValueError: settings that vLLM does not know, or no model.
    """
    with _one_line():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = AsyncEngineArgs.add_cli_args(_with_front_end(FlexibleArgumentParser()))
        parser.set_defaults(model=None)  # vLLM has a model of its own
        parser.error = _refuse  # instead of all options and an exit
        model = [] if not arguments or arguments[0].startswith("-") else ["--model", arguments[0]]
        parsed = parser.parse_args([*model, *arguments[len(model) // 2 :]])
        if not parsed.model:
            raise ValueError("there is no model: give the model first, as to `vllm serve`")
        return parsed


def _with_front_end(parser: Any) -> Any:
    """Options of the server itself, such as --port, which the engine does not know."""
    for place in ("common", "launchers"):  # of vLLM 0.33, 0.32
        with suppress(ImportError):
            return import_module(f"vllm.entrypoints.{place}.cli_args").FrontendArgs.add_cli_args(parser)
    return parser


def server(settings: Any, *, cache_bytes: int | None, context: int | None) -> Server:
    """What settings lead to; no weights are loaded.

    Args:
        settings: as the function of this name gives them.
        cache_bytes: memory for the KV cache on one rank; vLLM logs it at start as "Available KV cache memory".
        context: tokens of a request; default the model's longest.

    Raises:
        ValueError: settings that vLLM or TreeWY does not know, or a model that vLLM cannot load.
    """
    with _one_line(settings):
        from vllm.engine.arg_utils import EngineArgs

        engine_args = EngineArgs.from_cli_args(settings)
    additional = dict(engine_args.additional_config or {})
    options = Options.of(additional) or Options()
    # vLLM's configuration is made without TreeWY, which would refuse what is to be reported.
    engine_args.additional_config = {name: value for name, value in additional.items() if name != KEY}
    with _one_line(settings):
        config = engine_args.create_engine_config()
    refused = refusals(config) if config.num_speculative_tokens else unsplit_heads(config)
    problems = list(refused)
    if not config.num_speculative_tokens:
        problems.append("the server does not speculate: add --speculative-config")
    text = config.model_config.hf_text_config
    kinds = list(getattr(text, "layer_types", []))
    align = config.cache_config.mamba_cache_mode == "align"
    attention = kinds.count("full_attention") + (1 if config.num_speculative_tokens else 0)
    context = context or config.model_config.max_model_len
    holdings = []
    if "linear_attention" in kinds and not refused:
        for mode in get_args(CommitMode):
            holdings.append(_holding(config, options, mode, attention, context, align, cache_bytes))
        asked = next(holding for holding in holdings if holding.mode == options.mamba_state_commit)
        problems.extend(_too_few(config, asked, context))
    return Server(
        mode=options.mamba_state_commit,
        runner="V2" if config.use_v2_model_runner else "V1",
        architecture=config.model_config.architecture,
        gdn_layers=kinds.count("linear_attention"),
        attention_layers=attention,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        window=1 + config.num_speculative_tokens,
        requested=config.scheduler_config.max_num_seqs,
        context=context,
        holdings=holdings,
        problems=problems,
    )


@contextmanager
def _one_line(settings: Any = None) -> Iterator[None]:
    """What vLLM says about settings it cannot take, in whichever way it fails, as a ValueError of one line.

    Args:
        settings: whose configuration is made.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        speculative = getattr(settings, "speculative_config", None) or {}
        reason = _reason(error)
        if isinstance(error, OSError):
            models = " or ".join(filter(None, (getattr(settings, "model", None), speculative.get("model"))))
            reason = reason.rstrip(".")
            reason = f"{models or 'a file'} cannot be loaded ({reason}); give the folder of a model, or a hub name"
        elif isinstance(error, ImportError) and (method := speculative.get("method", CHAINS[0])) not in CHAINS:
            reason = no_chain(method)
        raise ValueError(reason) from error


def _reason(error: Exception) -> str:
    """The line that says what is wrong: of pydantic's several its own, of another error the first."""
    text = str(error)
    if callable(details := getattr(error, "errors", None)):
        first = details()[0]
        where = "" if first["type"] == "value_error" else ".".join(map(str, first["loc"]))
        text = f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _holding(
    config: Any, options: Options, mode: CommitMode, attention: int, context: int, align: bool, cache_bytes: int | None
) -> Holding:
    spec = state_spec(config, Options(mode if mode != "store_all" else "reconstruct", options.history_rows))
    pieces = spec.bytes_by_piece()
    block = sum(pieces[name] for name in IN_BLOCK)
    drafts = config.num_speculative_tokens
    if mode == "store_all":
        rows = drafts * spec.layers.conv_dim * spec.input_dtype.itemsize * spec.num_layers
        block, blocks, running = block + rows, 1 + drafts, 0
    else:
        blocks, running = 1, spec.bytes_per_request - block
    blocks += align  # the block that the request moved on from
    holding = Holding(mode, blocks, blocks * block, running, None)
    if cache_bytes is None:
        return holding
    per_request = _pool_bytes(config, spec, block // spec.num_layers, blocks, attention, context)
    left = cache_bytes - running * config.scheduler_config.max_num_seqs
    return Holding(mode, blocks, holding.states, running, max(0, left) // per_request)


def _pool_bytes(config: Any, spec: StateSpec, state: int, blocks: int, attention: int, context: int) -> int:
    """Of a request: vLLM gives states and attention pages of one size, the larger of both needs."""
    model, parallel = config.model_config, config.parallel_config
    per_token: int = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    smallest = config.cache_config.block_size or 16
    block_size = smallest * ceil(max(state, 1) / (smallest * per_token))
    return (spec.num_layers * blocks + attention * ceil(context / block_size)) * block_size * per_token


def _too_few(config: Any, holding: Holding, context: int) -> list[str]:
    requested = config.scheduler_config.max_num_seqs
    if holding.concurrency is None or holding.concurrency >= requested:
        return []
    return [
        f"--max-num-seqs asks for {requested} requests, but {holding.concurrency} of {context} tokens fit: lower it to "
        f"{holding.concurrency}, shorten --max-model-len, or give the cache more memory"
    ]
