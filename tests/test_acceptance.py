"""Acceptance: greedy walks by hand, sampling by exact enumeration, and the random numbers by statistics.

Lossless means that the emitted tokens are distributed as if each had been sampled from the target. Three kinds of test:

- Exact. All chance in a round passes through `draw` (one token from weights) and `_happens` (one biased coin). Here
  both are replaced by an enumerator that runs the code once for every combination of outcomes and multiplies their
  probabilities. Drafting and acceptance together must then give the target's distribution of the first two tokens to
  1e-12, for vocabularies of 2 to 4 tokens, chains and trees, any temperature, top-k and top-p.
- Statistical. `draw` and `_happens` themselves, and whole rounds with real random numbers, against chi-square bounds
  with fixed seeds.
- Power. The same tests must fail when acceptance is broken on purpose, down to one per cent of probability moved.
"""

import itertools
import math

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from treewy import acceptance, drafting
from treewy.acceptance import (
    Acceptance,
    SamplingParams,
    accept_greedy,
    accept_sampled,
    choose,
    draw,
    target_distribution,
    target_scores,
)
from treewy.drafting import FixedWidths, grow_drafts
from treewy.tree import DraftTree


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Parameters


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1: it is 0 or a finite number from 1e-05; use 0 for greedy"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": 1e-9}, "temperature 1e-09"),
        ({"top_p": 0.0}, "top_p 0.0: it is above 0 and at most 1; use 1 to keep all"),
        ({"top_p": 1.1}, r"top_p 1\.1"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"top_k": -1}, "top_k -1: it is a whole number from 0; use 0 to keep all"),
        ({"top_k": 1.5}, r"top_k 1\.5"),
        ({"seed": -1}, r"seed -1: it is from 0 to 2\*\*63 - 1; use None"),
        ({"seed": 1 << 63}, "seed 9223372036854775808"),
    ],
)
def test_params_out_of_range_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_params_are_greedy_at_temperature_0():
    assert SamplingParams().greedy
    assert SamplingParams(top_p=0.5, top_k=3).greedy
    assert not SamplingParams(temperature=1e-5).greedy


# The target's distribution


def warped(logits, params):
    """The scores of transformers' own logits warpers, in the order in which `generate` applies them."""
    scores = TemperatureLogitsWarper(float(params.temperature))(None, logits.float())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores


@pytest.mark.parametrize("vocab", [1, 5, 300, 2000])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 4, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_target_distribution_equals_the_warpers_of_transformers(vocab, temperature, top_k, top_p):
    params = SamplingParams(temperature, top_p, top_k)
    for spread in 0.1, 4:
        logits = spread * torch.randn(16, vocab, generator=generator(vocab))
        expected = warped(logits, params)
        assert torch.equal(target_scores(logits, params), expected)
        probs = target_distribution(logits, params)
        assert probs.dtype == torch.float32
        assert torch.equal(probs, expected.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [6, 700])
def test_target_distribution_with_ties_equals_the_warpers_of_transformers(vocab, dtype):
    """Whole numbers as logits: most rows tie at the edges of top-k and top-p. How many of the tokens that tie at the
    edge of top-p stay is settled; which ones is open in theirs, whose sort is not stable."""
    logits = torch.randint(-3, 3, (64, vocab), generator=generator()).to(dtype)
    for top_k, top_p in itertools.product([0, 1, 3, 50], [1.0, 0.95, 0.5, 0.05]):
        params = SamplingParams(1.0, top_p, top_k)
        scores = target_scores(logits, params)
        assert torch.equal(scores.sort().values, warped(logits, params).sort().values)
        assert torch.equal(scores[scores > -math.inf], logits[scores > -math.inf].float())


def test_ties_with_the_last_token_of_top_k_all_stay():
    probs = target_distribution(torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0]), SamplingParams(1.0, top_k=2))
    assert (probs > 0).tolist() == [True, True, True, False, True]


def test_top_p_keeps_the_token_that_reaches_it_and_always_one():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    for top_p, kept in (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1e-9, 1):
        assert int((target_distribution(logits, SamplingParams(1.0, top_p)) > 0).sum()) == kept


