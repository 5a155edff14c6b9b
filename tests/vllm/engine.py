"""A vLLM engine inside the test's process, and an oracle for what it writes.

The oracle is the same checkpoint in transformers, in fp32, without a cache: for every token that an engine emitted it
gives how far below the best token's logit that token's was, given all tokens before. An engine in bf16 may pick the
second of two nearly equal tokens; after a fault in the bookkeeping of states it picks tokens far from the best.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime import interpreter

MARGIN = 0.1
"""What bf16 may move between two tokens' logits, in units of the spread of a position's logits over the vocabulary. In
transformers, without an engine, it moves the shipped model's two best by up to 0.06 (a spread of 4.2; 1 400 tokens)."""
STATE_ERROR = 0.05
"""Relative, of states and convolution inputs in bf16 activations. Without a fault they stay below 0.025."""


States = tuple[int, list[torch.Tensor], list[torch.Tensor]]
"""Of a request: committed tokens, and per GDN layer state [HV, dv, dk] and convolution inputs [3, C]."""


class Engine:
    """One vLLM engine; `settings` are vLLM's."""

    def __init__(self, checkpoint: Path, mode: str | None, draft_tokens: int = 3, **settings: Any) -> None:
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": str(checkpoint),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 27,  # filled with zeros at start
            "disable_log_stats": False,
            "seed": 0,
        }
        additional: dict[str, Any] = {}
        if torch.cuda.is_available():
            arguments |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 30}
            additional["gdn_prefill_backend"] = "triton"
        if draft_tokens:
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": draft_tokens}
        if mode is not None:
            additional["treewy"] = {"mamba_state_commit": mode, **settings.pop("treewy", {})}
        arguments |= {"additional_config": additional, **settings}
        if not torch.cuda.is_available():
            from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

            rejection_sampler_utils.tl_rand32 = undrawn
        with uncollected():
            self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.executor = self.core.model_executor
        alone = arguments.get("tensor_parallel_size", 1) == 1
        self.runner = self.executor.driver_worker.worker.model_runner if alone else None
        """None where the workers are processes of their own."""
        self.emitted: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        """Prompt tokens of each request that came from the prefix cache."""
        self._count = 0

    # Requests

    def add(self, prompt: Sequence[int], tokens: int, *, lora: Any = None, **sampling: Any) -> str:
        """Queues a greedy request, with other sampling parameters and an adapter where given; returns its name."""
        from vllm import SamplingParams

        self._count += 1
        name = f"r{self._count}"
        settings = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False} | sampling
        request = {"prompt_token_ids": list(prompt)}
        self.engine.add_request(name, request, SamplingParams(temperature=0, **settings), lora_request=lora)
        self.emitted[name] = []
        return name

    def step(self) -> list[str]:
        """One step of the engine; returns the requests that ended."""
        ended = []
        with unwatched():
            outputs = self.engine.step()
        for output in outputs:
            self.emitted[output.request_id] = list(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens or 0
            if output.finished:
                ended.append(output.request_id)
        return ended

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.engine.has_unfinished_requests())

    def run(self) -> None:
        """Steps until all requests have ended."""
        while self.busy:
            self.step()

    def abort(self, name: str) -> None:
        """Ends a request early, as a client that hangs up does."""
        self.engine.abort_request([name])

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts, started together."""
        names = [self.add(prompt, tokens) for prompt in prompts]
        self.run()
        return [self.emitted[name] for name in names]

    # What there is to see

    def drafts(self) -> tuple[int, int]:
        """Windows verified and draft tokens accepted so far."""
        counts = {m.name: getattr(m, "value", 0) for m in self.llm.get_metrics() if "spec_decode" in m.name}
        return (
            int(counts.get("vllm:spec_decode_num_drafts", 0)),
            int(counts.get("vllm:spec_decode_num_accepted_tokens", 0)),
        )

    def preemptions(self) -> int:
        """Requests that lost their blocks so far."""
        return int(next(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"))

    def states(self) -> dict[str, States]:
        """Of every running request: committed tokens, and per GDN layer state [HV, dv, dk] and convolution inputs."""
        names = [request.request_id for request in self.scheduler.running]
        ranks = self.executor.collective_rpc(states_of_rank, args=(names,))
        return ranks[0] if len(ranks) == 1 else {name: _whole([rank[name] for rank in ranks]) for name in ranks[0]}

    def stop(self) -> None:
        """Frees what the engine holds; the process can start another."""
        from vllm.platforms import current_platform

        with uncollected():
            self.engine.engine_core.shutdown()
        del self.llm, self.engine, self.core, self.scheduler, self.executor, self.runner
        gc.collect()
        # vLLM has one pool of graphs a process; PyTorch 2.11 cannot capture into it after its last graph is gone.
        type(current_platform)._global_graph_pool = None


@contextmanager
def unwatched() -> Iterator[None]:
    """Triton's interpreter looks for no overflows, which takes a fifth of a step: its kernels are vLLM's own here."""
    builder = interpreter.interpreter_builder
    with untraced(), mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)):
        yield


@contextmanager
def untraced() -> Iterator[None]:
    """In a worker of pytest-xdist a tracer stays on under `no_cover` of pytest-cov, and a step takes twice as long."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)


