"""The decoding round, on a toy target whose every distribution can be computed from scratch.

The toy has one GDN layer in float64, so a wrong state shows in its logits. Drafters that know the coming text are wrong
as often as they are told; whatever they propose, the emitted text must be the target's own.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.drafters import KnownText
from tests.toy_target import VOCAB, ToyTarget
from treewy.acceptance import SamplingParams, target_distribution
from treewy.drafting import Draft, FixedWidths, NodeBudget, Request, TreeShape
from treewy.generation import NoDrafter, Round, Statistics, Step, decode, decode_round, start
from treewy.state import CommitMode
from treewy.tree import DraftTree

MODES: tuple[CommitMode, ...] = ("store_all", "reconstruct", "deferred")
GREEDY = SamplingParams()
PROMPTS = [[1], [2, 3], [4, 5, 6, 0, 1, 2, 3], [6] * 20]


def requests_for(prompts, max_new_tokens, sampling=GREEDY, seed=0):
    return [
        Request(i, list(prompt), len(prompt), max_new_tokens, sampling, torch.Generator().manual_seed(seed + i))
        for i, prompt in enumerate(prompts)
    ]


def never(request):
    return None


def run(target, drafter, requests, stop=never, **kwargs):
    start(target, drafter, requests, stop, **kwargs)
    return list(decode(target, drafter, requests, stop, **kwargs))


def plain_texts(prompts, length):
    requests = requests_for(prompts, length)
    run(ToyTarget(num_requests=len(prompts)), NoDrafter(), requests)
    return [request.tokens for request in requests]


TEXTS = plain_texts(PROMPTS, 60)


def test_plain_decoding_follows_the_target_from_scratch():
    target = ToyTarget()
    for text, prompt in zip(TEXTS, PROMPTS, strict=True):
        for n in range(len(prompt), len(text), 9):
            assert text[n] == int(target.logits_after(text[:n]).argmax())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [FixedWidths((1, 1, 1)), FixedWidths((2, 2, 2)), NodeBudget(24, 9)], ids=str)
@pytest.mark.parametrize("plain_every", [0, 2], ids=["always drafts", "every second round plain"])
def test_speculation_emits_the_same_text(mode: CommitMode, shape: TreeShape, plain_every: int):
    """Classes 1, 2, 34: rounds with and without drafts alternate, paths are scattered rows, folds fall in between."""
    requests = requests_for(PROMPTS, 60)
    drafter = KnownText(TEXTS, shape, accuracy=0.8, vocab=VOCAB, plain_every=plain_every)
    rounds = run(ToyTarget(mode, max_rows=shape.rows), drafter, requests)
    assert [request.tokens for request in requests] == TEXTS
    assert all(request.finish_reason == "length" for request in requests)
    # Every emitted token but the last was committed and observed once.
    assert drafter.observed == {i: len(text) - 1 for i, text in enumerate(TEXTS)}
    assert sum(step.accepted > 1 for round_ in rounds for step in round_.steps) > 10


@pytest.mark.parametrize("mode", MODES)
def test_state_after_every_round_is_that_of_the_text(mode: CommitMode):
    target = ToyTarget(mode, max_rows=16)
    requests = requests_for(PROMPTS, 40)
    drafter = KnownText(TEXTS, NodeBudget(16, 15), accuracy=0.9, vocab=VOCAB)
    start(target, drafter, requests, never)
    for _ in decode(target, drafter, requests, never):
        for request in requests:
            fresh = ToyTarget("store_all", 1, 1)
            fresh.prefill([0], [request.tokens[:-1]])
            for mine, its in zip(target.state.read(0, request.index), fresh.state.read(0, 0), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-11)


def test_requests_end_one_by_one_and_nobody_notices():
    requests = requests_for(PROMPTS, 60)
    for request, length in zip(requests, (5, 60, 17, 33), strict=True):
        request.max_new_tokens = length
    rounds = run(ToyTarget(max_rows=15), KnownText(TEXTS, FixedWidths((2, 2, 2)), 0.7, VOCAB), requests)
    for request, text in zip(requests, TEXTS, strict=True):
        assert request.tokens == text[: request.prompt_length + request.max_new_tokens]
    assert len(rounds[0].steps) == 4
    assert [step.request for step in rounds[-1].steps] == [1]


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_inside_the_accepted_path_commits_no_further(mode: CommitMode):
    text = TEXTS[2]
    cut = len(PROMPTS[2]) + 7
    target = ToyTarget(mode, max_rows=13)
    request = Request(2, list(PROMPTS[2]), len(PROMPTS[2]), 60, SamplingParams(), torch.Generator())
    drafter = KnownText(TEXTS, FixedWidths((1,) * 12), accuracy=1.0, vocab=VOCAB)
    stop = lambda request: "enough" if len(request.tokens) == cut else None  # noqa: E731
    start(target, drafter, [request], stop)
    (round_,) = decode(target, drafter, [request], stop)
    assert request.finish_reason == "enough"
    assert request.tokens == text[:cut]
    assert round_.steps[0].accepted == 13
    assert len(round_.steps[0].emitted) == 6
    fresh = ToyTarget("store_all", 1, 1)
    fresh.prefill([0], [text[: cut - 1]])
    torch.testing.assert_close(target.state.read(0, 2), fresh.state.read(0, 0), rtol=1e-12, atol=1e-12)


def test_trees_are_cut_to_what_may_still_be_emitted():
    request = requests_for([PROMPTS[0]], 3)[0]
    target, drafter = ToyTarget(max_rows=40), KnownText(TEXTS, FixedWidths((3, 3, 3)), 1.0, VOCAB)
    start(target, drafter, [request], never)
    round_ = decode_round(target, drafter, [request], never)
    assert round_.steps[0].rows == 4  # two tokens are left: the root and its children
    assert request.tokens == TEXTS[0][:4]


def test_a_stop_at_the_first_token_starts_no_round():
    request = requests_for([PROMPTS[1]], 60)[0]
    (step,) = start(ToyTarget(), NoDrafter(), [request], lambda request: "stop_token")
    assert (request.finish_reason, len(step.emitted)) == ("stop_token", 1)
    assert list(decode(ToyTarget(), NoDrafter(), [request], never)) == []


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt of request 0 is empty"):
        start(ToyTarget(), NoDrafter(), requests_for([[]], 4), never)


def test_acceptance_stays_what_it_is_over_5000_rounds():
    """Class 28: a drafter that is right with probability 0.8 at depth 1 and again at depth 2, for ever."""
    # The toy's greedy text runs into a loop, so the text to come is known for any length.
    prompt = PROMPTS[1]
    text = plain_texts([prompt], 400)[0]
    period = next(p for p in range(1, 190) if text[-p:] == text[-2 * p : -p])
    text = text + [text[len(text) - period + i % period] for i in range(13_000)]
    request = Request(0, list(prompt), len(prompt), 10**6, SamplingParams(), torch.Generator())
    target = ToyTarget(num_requests=1, max_rows=3)
    drafter = KnownText([text], FixedWidths((1, 1)), accuracy=0.8, vocab=VOCAB)
    start(target, drafter, [request], never)
    lengths = []
    for round_ in itertools.islice(decode(target, drafter, [request], never), 5000):
        lengths.append(round_.steps[0].accepted)
    assert request.tokens == text[: len(request.tokens)]
    expected, spread = 1 + 0.8 + 0.64, (0.2 * 1 + 0.16 * 4 + 0.64 * 9 - 2.44**2) ** 0.5
    for part in range(0, 5000, 1000):
        mean = sum(lengths[part : part + 1000]) / 1000
        assert abs(mean - expected) < 4 * spread / 1000**0.5


class DrawnDrafts:
    """Draws two children per node without replacement from a fixed wrong distribution."""

    shape = FixedWidths((2, 2))

    def __init__(self):
        self.q = torch.tensor([0.3, 0.05, 0.1, 0.15, 0.2, 0.1, 0.1])

    def observe(self, request, hidden):
        pass

    def release(self, index):
        pass

    def draft(self, requests):
        tree = DraftTree.from_widths((2, 2))
        drafts = []
        for request in requests:
            tokens = [request.tokens[-1]]
            for _ in range(3):
                tokens += torch.multinomial(self.q, 2, generator=request.generator).tolist()
            drafts.append(Draft(tree, tokens, self.q.expand(len(tree), -1)))
        return drafts


class ChosenDrafts(DrawnDrafts):
    """The same tree in every round: children are chosen, not drawn."""

    def draft(self, requests):
        tree = DraftTree.from_widths((2, 2))
        return [Draft(tree, [request.tokens[-1], 0, 3, 1, 2, 5, 6]) for request in requests]


@pytest.mark.parametrize(
    ("drafter", "params"),
    [
        (NoDrafter(), SamplingParams(1.0)),
        (DrawnDrafts(), SamplingParams(1.0)),
        (DrawnDrafts(), SamplingParams(0.7, top_p=0.9, top_k=5)),
        (ChosenDrafts(), SamplingParams(0.7, top_p=0.9, top_k=5)),
    ],
    ids=["plain", "drawn", "drawn, filtered", "chosen, filtered"],
)
def test_sampled_text_has_the_distribution_of_the_target(drafter, params: SamplingParams):
    """All texts of three tokens are enumerated; 2 400 generated ones are compared with them by a chi-square test."""
    prompt, length, count, batch = [4], 3, 2400, 100
    target = ToyTarget(num_requests=batch, max_rows=7, sharpness=0.7)
    expected: dict[tuple[int, ...], float] = {}
    after: dict[tuple[int, ...], torch.Tensor] = {}
    for text in itertools.product(range(VOCAB), repeat=length):
        probability = 1.0
        for n in range(length):
            if probability:
                key = (*prompt, *text[:n])
                if key not in after:
                    after[key] = target_distribution(target.logits_after(key), params)
                probability *= float(after[key][text[n]])
        expected[text] = probability
    seen: dict[tuple[int, ...], int] = {}
    for part in range(count // batch):
        requests = requests_for([prompt] * batch, length, params, seed=part * batch)
        run(target, drafter, requests)
        for request in requests:
            text = tuple(request.tokens[len(prompt) :])
            seen[text] = seen.get(text, 0) + 1
    # Texts that are expected fewer than 10 times share one bin.
    statistic, bins, rare_seen, rare_expected = 0.0, 0, 0, 0.0
    for text in itertools.product(range(VOCAB), repeat=length):
        e = expected[text] * count
        if e < 10:
            rare_seen, rare_expected = rare_seen + seen.get(text, 0), rare_expected + e
            assert e > 0 or text not in seen, f"{text} is impossible, and was emitted"
        else:
            statistic, bins = statistic + (seen.get(text, 0) - e) ** 2 / e, bins + 1
    if rare_expected > 0:
        statistic, bins = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, bins + 1
    freedom = bins - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_a_request_samples_the_same_alone_and_in_company():
    """Class 9: its randomness is its own, and no state mixes."""
    params = SamplingParams(0.9)
    together = requests_for(PROMPTS, 30, params)
    run(ToyTarget(max_rows=7), DrawnDrafts(), together)
    for i, prompt in enumerate(PROMPTS):
        alone = Request(0, list(prompt), len(prompt), 30, params, torch.Generator().manual_seed(i))
        run(ToyTarget(max_rows=7), DrawnDrafts(), [alone])
        assert alone.tokens == together[i].tokens


def test_scores_are_those_each_token_was_chosen_from():
    requests = requests_for(PROMPTS[:2], 12)
    target = ToyTarget(max_rows=15)
    run(target, KnownText(TEXTS, FixedWidths((2, 2, 2)), 0.8, VOCAB), requests, keep_scores=True)
    for request in requests:
        assert len(request.scores) == 12
        for n, scores in enumerate(request.scores):
            torch.testing.assert_close(
                scores, target.logits_after(request.tokens[: request.prompt_length + n]).float(), rtol=1e-6, atol=1e-6
            )


def test_statistics_count_windows_depths_and_rows():
    statistics = Statistics()
    assert statistics.acceptance_length == 0.0
    statistics.add(Round([Step(0, 15, 3, 50, [1, 2, 3]), Step(1, 4, 1, 50, [7])], {"verify": 1.0}, 700))
    statistics.add(Round([Step(0, 15, 4, 2, [1, 2])], {"verify": 0.5, "draft": 0.25}, 600))
    assert (statistics.rounds, statistics.windows, statistics.tokens, statistics.rows) == (2, 3, 6, 34)
    assert statistics.acceptance_length == pytest.approx(8 / 3)
    assert statistics.per_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert statistics.seconds == {"verify": 1.5, "draft": 0.25}
    assert statistics.state_bytes == 700


def test_a_round_says_how_long_each_phase_took():
    request = requests_for([PROMPTS[0]], 60)[0]
    target, drafter = ToyTarget(max_rows=4), KnownText(TEXTS, FixedWidths((1, 1, 1)), 1.0, VOCAB)
    start(target, drafter, [request], never)
    round_ = decode_round(target, drafter, [request], never)
    assert set(round_.seconds) == {"draft", "expand", "verify", "accept", "emit", "commit"}
    assert all(seconds > 0 for seconds in round_.seconds.values())
    assert round_.state_bytes == sum(tensor[:, 0].nbytes for tensor in target.state.tensors.values())