def test_forbidden_tokens_stay_forbidden():
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf])
    for params in (
        SamplingParams(1.0),
        SamplingParams(1.0, 0.9),
        SamplingParams(1.0, 1.0, 3),
        SamplingParams(0.5, 0.99, 3),
    ):
        probs = target_distribution(logits, params)
        assert probs[[1, 3]].tolist() == [0, 0]
        assert float(probs.sum()) == pytest.approx(1)


def test_target_distribution_takes_any_leading_shape():
    logits = torch.randn(2, 3, 400, generator=generator())
    params = SamplingParams(0.8, 0.9, 20)
    flat = target_distribution(logits.flatten(0, 1), params)
    assert torch.equal(target_distribution(logits, params), flat.view(2, 3, 400))
    assert torch.equal(target_distribution(logits[1, 2], params), flat[5])


def test_greedy_params_have_no_distribution_but_scores():
    with pytest.raises(ValueError, match="temperature 0 has no distribution to sample from; take the argmax"):
        target_distribution(torch.zeros(3), SamplingParams())
    assert target_scores(torch.tensor([1.0, 2.0]), SamplingParams()).tolist() == [1, 2]


def test_choose_takes_the_best_or_draws():
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert choose(logits, SamplingParams(), generator()) == 1
    drawn = {choose(logits, SamplingParams(2.0), g) for g in [generator()] for _ in range(100)}
    assert drawn == {0, 1, 2}


# Greedy


def test_greedy_goes_down_while_the_target_agrees():
    tree = DraftTree.from_widths((2, 2))
    tokens = [7, 1, 2, 1, 3, 5, 6]
    assert accept_greedy(tree, tokens, [9, 0, 0, 0, 0, 0, 0]) == Acceptance((0,), 9)
    assert accept_greedy(tree, tokens, [1, 9, 0, 0, 0, 0, 0]) == Acceptance((0, 1), 9)
    assert accept_greedy(tree, tokens, [1, 1, 0, 8, 0, 0, 0]) == Acceptance((0, 1, 3), 8)
    assert accept_greedy(tree, tokens, [2, 0, 6, 0, 0, 0, 4]) == Acceptance((0, 2, 6), 4)
    # A token that stands on another branch only is no match.
    assert accept_greedy(tree, tokens, [2, 0, 3, 0, 0, 0, 4]) == Acceptance((0, 2), 3)


def test_bare_root_emits_the_targets_token():
    tree = DraftTree.chain(0)
    assert accept_greedy(tree, [7], [4]) == Acceptance((0,), 4)
    assert accept_sampled(tree, [7], torch.eye(5)[[4]], None, generator()) == Acceptance((0,), 4)
    assert accept_sampled(tree, [7], torch.eye(5)[[4]], torch.zeros(1, 5), generator()) == Acceptance((0,), 4)


@pytest.mark.parametrize("depth", range(7))
def test_every_depth_of_a_chain_can_be_accepted(depth):
    best = [*range(1, depth + 1), *[99] * (7 - depth)]
    assert accept_greedy(DraftTree.chain(6), list(range(7)), best) == Acceptance(tuple(range(depth + 1)), 99)


def test_siblings_with_equal_tokens_and_lengths_that_differ_are_refused():
    tree = DraftTree.from_widths((2, 1))
    target = torch.full((5, 8), 0.125)
    with pytest.raises(ValueError, match="siblings have equal tokens"):
        accept_greedy(tree, [0, 3, 3, 1, 2], [0] * 5)
    with pytest.raises(ValueError, match="siblings have equal tokens"):
        accept_sampled(tree, [0, 3, 3, 1, 2], target, target, generator())
    # Equal tokens of cousins are fine.
    accept_sampled(tree, [0, 3, 4, 1, 1], target, target, generator())
    with pytest.raises(ValueError, match="tokens has 4 rows, the tree 5"):
        accept_greedy(tree, [0, 3, 4, 1], [0] * 5)
    with pytest.raises(ValueError, match="best has 4 rows, the tree 5"):
        accept_greedy(tree, [0, 3, 4, 1, 2], [0] * 4)
    with pytest.raises(ValueError, match="target has 4 rows, the tree 5"):
        accept_sampled(tree, [0, 3, 4, 1, 2], target[:4], None, generator())
    with pytest.raises(ValueError, match=r"draft has shape \(5, 7\), target \(5, 8\)"):
        accept_sampled(tree, [0, 3, 4, 1, 2], target, target[:, :7], generator())