def undrawn(*_: Any, **__: Any) -> float:
    """For the random number that vLLM draws for every draft, a fifth of a step; a greedy request has no use for it."""
    return math.nan


@contextmanager
def uncollected() -> Iterator[None]:
    """On a CPU, vLLM collects no garbage: it would eight times from start to stop, through all that is imported.

    `Engine.stop` collects once. On a GPU vLLM measures what is free after it has collected.
    """
    with nullcontext() if torch.cuda.is_available() else mock.patch.object(gc, "collect", return_value=0):
        yield


def states_of_rank(worker: Any, names: Sequence[str]) -> dict[str, States]:
    """Of these requests, as far as the worker knows them: its own heads."""
    from treewy import ops

    runner, seen = worker.model_runner, {}
    tables, layers = runner.block_tables, runner.model_state.layers
    groups = runner.kv_cache_config.kv_cache_groups
    align = runner.cache_config.mamba_cache_mode == "align"
    for name in names:
        slot = runner.req_states.req_id_to_index.get(name)
        if slot is None:
            continue
        tokens = int(runner.req_states.num_computed_tokens.gpu[slot])
        checkpoints, inputs = [], []
        for layer in layers.values():
            group = next(i for i, group in enumerate(groups) if layer.prefix in group.layer_names)
            column = int(runner.model_state._mamba_state_idx_gpu[slot]) if align else 0
            block = tables.block_tables[group].gpu[slot, column].long()[None]
            where = torch.tensor([slot], device=block.device)
            checkpoints.append(ops.folded_state(layer.state, block, where)[0].float().cpu())
            inputs.append(layer.state.conv[block[0]].float().cpu())
        seen[name] = (tokens, checkpoints, inputs)
    return seen


def _whole(ranks: Sequence[States]) -> States:
    """All heads of a request whose ranks have some each, in order."""
    states = [torch.cat(layer) for layer in zip(*(rank[1] for rank in ranks), strict=True)]
    inputs = []
    for layer, pieces in enumerate(zip(*(rank[2] for rank in ranks), strict=True)):
        values = ranks[0][1][layer].shape[0] * ranks[0][1][layer].shape[1]
        keys = (pieces[0].shape[-1] - values) // 2
        parts = zip(*(piece.split([keys, keys, values], -1) for piece in pieces), strict=True)  # q, k, v
        inputs.append(torch.cat([torch.cat(part, -1) for part in parts], -1))
    return ranks[0][0], states, inputs


class Run(NamedTuple):
    """What `play` did."""

    prompts: dict[str, tuple[int, ...]]
    aborted: set[str]
    states: int
    """States that were compared with the oracle's."""


