"""A Hugging Face model as the target of speculation: its own forward, with GDN layers and KV that know windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from treewy.generation import TargetOutput
from treewy.ops import DeviceWindow, Impl, Window
from treewy.state import CommitMode, RecurrentState, StateSpec
from treewy.transformers.kv import TreeKV
from treewy.transformers.layers import GDNLayer
from treewy.tree import MAX_ROWS, TreeBatch

_PREFILL_TOKENS = 4096
"""Tokens of prompts that share a forward: enough to fill a GPU, few enough for any memory."""


class HFTarget:
    """An unmodified causal language model with the state of its running requests.

    Prompts go through the model's own forward. Windows go through it too, except that its GDN layers call `treewy.ops`
    and its attention layers see the tree's mask, positions and KV; that is only so inside `attached`.

    Args:
        model: `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`, `OlmoHybridForCausalLM`, or a
            multimodal Qwen3.5 class (text input). With `need_gdn` False any decoder whose layers take a 4-D mask.
        num_requests: running requests.
        max_rows: rows of the largest window, root included.
        max_depth: depth of the deepest window.
        mode: `mamba_state_commit`.
        state_dtype: of the recurrent state; transformers itself keeps it in fp32.
        history_rows: as in `StateSpec`.
        impl: what runs the GDN layers in a window, as in `RecurrentState`.
        need_gdn: refuse a model without GDN layers.

    Raises:
        ValueError: a class of another make, no GDN layer, an attention implementation that takes no mask, or a model on
            several devices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_requests: int,
        *,
        max_rows: int = MAX_ROWS,
        max_depth: int | None = None,
        mode: CommitMode = "deferred",
        state_dtype: torch.dtype = torch.float32,
        history_rows: int | None = None,
        impl: Impl = "torch",
        need_gdn: bool = True,
    ) -> None:
        self.model = model
        base: Any = getattr(model, "model", None)
        self.text_model: Any = getattr(base, "language_model", base)
        if not hasattr(self.text_model, "layers"):
            raise ValueError(
                f"{type(model).__name__} has no decoder layers at model.model.layers, so it is none of the classes "
                "known here: give a Qwen3-Next, Qwen3.5 or OLMo-Hybrid causal language model"
            )
        self.config = self.text_model.config
        self._lm_head: Any = model.get_output_embeddings()
        mixers = [getattr(layer, "linear_attn", None) for layer in self.text_model.layers]
        self._gdn = {i: GDNLayer(mixer) for i, mixer in enumerate(mixers) if mixer is not None}
        if need_gdn and not self._gdn:
            raise ValueError(
                f"{type(model).__name__} has no GDN layer (no `linear_attn` in its {len(mixers)} layers): its KV cache "
                "can be cut back, so it needs no TreeWY; transformers' assisted generation speculates with it"
            )
        attention = self.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise ValueError(
                f"attn_implementation is {attention!r}, which takes no tree mask; load the model with 'sdpa' or 'eager'"
            )
        device = model.device
        others = {parameter.device for parameter in self.text_model.parameters()} - {device}
        if others:
            raise ValueError(
                f"the model is spread over {device} and {', '.join(sorted(map(str, others)))}; its state lives on one "
                "device: load the model onto one"
            )
        self.kv = TreeKV([i for i, mixer in enumerate(mixers) if mixer is None], num_requests, device)
        self.state: RecurrentState | None = None
        if self._gdn:
            spec = StateSpec(
                layers=next(iter(self._gdn.values())).dims,
                num_layers=len(self._gdn),
                mode=mode,
                max_rows=max_rows,
                max_depth=max_rows - 1 if max_depth is None else max_depth,
                state_dtype=state_dtype,
                input_dtype=model.dtype,
                history_rows=history_rows,
            )
            self.state = RecurrentState(spec, num_requests, device, impl)
        self.committed: list[list[int]] = [[] for _ in range(num_requests)]
        """Tokens of each request that its state holds."""
        self._window: Window | DeviceWindow | None = None
        self._verified: Window | DeviceWindow | None = None
        self._tokens: list[list[int]] = []
        self._requests: list[int] = []
        self._attached = False

    # Target

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state that one request holds."""
        return 0 if self.state is None else self.state.spec.bytes_per_request

    def prefill(self, requests: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[TargetOutput]:
        """Runs prompts through the untouched model and takes over its state. Whatever the requests held is dropped.

        Prompts of one length share a forward, so that none is padded.

        Args:
            requests: index of each.
            prompts: tokens of each, at least one.

        Returns:
            One per request: logits [1, 1, V] after its last token, hidden [1, n, D] of all.
        """
        outputs: dict[int, TargetOutput] = {}
        by_length: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(place)
        for length, places in by_length.items():
            share = max(1, _PREFILL_TOKENS // length)
            for first in range(0, len(places), share):
                some = places[first : first + share]
                batch = self._prefill([requests[place] for place in some], [prompts[place] for place in some])
                outputs.update(zip(some, batch, strict=True))
        return [outputs[place] for place in range(len(prompts))]

    @torch.no_grad()
    def _prefill(self, requests: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[TargetOutput]:
        cache = DynamicCache(config=self.config)
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)
        hidden = self.text_model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        logits = self._lm_head(hidden[:, -1:])
        layers: Any = cache.layers
        attention = [layers[i] for i in range(len(layers)) if i not in self._gdn]
        for n, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            for place, (i, gdn) in enumerate(self._gdn.items()):
                assert self.state is not None
                state = layers[i].recurrent_states[0][n].transpose(1, 2)
                conv = layers[i].conv_states[0][n].T[1 - gdn.dims.conv_width :]
                self.state.load(place, request, state, conv)
            self.kv.load(request, [(layer.keys[n], layer.values[n]) for layer in attention])
            self.committed[request] = list(prompt)
        return [TargetOutput(logits[n : n + 1], hidden[n : n + 1]) for n in range(len(requests))]

    def verify(self, requests: Sequence[int], tokens: Tensor, trees: TreeBatch) -> TargetOutput:
        """Runs one window per request; `tokens` [B, T] int64. What is committed does not change."""
        device = self.model.device
        self._requests, self._tokens = list(requests), tokens.tolist()
        tokens, trees = tokens.to(device), trees.to(device)
        with self.attached(), torch.no_grad():
            mask, positions = self.kv.begin(requests, trees, self.model.dtype)
            if self.state is not None:
                self._window = self.state.plan(trees, torch.tensor(self._requests, device=device))
            try:
                hidden = self.text_model(
                    input_ids=tokens,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=self.kv,
                    use_cache=True,
                ).last_hidden_state
            finally:
                self._verified, self._window = self._window, None
            return TargetOutput(self._lm_head(hidden), hidden)

    def commit(self, path: Tensor, accepted: Tensor) -> None:
        """Accepts a path of the windows verified last: [B, P] rows, root first, and [B] lengths."""
        paths = [row[:length] for row, length in zip(path.tolist(), accepted.tolist(), strict=True)]
        with torch.no_grad():
            if self.state is not None:
                device = self.model.device
                assert self._verified is not None
                self.state.commit(self._verified, path.to(device), accepted.to(device))
            self.kv.commit(paths)
        for request, row_tokens, accepted_rows in zip(self._requests, self._tokens, paths, strict=True):
            self.committed[request] += [row_tokens[row] for row in accepted_rows]

    def release(self, request: int) -> None:
        """Forgets a request."""
        if self.state is not None:
            self.state.reset(request)
        self.kv.lengths[request] = 0
        self.committed[request] = []

    # What a cache is asked for besides

    def fork(self, source: int, target: int) -> None:
        """`target` continues from where `source` is; neither sees the other any more."""
        if self.state is not None:
            self.state.copy(source, target)
        self.kv.copy(source, target)
        self.committed[target] = list(self.committed[source])

    def crop(self, request: int, length: int) -> None:
        """Cuts a request back to its first `length` tokens.

        A recurrent state cannot be cut, so a real cut runs the kept tokens again: exact, at the price of a prefill.

        Raises:
            ValueError: a length below 0 or above the committed one.
        """
        committed = self.committed[request]
        if not 0 <= length <= len(committed):
            raise ValueError(
                f"length {length} is outside 0 .. {len(committed)}, the tokens that request {request} holds"
            )
        if length == 0:
            self.release(request)
        elif length < len(committed):
            self.prefill([request], [committed[:length]])

    # The model's forward

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Lets the model's GDN layers serve windows; the model is as before when this ends. Nesting is fine."""
        if self._attached:
            yield
            return
        before: dict[nn.Module, Any] = {}
        try:
            self._attached = True
            for place, gdn in enumerate(self._gdn.values()):
                before[gdn.module] = gdn.module.__dict__.get("forward")
                gdn.module.forward = partial(self._gdn_forward, place, gdn, gdn.module.forward)
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward
            self._attached = False

    def _gdn_forward(
        self, place: int, gdn: GDNLayer, original: Callable[..., Tensor], hidden_states: Tensor, **kwargs: Any
    ) -> Tensor:
        if self._window is None:
            return original(hidden_states=hidden_states, **kwargs)
        assert self.state is not None
        x, a, b, z = gdn.project(hidden_states)
        return gdn.finish(self.state.verify(place, self._window, x, a, b, gdn.params), z)