# Sampling, exactly


class Chance:
    """Stands for all randomness: runs a function once for every combination of outcomes of its random choices."""

    def __init__(self, monkeypatch):
        for module in acceptance, drafting:
            monkeypatch.setattr(module, "draw", self.draw)
        monkeypatch.setattr(acceptance, "_happens", self.happens)

    def outcomes(self, run):
        """(probability, result) of every combination."""
        waiting = [[]]
        while waiting:
            self.script, self.taken, self.probability, self.waiting = waiting.pop(), [], 1.0, waiting
            result = run()
            yield self.probability, result

    def pick(self, probs):
        """One of several outcomes: the one in the script, or the first possible one, and the others wait."""
        possible = [outcome for outcome, prob in enumerate(probs) if prob > 0]
        step = len(self.taken)
        if step < len(self.script):
            outcome = self.script[step]
        else:
            outcome = possible[0]
            self.waiting += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(outcome)
        self.probability *= probs[outcome]
        return outcome

    def draw(self, weights, _):
        rows = weights.double().reshape(-1, weights.shape[-1])
        # Where nothing is left to draw, the real function runs past the end.
        picked = [self.pick((row / row.sum()).tolist()) if row.sum() > 0 else len(row) for row in rows]
        return torch.tensor(picked).view(weights.shape[:-1])

    def happens(self, probability, _):
        probability = min(max(probability, 0.0), 1.0)
        return self.pick([1 - probability, probability]) == 1


@pytest.fixture
def chance(monkeypatch):
    return Chance(monkeypatch)


class Model:
    """A toy model: logits of the next token after a text of tokens below `vocab`, of which only the last two count."""

    def __init__(self, vocab, seed, spread=1.5):
        self.vocab = vocab
        self.table = spread * torch.randn(vocab + 1, vocab + 1, vocab, generator=generator(seed))

    def logits(self, text):
        padded = [self.vocab, self.vocab, *text]
        return self.table[padded[-2], padded[-1]]


def grown_draft(model, widths, params, root):
    """The draft of one request whose text is the root alone; the model sees the path of every node."""
    texts = [[root]]

    def next_logits(level):
        first = len(texts)
        for token, parent in zip(level.tokens[0].tolist(), level.parents[0].tolist(), strict=True):
            texts.append([*texts[parent], token])
        return torch.stack([model.logits(text) for text in texts[first:]])[None]

    root_logits = model.logits([root])[None]
    return grow_drafts(
        [root], root_logits, FixedWidths(widths), next_logits, sampling=[params], generators=[generator()]
    )[0]


def one_round(target, params, draft, rows=None):
    """Tokens that a round emits for this draft, cut to `rows` rows."""
    tree = draft.tree if rows is None else draft.tree.truncated(rows)
    tokens = draft.tokens[: len(tree)]
    logits = torch.stack([target.logits([tokens[row] for row in tree.path(row)]) for row in range(len(tree))])
    probs = None if draft.probs is None else draft.probs[: len(tree)]
    path, token = acceptance.accept_sampled(tree, tokens, target_distribution(logits, params), probs, generator())
    return [tokens[row] for row in path[1:]] + [token]


def first_two(target, params, root, rounds):
    """[V, V] distribution of the first two tokens; a round that emits one is followed by the target's own token."""
    joint = torch.zeros(target.vocab, target.vocab, dtype=torch.float64)
    for probability, emitted in rounds:
        if len(emitted) > 1:
            joint[emitted[0], emitted[1]] += probability
        else:
            joint[emitted[0]] += probability * exact(target, params, [root, emitted[0]])
    return joint


def exact(model, params, text):
    probs = target_distribution(model.logits(text), params).double()
    return probs / probs.sum()


