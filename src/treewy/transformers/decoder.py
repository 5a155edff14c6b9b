"""`generate` for Hugging Face GDN models with draft trees: what `model.generate` does, in fewer forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy.acceptance import SamplingParams
from treewy.drafting import Drafter, FixedWidths, NgramDrafter, NodeBudget, Request, TreeShape
from treewy.generation import NoDrafter, Statistics, Step, Stop, decode, start
from treewy.ops import Impl
from treewy.state import CommitMode
from treewy.transformers.draft_model import DraftModelDrafter
from treewy.transformers.mtp import MTPDrafter, MTPHead
from treewy.transformers.target import HFTarget

DrafterName = Literal["mtp", "ngram", "model", "none"]


@dataclass
class GenerateOutput:
    """What `SpeculativeDecoder.generate` returns with `return_dict_in_generate`."""

    sequences: Tensor
    """[B, n] int64, prompts and new tokens, padded on the right behind the end of a sequence."""
    scores: tuple[Tensor, ...] | None
    """One [B, V] fp32 per new token: processed scores that it was chosen from; 0 behind the end of a sequence."""
    finish_reasons: list[str]
    """Per sequence: "length", "stop_token" or "stop_string"."""
    statistics: Statistics
    """Rounds, rows, acceptance, seconds by phase."""


class SpeculativeDecoder:
    """Speculative decoding of an unmodified Hugging Face GDN model.

    Args:
        model: `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`, `OlmoHybridForCausalLM`, or a
            multimodal Qwen3.5 class (text input). It is only borrowed while tokens are generated.
        drafter: "mtp" (the checkpoint's own head), "ngram" (looks the text up in itself), "model" (needs
            `draft_model`), "none" (plain decoding), or an object of your own with the protocol of
            `treewy.drafting.Drafter`.
        draft_tree_widths: fixed shape, the branching at every depth: (1, 1, 1) is a chain, (3, 3, 3) a tree of 40 rows.
        draft_tree_budget: rows of a tree that grows best first instead, so that shapes differ per request and round.
        max_draft_depth: depth limit of the best-first tree.
        mamba_state_commit: "store_all", "reconstruct" or "deferred".
        mtp_checkpoint: folder or hub name that holds the `mtp.*` weights; default: where the model came from.
        draft_model: a small causal language model with the same tokenizer, of any family.
        draw_drafts: where a request samples, draw the children from the draft's distribution (True) or take the most
            probable ones (False). Both are lossless; drawn ones are accepted more often. Default: draw where the shape
            is fixed; a best-first tree cannot be drawn.
        state_dtype: of the recurrent state; fp32, as transformers has it.
        history_rows: rows that may be pending in the mode "deferred".
        impl: what runs the GDN layers of a window: None or "torch"; on a GPU the kernels "triton" or "cuda" too.

    Raises:
        ValueError: no GDN layer, no MTP head, widths or a budget that do not fit 64 rows, both shapes at once, an
            unknown drafter or implementation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: DrafterName | Drafter = "mtp",
        *,
        draft_tree_widths: Sequence[int] | None = None,
        draft_tree_budget: int | None = None,
        max_draft_depth: int = 6,
        mamba_state_commit: CommitMode = "deferred",
        mtp_checkpoint: str | Path | None = None,
        draft_model: PreTrainedModel | None = None,
        draw_drafts: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        history_rows: int | None = None,
        impl: Impl | None = None,
    ) -> None:
        if draft_tree_widths is not None and draft_tree_budget is not None:
            raise ValueError(
                "draft_tree_widths and draft_tree_budget exclude each other: a fixed shape or a best-first one"
            )
        shape: TreeShape
        if drafter == "none":
            shape = NoDrafter.shape
        elif not isinstance(drafter, str):
            shape = drafter.shape
        elif draft_tree_budget is not None:
            shape = NodeBudget(draft_tree_budget, max_draft_depth)
        elif draft_tree_widths is not None:
            shape = FixedWidths(tuple(draft_tree_widths))
        else:
            shape = NodeBudget(16, max_draft_depth) if drafter == "ngram" else FixedWidths((1, 1, 1))
        fixed = isinstance(shape, FixedWidths)
        if draw_drafts and not fixed:
            raise ValueError(
                "draw_drafts needs draft_tree_widths: best-first trees keep nodes by the probability of their tokens, "
                "which would bias drawn ones; without draw_drafts it is lossless at any temperature"
            )
        draw = fixed if draw_drafts is None else draw_drafts
        self.model = model
        self.mode: CommitMode = mamba_state_commit
        self._shape, self._state_dtype, self._history_rows = shape, state_dtype, history_rows
        self._impl: Impl = impl or "torch"
        self.target(1)  # refuses what it cannot serve, before anything is loaded
        self.drafter: Drafter
        if drafter == "mtp":
            self.drafter = MTPDrafter(MTPHead.from_checkpoint(model, mtp_checkpoint), shape, sampled=draw)
        elif drafter == "ngram":
            if not isinstance(shape, NodeBudget):
                raise ValueError(
                    "the n-gram drafter grows its trees best first: give draft_tree_budget, not draft_tree_widths"
                )
            self.drafter = NgramDrafter(shape)
        elif drafter == "model":
            if draft_model is None:
                raise ValueError(
                    'drafter "model" needs draft_model, a small causal language model with the same tokenizer'
                )
            self.drafter = DraftModelDrafter(draft_model, shape, sampled=draw)
        elif drafter == "none":
            self.drafter = NoDrafter()
        elif isinstance(drafter, str):
            raise ValueError(
                f'drafter is {drafter!r}; it is "mtp", "ngram", "model", "none", or an object with draft()'
            )
        else:
            self.drafter = drafter

    def target(self, num_requests: int) -> HFTarget:
        """The model with state for `num_requests` sequences, sized for this decoder's trees."""
        return HFTarget(
            self.model,
            num_requests,
            max_rows=self._shape.rows,
            max_depth=min(self._shape.max_depth, self._shape.rows - 1),
            mode=self.mode,
            state_dtype=self._state_dtype,
            history_rows=self._history_rows,
            impl=self._impl,
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        max_new_tokens: int,
        stop: Stop | None = None,
        *,
        keep_scores: bool = False,
    ) -> Run:
        """Starts decoding token lists; iterate over the result to go on.

        Args:
            prompts: token ids, one list a sequence, lengths may differ.
            sampling: for all sequences, or one each.
            max_new_tokens: at least 1.
            stop: asked after every token.
            keep_scores: keep the scores that each token was chosen from.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or more tokens than the model has positions.
        """
        return Run(self, prompts, sampling, max_new_tokens, stop, keep_scores)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: Any = None,
        streamer: Any = None,
        output_scores: bool = False,
        return_dict_in_generate: bool = False,
    ) -> Tensor | GenerateOutput:
        """`model.generate`, speculatively: same arguments, same meaning, defaults from `model.generation_config`.

        Greedy output is the model's own; sampled output has the model's distribution. Not bitwise the same as without
        speculation: sums run in another order, so a near-tie of two logits can fall the other way.

        Args:
            input_ids: [B, n] int64 prompts, padded on the left where their lengths differ.
            attention_mask: [B, n], 0 on padding; None for no padding.
            max_new_tokens: tokens to generate at most; 20 where neither this nor the generation config says.
            do_sample: sample instead of taking the most probable token.
            temperature: divides the logits.
            top_k: keeps the k most probable tokens; 0 for all.
            top_p: keeps the most probable tokens that reach this probability.
            seed: of the randomness; sequence i of the batch uses seed + i. None for a fresh one.
            eos_token_id: ends a sequence; it is part of the output.
            pad_token_id: fills sequences behind their end; default: the first eos token, or 0.
            stop_strings: end a sequence with the token that completes one of them; needs `tokenizer`.
            tokenizer: decodes tokens for `stop_strings`.
            streamer: gets the prompt, then new tokens as they come (batch of one).
            output_scores: with `return_dict_in_generate`, the scores of every new token.
            return_dict_in_generate: return a `GenerateOutput` instead of the sequences alone.

        Raises:
            ValueError: input of the wrong shape, padding on the right, `stop_strings` without a tokenizer.
        """
        config = self.model.generation_config
        prompts = _prompts(input_ids, attention_mask)
        if _first(do_sample, config.do_sample, False):
            sampling = [
                SamplingParams(
                    temperature=_first(temperature, config.temperature, 1.0),
                    top_p=_first(top_p, config.top_p, 1.0),
                    top_k=_first(top_k, config.top_k, 0),
                    seed=None if seed is None else seed + i,
                )
                for i in range(len(prompts))
            ]
        else:
            sampling = [SamplingParams()] * len(prompts)
        eos = _first(eos_token_id, config.eos_token_id, [])
        eos = [eos] if isinstance(eos, int) else list(eos)
        if stop_strings and tokenizer is None:
            raise ValueError(
                "stop_strings need the tokenizer too: generate(..., stop_strings=..., tokenizer=tokenizer)"
            )
        stop = StopRules(eos, [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or []), tokenizer)
        if streamer is not None:
            if len(prompts) > 1:
                raise ValueError(f"a streamer takes one sequence, and input_ids has {len(prompts)}")
            streamer.put(input_ids.cpu())
        run = self.run(
            prompts, sampling, _first(max_new_tokens, config.max_new_tokens, 20), stop, keep_scores=output_scores
        )
        for steps in run:
            if streamer is not None:
                streamer.put(torch.tensor(steps[0].emitted))
        if streamer is not None:
            streamer.end()
        sequences = _sequences(input_ids, run.requests, _first(pad_token_id, config.pad_token_id, eos[0] if eos else 0))
        if not return_dict_in_generate:
            return sequences
        scores = _scores(run.requests) if output_scores else None
        return GenerateOutput(
            sequences, scores, [str(request.finish_reason) for request in run.requests], run.statistics
        )


