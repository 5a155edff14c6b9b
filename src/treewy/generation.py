"""One decoding round, top to bottom, for any engine: draft, expand, verify, accept, commit, emit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from treewy.acceptance import Acceptance, accept_greedy, accept_sampled, choose, target_distribution, target_scores
from treewy.drafting import Draft, Drafter, FixedWidths, Request
from treewy.tree import DraftTree, TreeBatch


class TargetOutput(NamedTuple):
    """What the target says of every row."""

    logits: Tensor
    """[B, T, V]."""
    hidden: Tensor
    """[B, T, D] last hidden states, after the final norm."""


class Target(Protocol):
    """The model that is sped up, with the state of its running requests."""

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state that one request holds."""

    def prefill(self, requests: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[TargetOutput]:
        """Runs one prompt per request; for each, logits [1, 1, V] of its last token and hidden [1, n, D] of all."""

    def verify(self, requests: Sequence[int], tokens: Tensor, trees: TreeBatch) -> TargetOutput:
        """Runs one window per request, tokens [B, T] int64, without changing what is committed."""

    def commit(self, path: Tensor, accepted: Tensor) -> None:
        """Accepts a path of the windows that were verified last: [B, P] rows, root first, and [B] lengths."""

    def release(self, request: int) -> None:
        """Forgets a request."""


class NoDrafter:
    """Plain decoding: never proposes anything."""

    shape = FixedWidths(())

    def observe(self, request: Request, hidden: Tensor) -> None:
        """Nothing to learn."""

    def draft(self, requests: Sequence[Request]) -> list[Draft]:
        """The bare root for every request."""
        return [Draft(DraftTree.chain(0), request.tokens[-1:]) for request in requests]

    def release(self, index: int) -> None:
        """Nothing to forget."""


class Step(NamedTuple):
    """What one round did for one request."""

    request: int
    rows: int
    """Rows of its window."""
    accepted: int
    """Rows accepted, root included: tokens that the target agreed to, the bonus token included."""
    remaining: int
    """Tokens that the request could still emit when the round began; a small number may have cut the tree."""
    emitted: list[int]
    """Tokens emitted: as many as accepted, fewer where the request ended inside the path."""


@dataclass
class Round:
    """What one round did, and how long its phases took."""

    steps: list[Step]
    seconds: dict[str, float]
    """Seconds by phase: draft, expand, verify, accept, emit, commit."""
    state_bytes: int
    """Bytes of recurrent state that each of these requests held."""


@dataclass
class Statistics:
    """Sums over rounds."""

    rounds: int = 0
    tokens: int = 0
    rows: int = 0
    accepted: list[int] = field(default_factory=list)
    """Entry d counts the windows of which a node at depth d was accepted; entry 0 counts all windows."""
    seconds: dict[str, float] = field(default_factory=dict)
    state_bytes: int = 0
    """Bytes of recurrent state that a request held at most."""

    def add(self, round_: Round) -> None:
        """Takes in one round."""
        self.rounds += 1
        self.state_bytes = max(self.state_bytes, round_.state_bytes)
        for phase, seconds in round_.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        for step in round_.steps:
            self.tokens += len(step.emitted)
            self.rows += step.rows
            self.accepted += [0] * (step.accepted - len(self.accepted))
            for depth in range(step.accepted):
                self.accepted[depth] += 1

    @property
    def windows(self) -> int:
        """Windows verified: one per request and round."""
        return self.accepted[0] if self.accepted else 0

    @property
    def acceptance_length(self) -> float:
        """Tokens accepted per window, the bonus token included; 1 is plain decoding."""
        return sum(self.accepted) / self.windows if self.windows else 0.0

    @property
    def per_depth(self) -> list[float]:
        """Share of the windows of which a draft node at depth 1, 2, … was accepted."""
        return [count / self.windows for count in self.accepted[1:]]


Stop = Callable[[Request], str | None]
"""Asked after every token: why this request ends here, or None."""


def start(
    target: Target, drafter: Drafter, requests: Sequence[Request], stop: Stop, *, keep_scores: bool = False
) -> list[Step]:
    """Prefills the prompts and emits the first token of each.

    Raises:
        ValueError: an empty prompt.
    """
    for request in requests:
        if not request.tokens:
            raise ValueError(f"the prompt of request {request.index} is empty; give at least one token")
    outputs = target.prefill([request.index for request in requests], [request.tokens for request in requests])
    steps = []
    for request, output in zip(requests, outputs, strict=True):
        token = choose(output.logits[0, 0], request.sampling, request.generator)
        remaining = request.remaining
        emitted = _emit(request, [token], [0], output.logits[0], stop, keep_scores)
        drafter.observe(request, output.hidden[0])
        steps.append(Step(request.index, 0, 1, remaining, emitted))
    return steps


def decode_round(
    target: Target, drafter: Drafter, requests: Sequence[Request], stop: Stop, *, keep_scores: bool = False
) -> Round:
    """One round for all these requests: every one emits at least one token.

    Args:
        target: verifies and commits.
        drafter: proposes.
        requests: unfinished requests; their tokens, scores and finish reasons are updated.
        stop: asked after every token.
        keep_scores: keep the scores that each emitted token was chosen from.
    """
    clock = _Clock()

    drafts = [
        _within(draft, request.remaining) for draft, request in zip(drafter.draft(requests), requests, strict=True)
    ]
    clock.phase("draft")

    trees = TreeBatch.of([draft.tree for draft in drafts])
    width = trees.parents.shape[1]
    tokens = torch.tensor([draft.tokens + [0] * (width - len(draft.tokens)) for draft in drafts])
    clock.phase("expand")

    output = target.verify([request.index for request in requests], tokens, trees)
    clock.phase("verify")

    accepted = _accept(drafts, requests, output.logits)
    clock.phase("accept")

    steps = []
    for place, (request, draft, (path, token)) in enumerate(zip(requests, drafts, accepted, strict=True)):
        remaining = request.remaining
        proposed = [draft.tokens[row] for row in path[1:]] + [token]
        emitted = _emit(request, proposed, path, output.logits[place], stop, keep_scores)
        steps.append(Step(request.index, len(draft.tree), len(path), remaining, emitted))
    clock.phase("emit")

    # A request that ends inside its path commits no further than it emitted: its last token is always the next root.
    paths = [path[: len(step.emitted)] for (path, _), step in zip(accepted, steps, strict=True)]
    longest = max(map(len, paths))
    target.commit(
        torch.tensor([[*path, *(0,) * (longest - len(path))] for path in paths]),
        torch.tensor([len(path) for path in paths]),
    )
    for place, (request, path) in enumerate(zip(requests, paths, strict=True)):
        drafter.observe(request, output.hidden[place, list(path)])
    clock.phase("commit")
    return Round(steps, clock.seconds, target.state_bytes)


def decode(
    target: Target, drafter: Drafter, requests: Sequence[Request], stop: Stop, *, keep_scores: bool = False
) -> Iterator[Round]:
    """Rounds until every request has finished; requests drop out of the batch as they do."""
    while running := [request for request in requests if request.finish_reason is None]:
        yield decode_round(target, drafter, running, stop, keep_scores=keep_scores)


def _within(draft: Draft, remaining: int) -> Draft:
    """Cuts a draft to the depth that can still be emitted."""
    rows = sum(depth < max(remaining, 1) for depth in draft.tree.depths)
    if rows == len(draft.tree):
        return draft
    return Draft(draft.tree.truncated(rows), draft.tokens[:rows], None if draft.probs is None else draft.probs[:rows])


def _accept(drafts: Sequence[Draft], requests: Sequence[Request], logits: Tensor) -> list[Acceptance]:
    best = None
    accepted = []
    for place, (draft, request) in enumerate(zip(drafts, requests, strict=True)):
        rows = len(draft.tree)
        if request.sampling.greedy:
            best = logits.argmax(-1).tolist() if best is None else best
            accepted.append(accept_greedy(draft.tree, draft.tokens, best[place][:rows]))
        else:
            target = target_distribution(logits[place, :rows], request.sampling)
            accepted.append(accept_sampled(draft.tree, draft.tokens, target, draft.probs, request.generator))
    return accepted


def _emit(
    request: Request, tokens: Sequence[int], rows: Sequence[int], logits: Tensor, stop: Stop, keep_scores: bool
) -> list[int]:
    """Appends tokens until one ends the request; token i was chosen from row rows[i] of logits [T, V]."""
    emitted = []
    for token, row in zip(tokens, rows, strict=True):
        request.tokens.append(token)
        emitted.append(token)
        if keep_scores:
            request.scores.append(target_scores(logits[row], request.sampling).clone())
        request.finish_reason = stop(request) or ("length" if request.remaining <= 0 else None)
        if request.finish_reason is not None:
            break
    return emitted


class _Clock:
    """Wall time by phase. On a GPU a phase is charged for what the host waits in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def phase(self, name: str) -> None:
        now = perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