def expected_first_two(target, params, root):
    after = torch.stack([exact(target, params, [root, token]) for token in range(target.vocab)])
    return exact(target, params, [root])[:, None] * after


PARAMS = [
    SamplingParams(1.0),
    SamplingParams(0.6),
    SamplingParams(1.0, top_k=2),
    SamplingParams(0.9, 0.8),
    SamplingParams(2.0, 0.9, 3),
]


def enumerated(chance, vocab, widths, params, *, target=None, rows=None, root=0):
    target = target or Model(vocab, seed=1)
    drafter = Model(vocab, seed=2)
    run = lambda: one_round(target, params, grown_draft(drafter, widths, params, root), rows)  # noqa: E731
    outcomes = list(chance.outcomes(run))
    assert sum(probability for probability, _ in outcomes) == pytest.approx(1, abs=1e-12)
    return first_two(target, params, root, outcomes), expected_first_two(target, params, root)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(
    ("vocab", "widths"), [(2, (1,)), (3, (2, 1)), (4, (1, 1)), (4, (2,)), (4, (3,)), (3, (5,)), (2, (2, 2))]
)
def test_emitted_tokens_are_distributed_as_the_target_exactly(chance, vocab, widths, params):
    emitted, expected = enumerated(chance, vocab, widths, params)
    assert (emitted - expected).abs().max() <= 1e-12


def test_a_tree_of_two_levels_and_two_branches_exactly(chance):
    emitted, expected = enumerated(chance, 3, (2, 2), SamplingParams(0.8))
    assert (emitted - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("rows", range(1, 6))
def test_a_truncated_tree_is_lossless_too(chance, rows):
    emitted, expected = enumerated(chance, 3, (2, 1), SamplingParams(1.0), rows=rows)
    assert (emitted - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (4,)])
def test_chosen_children_are_lossless_exactly(chance, widths, params):
    """Children that are the most probable tokens of a draft, whatever the sampling: probs is None."""
    target, drafter = Model(4, seed=1), Model(4, seed=2)
    draft = grown_draft(drafter, widths, SamplingParams(), 0)
    assert draft.probs is None
    emitted = first_two(target, params, 0, list(chance.outcomes(lambda: one_round(target, params, draft))))
    assert (emitted - expected_first_two(target, params, 0)).abs().max() <= 1e-12


ROWS = {
    "alike": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
    "different": ([0.7, 0.2, 0.1], [0.1, 0.3, 0.6]),
    "disjoint": ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1]),
    "target certain": ([0.0, 1.0, 0.0], [0.3, 0.3, 0.4]),
    "target certain where the draft never is": ([0.0, 1.0, 0.0], [0.5, 0.0, 0.5]),
    "draft certain": ([0.2, 0.5, 0.3], [0.0, 1.0, 0.0]),
    "draft almost certain": ([0.2, 0.5, 0.3], [1e-38, 1.0, 1e-30]),
    "target almost certain": ([1e-38, 1.0, 1e-30], [0.2, 0.5, 0.3]),
    "not normalised": ([2.0, 5.0, 3.0], [0.1, 0.1, 0.1]),
}


def one_node(chance, p, q, children):
    """Distribution of the first token where the root's children are drawn one after the other from q."""
    p, q = torch.tensor(p), torch.tensor(q)
    tree = DraftTree.from_widths((children,))

    def run():
        left, tokens = q.double(), [0]
        for _ in range(children):
            if left.sum() > 0:
                tokens.append(int(acceptance.draw(left, None)))
            else:  # nothing is left to draw: any other token may stand there
                tokens.append(next(token for token in range(len(q)) if token not in tokens[1:]))
            left[tokens[-1]] = 0
        rows = torch.ones(len(tree), 1)
        path, token = acceptance.accept_sampled(tree, tokens, p * rows, q * rows, None)
        return tokens[path[1]] if len(path) > 1 else token

    distribution = torch.zeros(len(p), dtype=torch.float64)
    for probability, token in chance.outcomes(run):
        distribution[token] += probability
    return distribution, p.double() / p.double().sum()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("children", [1, 2, 3])