class Run:
    """Sequences that are being decoded. Iterating yields, per round, what each running sequence emitted.

    The first item is the token that each prompt's prefill gives. Stop iterating whenever you like: between rounds the
    model is as it was before, and `requests` holds what was emitted so far.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        max_new_tokens: int,
        stop: Stop | None,
        keep_scores: bool,
    ) -> None:
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts) or not prompts:
            raise ValueError(
                f"{len(prompts)} prompts came with {len(each)} SamplingParams; give at least one, and one each"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it is 1 or more")
        self.target = decoder.target(len(prompts))
        _check_prompts(prompts, max_new_tokens, self.target.config)
        self.requests = [
            Request(i, list(prompt), len(prompt), max_new_tokens, params, _generator(params.seed))
            for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        self.statistics = Statistics()
        self.prefill_seconds = 0.0
        self._drafter = decoder.drafter
        self._stop: Stop = stop or (lambda request: None)
        self._keep_scores = keep_scores

    def __iter__(self) -> Iterator[list[Step]]:
        """Decodes until all sequences have ended."""
        try:
            began = perf_counter()
            yield start(self.target, self._drafter, self.requests, self._stop, keep_scores=self._keep_scores)
            self.prefill_seconds = perf_counter() - began
            for round_ in decode(self.target, self._drafter, self.requests, self._stop, keep_scores=self._keep_scores):
                self.statistics.add(round_)
                yield round_.steps
        finally:
            for request in self.requests:
                self._drafter.release(request.index)


class StopRules:
    """Ends a sequence at a stop token, or with the token that completes a stop string.

    Args:
        token_ids: stop tokens.
        strings: stop strings; they may begin in the prompt, but end in a new token.
        tokenizer: decodes tokens; only needed for `strings`.
    """

    def __init__(self, token_ids: Sequence[int], strings: Sequence[str] = (), tokenizer: Any = None) -> None:
        self._token_ids = frozenset(token_ids)
        self._strings = [string for string in strings if string]
        self._tokenizer = tokenizer
        # A token has at least one byte, so this many tokens hold any string and the character before it.
        self._tail = max((len(string.encode()) for string in self._strings), default=0) + 4

    def __call__(self, request: Request) -> str | None:
        """Why the request ends with its last token, "stop_token" or "stop_string", or None."""
        if request.tokens[-1] in self._token_ids:
            return "stop_token"
        if self._strings:
            before = self._tokenizer.decode(request.tokens[-self._tail : -1])
            text = self._tokenizer.decode(request.tokens[-self._tail :])
            for string in self._strings:
                if text.find(string, max(0, len(before) - len(string) + 1)) >= 0:
                    return "stop_string"
        return None


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it is [batch, tokens]")
    if attention_mask is None:
        return list(input_ids.tolist())
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} does not fit input_ids {tuple(input_ids.shape)}"
        )
    if bool((attention_mask.diff(dim=1) < 0).any()):
        raise ValueError('attention_mask has padding behind tokens; pad on the left: tokenizer.padding_side = "left"')
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def _check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: Any) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give at least one token")
        if not (min(prompt) >= 0 and max(prompt) < config.vocab_size):
            raise ValueError(f"prompt {i} has a token outside the vocabulary, 0 .. {config.vocab_size - 1}")
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; together they exceed the "
                f"model's {config.max_position_embeddings} positions: shorten one of them"
            )


def _sequences(input_ids: Tensor, requests: Sequence[Request], pad_token_id: int) -> Tensor:
    new = [request.tokens[request.prompt_length :] for request in requests]
    longest = max(map(len, new))
    padded = torch.tensor([[*tokens, *(pad_token_id,) * (longest - len(tokens))] for tokens in new])
    return torch.cat([input_ids, padded.to(input_ids)], dim=1)


def _scores(requests: Sequence[Request]) -> tuple[Tensor, ...]:
    longest = max(len(request.scores) for request in requests)
    nothing = torch.zeros_like(requests[0].scores[0])
    return tuple(
        torch.stack([request.scores[i] if i < len(request.scores) else nothing for request in requests])
        for i in range(longest)
    )