def play(engine: Engine, oracle: Oracle, seed: int, requests: int, tokens: int, *, compare_every: int = 0) -> Run:
    """Random requests that come one after another, some of them aborted; states are compared on the way."""
    rng = random.Random(seed)
    waiting = list(prompts(requests, 1, 90, seed))
    run = Run({}, set(), 0)
    alive: set[str] = set()
    compared = step = 0
    while waiting or engine.busy:
        while waiting and (rng.random() < 0.5 or not engine.busy):
            prompt = waiting.pop()
            name = engine.add(prompt, rng.randint(1, tokens))
            run.prompts[name] = prompt
            alive.add(name)
        alive.difference_update(engine.step())
        step += 1
        if alive and rng.random() < 0.05:
            name = rng.choice(sorted(alive))
            engine.abort(name)
            alive.remove(name)
            run.aborted.add(name)
        if compare_every and step % compare_every == 0:
            compared += compare_states(engine, oracle)
    for name, prompt in run.prompts.items():
        if engine.emitted[name]:
            oracle.check(prompt, engine.emitted[name])
    return run._replace(states=compared)


def compare_states(engine: Engine, oracle: Oracle) -> int:
    """Holds the state of every running request against a fresh forward over its tokens; how many there were."""
    texts = {request.request_id: list(request.all_token_ids) for request in engine.scheduler.running}
    compared = 0
    for name, (tokens, states, inputs) in engine.states().items():
        if not 3 <= tokens <= len(texts[name]):
            continue
        for layer, pairs in enumerate(
            zip(zip(states, inputs, strict=True), zip(*oracle.states(texts[name][:tokens]), strict=True), strict=True)
        ):
            for what, mine, wanted in zip(("state", "convolution inputs"), *pairs, strict=True):
                error = float((mine - wanted).norm() / wanted.norm())
                assert error < STATE_ERROR, f"{what} of layer {layer} after {tokens} tokens of {name}: {error:.3f} off"
        compared += 1
    return compared


@contextmanager
def running(checkpoint: Path, mode: str | None, **settings: Any) -> Iterator[Engine]:
    """An engine for the length of a block."""
    engine = Engine(checkpoint, mode, **settings)
    try:
        yield engine
    finally:
        engine.stop()


class Oracle:
    """The checkpoint in transformers, in fp32."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def deficits(
        self, prompt: Sequence[int], emitted: Sequence[int], allowed: slice | torch.Tensor = slice(None)
    ) -> torch.Tensor:
        """[tokens] how far each emitted token's logit is below the best allowed one's, in spreads of the logits."""
        logits = self.model(torch.tensor([[*prompt, *emitted]])).logits[0, len(prompt) - 1 : -1]
        below = logits[:, allowed].amax(-1) - logits[torch.arange(len(emitted)), torch.tensor(emitted)]
        return below / logits.std(-1).mean()

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Per GDN layer the state [HV, dv, dk] after these tokens, and the last convolution inputs [3, C]."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model.model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        gdn = [
            layer
            for layer, kind in zip(cache.layers, self.model.config.layer_types, strict=True)
            if kind == "linear_attention"
        ]
        return [g.recurrent_states[0][0].transpose(1, 2) for g in gdn], [g.conv_states[0][0].T[-3:] for g in gdn]

    def check(self, prompt: Sequence[int], emitted: Sequence[int]) -> None:
        """Fails where an emitted token is not the best one, nearly equal ones excepted."""
        deficits = self.deficits(prompt, emitted)
        worst = int(deficits.argmax())
        assert deficits[worst] <= MARGIN, f"token {worst} of {len(emitted)} is {deficits[worst]:.2f} spreads off"


@functools.cache
def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Random prompts of the tiny checkpoint's ordinary tokens."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(4, 128) for _ in range(rng.randint(shortest, longest))) for _ in range(count))