def test_extreme_distributions_exactly(chance, name, children):
    emitted, expected = one_node(chance, *ROWS[name], children)
    assert torch.isfinite(emitted).all()
    assert (emitted - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_random_distributions_exactly(chance, seed):
    vocab = 2 + seed % 4
    p, q = torch.distributions.Dirichlet(torch.full((vocab,), 0.4)).sample((2,))
    for children in range(1, min(vocab, 3) + 1):
        emitted, expected = one_node(chance, p.tolist(), q.tolist(), children)
        assert (emitted - expected).abs().max() <= 1e-12


def test_a_rejection_by_rounding_alone_still_emits_a_token_of_the_target(monkeypatch):
    """Where p equals q to the last bit, nothing is left of p - q, and a child can only be rejected by rounding."""
    monkeypatch.setattr(acceptance, "_happens", lambda probability, _: False)
    p = torch.tensor([[0.25, 0.75, 0.0]]).repeat(2, 1)
    tokens = [accept_sampled(DraftTree.chain(1), [0, 1], p, p, g).token for g in [generator()] for _ in range(100)]
    assert set(tokens) == {0, 1}


def test_acceptance_of_a_child_is_as_likely_as_it_can_be(chance):
    """One drawn child is accepted with probability sum(min(p, q)), the overlap of the two distributions."""
    p, q = torch.tensor(ROWS["different"][0]), torch.tensor(ROWS["different"][1])

    def run():
        token = int(acceptance.draw(q, None))
        return len(acceptance.accept_sampled(DraftTree.chain(1), [0, token], p.repeat(2, 1), q.repeat(2, 1), None).path)

    accepted = sum(probability for probability, length in chance.outcomes(run) if length == 2)
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-6)


# The same tests against acceptance that is broken on purpose


def without_residual(children, tokens, target, draft, g):
    """Every sibling is offered against the unchanged target, and so is the bonus token."""
    p, q = target.double(), draft.double().clone()
    for child in children:
        if acceptance._happens(float(p[tokens[child]] / (q / q.sum())[tokens[child]]), g):
            return child, p
        q[tokens[child]] = 0
    return None, p


def with_replacement(children, tokens, target, draft, g):
    """Siblings are judged as if they had been drawn with replacement."""
    p, q = target.double() / target.double().sum(), draft.double()
    for child in children:
        if acceptance._happens(float(p[tokens[child]] / q[tokens[child]]), g):
            return child, p
        if (p - q).relu().sum() > 0:
            p = (p - q).relu() / (p - q).relu().sum()
    return None, p


offer = acceptance._offer


def one_per_cent_moved(children, tokens, target, draft, g):
    """The target's probability of its second token moves to its first, by 0.01."""
    moved = target.double().clone()
    moved[0] += 0.01
    moved[1] -= 0.01
    return offer(children, tokens, moved, draft, g)


@pytest.mark.parametrize("broken", [without_residual, with_replacement, one_per_cent_moved])
def test_enumeration_sees_broken_acceptance(chance, monkeypatch, broken):
    monkeypatch.setattr(acceptance, "_offer", broken)
    emitted, expected = enumerated(chance, 4, (2,), SamplingParams(1.0))
    assert (emitted - expected).abs().max() > 1e-3


# The random numbers


