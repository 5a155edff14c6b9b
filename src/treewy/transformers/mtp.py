"""Multi-token prediction (MTP): drafting with the layer that Qwen3-Next and Qwen3.5 checkpoints bring for it.

The layer runs over *entries*. The entry of position p joins the target's last hidden state of p with the embedding of
token p + 1, sees the entries before it, and its output predicts token p + 2 through the target's own embedding and
output matrices. A draft node's entry takes the output of its parent's entry in place of the target's hidden state, and
sees the committed entries, its ancestors and itself. Rotary positions are those of the hidden state: p for a committed
entry, p + depth for a node below the root's entry p. These are vLLM's semantics.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from treewy.drafting import Draft, Level, Request, TreeShape, grow_drafts
from treewy.tree import MAX_ROWS, DraftTree

_MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_PROMPT_CHUNK = 512
_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class MTPHead(nn.Module):
    """The MTP layer of one target model; its parameters hold no values until `from_checkpoint` or `random` fill them.

    Parameter names are those of the checkpoint without the leading "mtp.". The target's embedding and output matrices
    are used in place: they are no parameters of this module and do not move with it.

    Args:
        model: a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE language model, alone or inside the multimodal model. It stays as
            it is; its device and dtype become the head's.

    Raises:
        ValueError: a model of another family, or one with several MTP layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        target: Any = model  # Its accessors have no types.
        decoder = target.get_decoder()
        if decoder.config.model_type not in _MODEL_TYPES:
            raise ValueError(
                f"model type {decoder.config.model_type} has no known MTP layer; {', '.join(_MODEL_TYPES)} have one. "
                "Draft with n-gram lookup or a draft model instead"
            )
        layers = getattr(decoder.config, "mtp_num_hidden_layers", None) or 1
        if layers > 1:
            raise ValueError(
                f"mtp_num_hidden_layers is {layers}; only 1 is supported, because public engines disagree on how "
                "several layers are used (one after the other, or one a draft depth) and no public checkpoint has them"
            )
        config = copy.deepcopy(decoder.config)
        config.num_hidden_layers = 1
        config.layer_types = ["full_attention"]
        if config._attn_implementation != "eager":  # Of the others, this one takes any mask.
            config._attn_implementation = "sdpa"
        norm, width = type(decoder.norm), config.hidden_size
        with torch.device("meta"):
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.layers = nn.ModuleList([type(decoder.layers[0])(config, 0)])
            self.norm = norm(width, eps=config.rms_norm_eps)
            self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
            self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.to(decoder.norm.weight.dtype).to_empty(device=decoder.norm.weight.device)
        # A copy, since some kinds of rotary embedding change with the positions that they are asked for.
        self.rotary_embedding = copy.deepcopy(decoder.rotary_emb)
        self.config = config
        # In a tuple, since an attribute would register them as submodules.
        self._shared = (target.get_input_embeddings(), target.get_output_embeddings())
        self.eval()

    @classmethod
    def from_checkpoint(cls, model: PreTrainedModel, path: str | Path | None = None) -> MTPHead:
        """The head stored beside `model`.

        Args:
            model: the target, see the class.
            path: folder or Hub name of a safetensors checkpoint; None for the one that `model` was loaded from. Experts
                may be stored one by one, as published, or fused, as transformers holds them.

        Raises:
            ValueError: no MTP head there, or one whose names or shapes are not exactly those expected.
            OSError: no such checkpoint, or a file that its index names is missing.
        """
        source = str(path or model.config._name_or_path)
        files = _locate(source, revision=getattr(model.config, "_commit_hash", None) if path is None else None)
        head = cls(model)
        one_by_one = any(".experts." in name and name.endswith(".weight") for name in files)
        destinations = head._destinations(fused=not one_by_one)
        missing, unexpected = sorted(destinations.keys() - files.keys()), sorted(files.keys() - destinations.keys())
        if missing or unexpected:
            raise ValueError(
                f"the MTP head in {source} does not fit a {head.config.model_type} model; "
                f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}"
            )
        for name, tensor in _read(files):
            destination = destinations[name]
            if tensor.shape != destination.shape:
                raise ValueError(
                    f"{name} in {source} has shape {[*tensor.shape]}; the model needs {[*destination.shape]}"
                )
            destination.copy_(tensor)
        return head

    @classmethod
    def random(cls, model: PreTrainedModel, seed: int) -> MTPHead:
        """A head with normally distributed parameters, the same on every device: a start for training and tests."""
        head = cls(model)
        generator = torch.Generator().manual_seed(seed)
        for parameter in head.parameters():
            values = torch.randn(parameter.shape, generator=generator) * head.config.initializer_range
            parameter.data.copy_(values)
        return head

    def _destinations(self, fused: bool) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint belongs, by its name there."""
        destinations: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters(prefix="mtp"):
            prefix, _, projection = name.rpartition(".")
            if fused or not prefix.endswith(".experts"):
                destinations[name] = parameter.data
                continue
            parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            for expert, weight in enumerate(parameter.data):
                for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                    destinations[f"{prefix}.{expert}.{part}.weight"] = rows
        return destinations

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: EntryCache | None = None,
    ) -> Tensor:
        """Runs entries.

        Args:
            hidden: [B, n, D] the target's last hidden states (after its final norm); outputs of this head for nodes.
            tokens: [B, n] int64, the token after each hidden state's.
            rotary: of the entries' positions, see `rotary`.
            mask: [B, 1, n, S] additive, in the head's dtype; None to see everything (n = 1) or, without a cache, the
                entries before (sdpa only).
            cache: holds earlier entries and takes in these; None to see nothing but these.

        Returns:
            [B, n, D]: the input of `logits`, and of a child's entry.
        """
        embedding = self._shared[0](tokens)
        joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], dim=-1)
        output = self.layers[0](self.fc(joined), position_embeddings=rotary, attention_mask=mask, past_key_values=cache)
        return self.norm(output)  # type: ignore[no-any-return]

    def logits(self, output: Tensor) -> Tensor:
        """[..., V] from an output [..., D]."""
        return self._shared[1](output)  # type: ignore[no-any-return]

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [B, n, R], of text positions [B, n] int64."""
        if hasattr(self.rotary_embedding, "mrope_section"):  # Time, height and width; equal in text.
            positions = positions.expand(3, *positions.shape)
        return self.rotary_embedding(self.norm.weight, positions)  # type: ignore[no-any-return]