def chi_square_p_value(counts, probs):
    """Probability of a deviation at least as large, if `counts` came from `probs`; impossible cells must be empty."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    assert counts[probs == 0].sum() == 0
    counts, probs = counts[probs > 0], probs[probs > 0]
    expected = counts.sum() * probs / probs.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def test_draw_follows_its_weights_and_the_test_sees_a_thousandth():
    weights = torch.tensor([[0.5, 0.0, 0.2, 0.3], [0.0, 3.0, 1.0, 2.0]])
    drawn = draw(weights.repeat(300_000, 1), generator()).view(300_000, 2)
    for row in range(2):
        counts, probs = torch.bincount(drawn[:, row], minlength=4), weights[row] / weights[row].sum()
        assert chi_square_p_value(counts, probs) > 1e-3
        assert chi_square_p_value(counts, probs + torch.tensor([0.0, 0.0, 0.004, -0.004])) < 1e-3


def test_coin_follows_its_probability():
    g = generator()
    heads = sum(acceptance._happens(0.3, g) for _ in range(100_000))
    assert chi_square_p_value(torch.tensor([heads, 100_000 - heads]), torch.tensor([0.3, 0.7])) > 1e-3
    assert all(acceptance._happens(1.0, g) and not acceptance._happens(0.0, g) for _ in range(1000))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_draw_at_the_ends_of_the_uniform_numbers_stays_where_there_is_weight(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, uniform, dtype=torch.float64))
    weights = torch.zeros(2000, 50)
    weights[:, 3] = torch.linspace(1e-30, 2, 2000)
    weights[:, 40] = torch.linspace(2, 1e-30, 2000)
    drawn = draw(weights, generator())
    assert set(drawn.tolist()) <= {3, 40}
    assert uniform == 0.5 or set(drawn[1:-1].tolist()) == {3 if uniform == 0 else 40}


def test_randomness_comes_from_the_generator_alone():
    tree = DraftTree.from_widths((2, 2))
    target, draft = torch.rand(2, 7, 50, generator=generator()).softmax(-1)
    rounds = []
    for noise in range(2):
        torch.manual_seed(noise)
        g = generator(3)
        rounds.append(
            [accept_sampled(tree, list(range(7)), target, probs, g) for _ in range(50) for probs in (draft, None)]
        )
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0])) > 5


def sampled_first_two(samples, widths, params, seed):
    """Counts [V, V] of the first two tokens of many rounds over a tree of two levels, all random numbers being real."""
    vocab, root, g = 6, 0, generator(seed)
    target, drafter = Model(vocab, seed=1), Model(vocab, seed=2)
    p0, q0 = (target_distribution(model.logits([root]), params) for model in (target, drafter))
    p1, q1 = (
        torch.stack([target_distribution(model.logits([root, token]), params) for token in range(vocab)])
        for model in (target, drafter)
    )
    tree = DraftTree.from_widths(widths)
    first, has_mass = drafting._draw_children(q0.expand(samples, -1), widths[0], g)
    second, has_mass_too = drafting._draw_children(q1[first.flatten()], widths[1], g)
    assert has_mass.all()
    assert has_mass_too.all()
    second = second.view(samples, -1)
    tokens = torch.cat([torch.zeros(samples, 1, dtype=torch.int64), first, second], 1).tolist()
    leaves = torch.full((samples, second.shape[1], vocab), 1 / vocab)  # what follows a third token is not looked at
    p = torch.cat([p0.expand(samples, 1, -1), p1[first], leaves], 1)
    q = torch.cat([q0.expand(samples, 1, -1), q1[first], leaves], 1)

    after = [draw(p1[token].expand(samples, -1), g).tolist() for token in range(vocab)]
    counts = torch.zeros(vocab, vocab)
    for i in range(samples):
        path, token = accept_sampled(tree, tokens[i], p[i], q[i], g)
        emitted = [tokens[i][row] for row in path[1:]] + [token]
        counts[emitted[0], emitted[1] if len(emitted) > 1 else after[emitted[0]][i]] += 1
    return counts, expected_first_two(target, params, root)


CHAIN = (12_000, (1, 1), SamplingParams(0.9))
TREE = (30_000, (2, 2), SamplingParams(1.2, 0.95, 5))


def p_values(samples, widths, params):
    """Of the first token, and of the first two."""
    counts, expected = sampled_first_two(samples, widths, params, seed=0)
    return chi_square_p_value(counts.sum(1), expected.sum(1)), chi_square_p_value(counts, expected)


@pytest.mark.parametrize("case", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_with_real_random_numbers_follow_the_target(case):
    assert min(p_values(*case)) > 1e-3


@pytest.mark.parametrize(
    ("broken", "case"),
    [(one_per_cent_moved, CHAIN), (without_residual, (2000, *CHAIN[1:])), (with_replacement, (10_000, *TREE[1:]))],
)
def test_statistics_see_broken_acceptance(monkeypatch, broken, case):
    monkeypatch.setattr(acceptance, "_offer", broken)
    assert min(p_values(*case)) < 1e-3