def _locate(source: str, revision: str | None) -> dict[str, str]:
    """The file of each MTP tensor of a checkpoint, by the tensor's name there."""
    if not source:
        raise ValueError("the model was not loaded from a checkpoint: give the path of one that has an MTP head")

    def optional(name: str) -> str | None:
        return cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)

    stored: dict[str, str] = {}
    if index := optional(_INDEX_FILE):
        stored = json.loads(Path(index).read_text())["weight_map"]
    elif single := optional(_SINGLE_FILE):
        with safe_open(single, framework="pt") as file:
            stored = dict.fromkeys(file.keys(), _SINGLE_FILE)
    files = {name: file for name, file in stored.items() if name.startswith("mtp.")}
    if not files:
        what = "no tensor named mtp.*" if stored else f"neither {_INDEX_FILE} nor {_SINGLE_FILE}"
        raise ValueError(f"{source} has no MTP head ({what}). Draft with n-gram lookup or a draft model instead")
    paths = {file: str(cached_file(source, file, revision=revision)) for file in set(files.values())}
    return {name: paths[file] for name, file in files.items()}


def _read(files: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            for name in (name for name, its_path in files.items() if its_path == path):
                yield name, file.get_tensor(name)


class EntryCache:
    """Keys and values of the entries of all running requests, in the place of a transformers cache.

    Both pools are [rows, heads, columns, head_dim], one row a request, grown by doubling. Before a forward pass `place`
    says where its entries go; the attention module then hands them to `update` and attends to what that returns.
    """

    def __init__(self, like: Tensor, heads: int, head_dim: int) -> None:
        self._keys = like.new_zeros(0, heads, 0, head_dim)
        self._values = self._keys.clone()

    def reserve(self, rows: int, columns: int) -> None:
        """Makes room. New places are zero: what a mask hides is multiplied by zero, which a NaN would survive."""
        have_rows, _, have_columns, _ = self._keys.shape
        if rows <= have_rows and columns <= have_columns:
            return
        rows = max(rows, 2 * have_rows) if rows > have_rows else have_rows
        columns = max(columns, 2 * have_columns) if columns > have_columns else have_columns
        self._keys, self._values = (_enlarged(pool, rows, columns) for pool in (self._keys, self._values))

    def swap(self, row: int, other: int) -> None:
        """Exchanges two rows."""
        for pool in (self._keys, self._values):
            pool[[row, other]] = pool[[other, row]]

    def clear(self, row: int) -> None:
        """Makes a row as good as new."""
        for pool in (self._keys, self._values):
            pool[row : row + 1] = 0

    def place(self, rows: slice, columns: slice | Tensor, end: int) -> None:
        """Says where the next forward pass writes and that it reads columns 0 to `end`.

        Args:
            rows: of the requests.
            columns: of the entries: the same in every row, or [B, n] int64.
            end: columns that `update` returns.
        """
        self._rows, self._columns, self._end = rows, columns, end

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Takes in keys and values [B, heads, n, head_dim]; returns those to attend to, [B, heads, end, head_dim]."""
        return self._write(self._keys, keys), self._write(self._values, values)

    def _write(self, pool: Tensor, entries: Tensor) -> Tensor:
        pool = pool[self._rows]
        if isinstance(self._columns, slice):
            pool[:, :, self._columns] = entries
        else:
            row = torch.arange(len(pool), device=pool.device)[:, None]
            pool[row, :, self._columns] = entries.transpose(1, 2)
        return pool[:, :, : self._end]


def _enlarged(pool: Tensor, rows: int, columns: int) -> Tensor:
    larger = pool.new_zeros(rows, pool.shape[1], columns, pool.shape[3])
    larger[: pool.shape[0], :, : pool.shape[2]] = pool
    return larger


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


@dataclass
class _Entries:
    """The entries of one request. Entry p has position p and stands in column p of its row."""

    row: int
    """Of the cache."""
    run: int = 0
    """Entries that the head has run; the others are pending."""
    hidden: list[Tensor] = field(default_factory=list)
    """Target's hidden states of the pending entries, each [n, D]."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the pending entries."""

    def take(self, count: int) -> tuple[Tensor, list[int]]:
        """The next `count` pending entries (fewer where there are fewer): [n, D] and n tokens."""
        hidden = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden)
        tokens, self.tokens = self.tokens[:count], self.tokens[count:]
        self.hidden = [hidden[count:]] if self.tokens else []
        self.run += len(tokens)
        return hidden[:count], tokens


class MTPDrafter:
    """Drafts with the target's MTP head.

    Its cache holds, for every running request, as many entries as the longest one has, and the draft under way.

    Args:
        head: of the target that is being decoded.
        shape: of the draft trees.
        sampled: draw the nodes from the head's distribution under the request's sampling parameters (lossless tree
            sampling then accepts more); False takes the most probable ones.
    """

    def __init__(self, head: MTPHead, shape: TreeShape, *, sampled: bool = False) -> None:
        self.shape = shape
        self._head = head
        self._sampled = sampled
        config = head.config
        self._cache = EntryCache(head.fc.weight.detach(), config.num_key_value_heads, config.head_dim)
        self._by_index: dict[int, _Entries] = {}
        self._by_row: list[_Entries] = []

    def observe(self, request: Request, hidden: Tensor) -> None:
        """Takes in newly committed positions, see `treewy.drafting.Drafter`.

        `hidden` is kept, not copied, until the next draft.

        Raises:
            ValueError: positions were left out: entries are needed from position 0 on.
        """
        entries = self._by_index.get(request.index)
        if entries is None:
            entries = self._by_index[request.index] = _Entries(row=len(self._by_row))
            self._by_row.append(entries)
        seen = entries.run + len(entries.tokens)
        if seen + len(hidden) != len(request.tokens) - 1:
            raise ValueError(
                f"request {request.index} has {len(request.tokens)} tokens, so {len(request.tokens) - 1} positions "
                f"are committed, but {seen} were observed before and {len(hidden)} now; observe each once, in order"
            )
        if len(hidden):
            entries.hidden.append(hidden)
            entries.tokens += request.tokens[seen + 1 :]

    @torch.inference_mode()
    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        """One draft per request; the bare root where a request may emit only one more token.

        Raises:
            ValueError: nothing was observed since the request's last draft.
        """
        limits = [min(self.shape.max_depth, request.remaining - 1) for request in requests]
        drafting = [request for request, limit in zip(requests, limits, strict=True) if limit > 0]
        drafts = iter(self._draft(drafting, [limit for limit in limits if limit > 0]) if drafting else ())
        return [
            next(drafts) if limit > 0 else Draft(DraftTree.chain(0), request.tokens[-1:])
            for request, limit in zip(requests, limits, strict=True)
        ]

    @torch.inference_mode()
    def release(self, index: int) -> None:
        """Forgets the request with this index."""
        entries = self._by_index.pop(index, None)
        if entries is not None:
            self._move(entries, len(self._by_row) - 1)
            self._by_row.pop()
            self._cache.clear(entries.row)

    def _draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        batch = []
        for row, request in enumerate(requests):
            entries = self._by_index.get(request.index)
            if entries is None or not entries.tokens:
                raise ValueError(f"request {request.index} was not observed since its last draft; observe, then draft")
            self._move(entries, row)
            batch.append(entries)
        for entries in batch:
            while (pending := len(entries.tokens)) > MAX_ROWS:  # A prompt: run ahead of the batch, but for its end.
                self._run([entries], min(_PROMPT_CHUNK, pending - 1))
        output, rotary = self._run(batch, MAX_ROWS, ahead=max(limits))
        levels = _Levels(self._head, self._cache, [entries.run for entries in batch], output, rotary)
        return grow_drafts(
            [request.tokens[-1] for request in requests],
            self._head.logits(output),
            self.shape,
            levels.run,
            limits=limits,
            temperatures=[request.sampling.temperature for request in requests],
            sampling=[request.sampling for request in requests] if self._sampled else None,
            generators=[request.generator for request in requests] if self._sampled else None,
        )

    def _move(self, entries: _Entries, row: int) -> None:
        """Brings a request to a row, and the one that was there to this one's."""
        other = self._by_row[row]
        if other is not entries:
            self._cache.reserve(len(self._by_row), 0)
            self._cache.swap(entries.row, row)
            other.row, entries.row = entries.row, row
            self._by_row[other.row], self._by_row[row] = other, entries

    def _run(self, batch: Sequence[_Entries], most: int, ahead: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs up to `most` pending entries of requests in consecutive rows.

        Returns:
            [B, D], the output of each request's last entry, and the rotary embedding of the `ahead` positions after.
        """
        dtype, device = self._head.fc.weight.dtype, self._head.fc.weight.device
        starts = [entries.run for entries in batch]
        taken = [entries.take(most) for entries in batch]
        counts = [len(tokens) for _, tokens in taken]
        width, end = max(counts), max(starts) + max(counts)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width + ahead, device=device)
        columns = positions[:, :width]
        mask = None
        if width > 1 or min(starts) < max(starts):
            mask = _additive(torch.arange(end, device=device) <= columns[:, :, None], dtype)[:, None]
        cos, sin = self._head.rotary(positions)
        self._cache.reserve(len(self._by_row), end)
        self._cache.place(slice(batch[0].row, batch[-1].row + 1), columns, end)
        output = self._head(
            pad_sequence([hidden for hidden, _ in taken], batch_first=True),
            torch.tensor([tokens + [0] * (width - len(tokens)) for _, tokens in taken], device=device),
            (cos[:, :width], sin[:, :width]),
            mask,
            self._cache,
        )
        row = torch.arange(len(batch), device=device)[:, None]
        last = torch.tensor(counts, device=device)[:, None] - 1
        after = last + torch.arange(1, ahead + 1, device=device)
        return output[row, last].squeeze(1), (cos[row, after], sin[row, after])


class _Levels:
    """Runs the levels of one round's draft.

    Its nodes stand in the cache's columns after the longest request's entries, the same for all requests; the next
    committed entries overwrite them.

    Args:
        head: the MTP head.
        cache: with the committed entries of the B requests in rows 0 to B - 1.
        lengths: number of these entries.
        output: [B, D] output of the last of these entries: the root's.
        rotary: of the positions after that entry's, one for each level.
    """

    def __init__(
        self,
        head: MTPHead,
        cache: EntryCache,
        lengths: Sequence[int],
        output: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        self._head, self._cache = head, cache
        self._cos, self._sin = rotary
        self._output = output[:, None]
        """[B, n, D] of the level that was run last, the root's at first."""
        self._first = 0
        """Column of that level's first node, as `Level` counts."""
        self._end = max(lengths)
        """Columns of the cache in use."""
        self._mask: Tensor | None = None
        """[B, n, end] additive: what that level sees; None as long as every node sees everything."""
        if min(lengths) < self._end:
            length = torch.tensor(lengths, device=output.device)[:, None]
            self._mask = _additive(torch.arange(self._end, device=output.device) < length, output.dtype)[:, None]

    def run(self, level: Level) -> Tensor:
        """The `NextLogits` of `grow_drafts`."""
        batch, width = level.tokens.shape

        def of_parents(values: Tensor) -> Tensor:
            if values.shape[1] == 1:
                return values.expand(-1, width, -1)
            parents = (level.parents - self._first).clamp_(min=0)[:, :, None]
            return values.gather(1, parents.expand(-1, -1, values.shape[2]))

        mask = self._mask
        if mask is None and width > 1:
            mask = self._output.new_zeros(batch, 1, self._end)
        if mask is not None:
            itself = _additive(torch.eye(width, dtype=torch.bool, device=mask.device), mask.dtype)
            mask = torch.cat([of_parents(mask), itself.expand(batch, -1, -1)], dim=-1)
        end = self._end + width
        self._cache.reserve(batch, end)
        self._cache.place(slice(0, batch), slice(self._end, end), end)
        at = slice(level.depth - 1, level.depth)
        output = self._head(
            of_parents(self._output),
            level.tokens,
            (self._cos[:, at], self._sin[:, at]),
            None if mask is None else mask[:, None],
            self._cache,
        )
        self._first += self._output.shape[1]
        self._output, self._mask, self._end = output, mask, end
        return self._head.logits(output)
