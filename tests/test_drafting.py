"""Drafting: trees grown from a toy model whose logits are a function of the whole path; n-gram drafts of small texts.

The toy model keeps the text of every column that it is asked to run, so a wrong parent or a wrong column shows as wrong
tokens. It also checks each level against the contract (numbering, padding, depth). Trees of fixed widths are compared
with a recursive definition, best-first trees with the best of the full tree by brute force, drawn children with the
exact probabilities of drawing without replacement.
"""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treewy.acceptance import SamplingParams, target_distribution
from treewy.drafting import Draft, FixedWidths, NgramDrafter, NodeBudget, Request, grow_drafts
from treewy.tree import DraftTree


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@functools.cache
def logits_after(text, vocab, seed):
    return 2 * torch.randn(vocab, generator=generator(hash((text, seed)) % (1 << 40)))


class ToyModel:
    """Logits of what follows a text; columns as `Level` numbers them."""

    def __init__(self, roots, vocab, seed=0):
        self.vocab, self.seed = vocab, seed
        self.columns = [[(root,)] for root in roots]  # text of each column, None in padding
        self.ran = []  # per level and request: the texts that were run

    def after(self, text):
        return logits_after(text, self.vocab, self.seed)

    @property
    def root_logits(self):
        return torch.stack([self.after(columns[0]) for columns in self.columns])

    def __call__(self, level):
        assert level.depth == len(self.ran) + 1
        assert level.tokens.dtype == level.parents.dtype == torch.int64
        assert level.valid.dtype == torch.bool
        assert level.tokens.shape == level.parents.shape == level.valid.shape
        assert level.valid.any()
        rows, texts = [], []
        for columns, tokens, parents, valid in zip(self.columns, level.tokens, level.parents, level.valid, strict=True):
            before = len(columns)
            for token, parent, real in zip(tokens.tolist(), parents.tolist(), valid.tolist(), strict=True):
                assert parent < before
                if not real:
                    assert token == parent == 0
                    columns.append(None)
                    continue
                assert columns[parent] is not None
                assert len(columns[parent]) == level.depth
                columns.append((*columns[parent], token))
            texts.append([text for text in columns[before:] if text is not None])
            assert len(set(texts[-1])) == len(texts[-1])
            rows.append(
                torch.stack(
                    [self.after(text) if text else torch.full((self.vocab,), math.nan) for text in columns[before:]]
                )
            )
        self.ran.append(texts)
        return torch.stack(rows)


def grow(roots, shape, vocab=7, seed=0, **options):
    model = ToyModel(roots, vocab, seed)
    drafts = grow_drafts(roots, model.root_logits, shape, model, **options)
    for draft, root in zip(drafts, roots, strict=True):
        check(draft, root)
    return drafts, model


def texts_of(draft):
    """The text of every row."""
    return [tuple(draft.tokens[row] for row in draft.tree.path(row)) for row in range(len(draft.tree))]


def check(draft, root):
    assert isinstance(draft, Draft)
    assert len(draft.tokens) == len(draft.tree)
    assert draft.tokens[0] == root
    assert all(type(token) is int for token in draft.tokens)
    texts = texts_of(draft)
    assert len(set(texts)) == len(texts), "siblings have different tokens"
    assert list(draft.tree.parents) == sorted(draft.tree.parents), "siblings stand together"


# Fixed widths


def most_probable(roots, widths, vocab, seed=0):
    """The texts of a tree of fixed widths, level by level, by definition."""
    levels = [[(root,) for root in roots]]
    for width in widths:
        levels.append(
            [
                (*text, token)
                for text in levels[-1]
                for token in logits_after(text, vocab, seed).sort(descending=True).indices[:width].tolist()
            ]
        )
    return [text for level in levels for text in level]


@pytest.mark.parametrize("widths", [(), (1,), (1, 1, 1, 1), (3,), (2, 2, 2), (3, 2, 1), (1, 4)])
def test_fixed_widths_take_the_most_probable_children(widths):
    drafts, model = grow([3, 5], FixedWidths(widths))
    for draft, root in zip(drafts, [3, 5], strict=True):
        assert draft.tree == DraftTree.from_widths(widths)
        assert texts_of(draft) == most_probable([root], widths, 7)
        assert draft.probs is None
    # One call per level, the last level's nodes are not run.
    assert len(model.ran) == max(0, len(widths) - 1)
    for b, root in enumerate([3, 5]):
        assert [text for texts in model.ran for text in texts[b]] == most_probable([root], widths[:-1], 7)[1:]


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2)])
def test_limits_cut_each_request_and_save_its_rows(widths):
    limits = [0, 1, 2, 3, 9, -1]
    drafts, model = grow(list(range(6)), FixedWidths(widths), limits=limits)
    for b, limit in enumerate(limits):
        kept = widths[: max(0, limit)]
        assert drafts[b].tree == DraftTree.from_widths(kept)
        assert texts_of(drafts[b]) == most_probable([b], kept, 7)
        ran = [text for texts in model.ran for text in texts[b]]
        assert ran == most_probable([b], kept[:-1], 7)[1:]


def test_no_level_is_run_where_no_request_needs_it():
    _, model = grow([1, 2], FixedWidths((2, 2, 2, 1)), limits=[1, 2])
    assert len(model.ran) == 1
    _, model = grow([1, 2], FixedWidths((2, 2)), limits=[0, 0])
    assert model.ran == []


def test_a_vocabulary_smaller_than_the_width_gives_fewer_children():
    (draft,), _ = grow([0], FixedWidths((5, 2)), vocab=3)
    assert draft.tree == DraftTree.from_widths((3, 2))


@pytest.mark.parametrize("shape", [FixedWidths((2, 2)), NodeBudget(6, 3)])
def test_half_precision_logits_give_the_tree_of_their_values(shape):
    half = torch.randn(1, 4, 7, generator=generator()).bfloat16()
    drafts = [
        grow_drafts([1], logits[:, 0], shape, lambda level, logits=logits: logits[:, : level.tokens.shape[1]])
        for logits in (half, half.float())
    ]
    assert drafts[0] == drafts[1]
    assert drafts[0][0].tree.depth > 1


# Drawn children


def test_drawn_children_carry_the_distribution_they_were_drawn_from():
    params = [SamplingParams(0.8, 0.95, 5), SamplingParams(), SamplingParams(1.5)]
    generators = [generator(seed) for seed in range(3)]
    drafts, model = grow([3, 4, 5], FixedWidths((2, 2)), sampling=params, generators=generators)
    assert drafts[1].probs is None
    assert texts_of(drafts[1]) == most_probable([4], (2, 2), 7)
    for b in 0, 2:
        draft = drafts[b]
        assert draft.tree == DraftTree.from_widths((2, 2))
        assert draft.probs.shape == (7, 7)
        assert draft.probs.dtype == torch.float32
        for row, text in enumerate(texts_of(draft)):
            expected = target_distribution(model.after(text), params[b]) if draft.tree.children[row] else torch.zeros(7)
            assert torch.equal(draft.probs[row], expected)


def test_draws_depend_on_the_requests_own_generator_alone():
    shape, params = FixedWidths((2, 1, 2)), SamplingParams(1.3)
    together, _ = grow([1, 2, 3], shape, sampling=[params] * 3, generators=[generator(seed) for seed in range(3)])
    for b in range(3):
        (alone,), _ = grow([b + 1], shape, sampling=[params], generators=[generator(b)])
        assert (alone.tree, alone.tokens) == (together[b].tree, together[b].tokens)
        assert torch.equal(alone.probs, together[b].probs)
        # Nor on how deep the neighbours go.
        own, deeper = generator(b), generator(9)
        (_, cut), _ = grow([9, b + 1], shape, limits=[3, 1], sampling=[params] * 2, generators=[deeper, own])
        (cut_alone,), _ = grow(
            [b + 1], shape, limits=[1], sampling=[params], generators=[alone_generator := generator(b)]
        )
        assert cut.tokens == cut_alone.tokens
        assert torch.equal(own.get_state(), alone_generator.get_state())
    (other,), _ = grow([1], shape, sampling=[params], generators=[generator(99)])
    assert other.tokens != together[0].tokens


def test_tokens_without_probability_are_no_children():
    """Top-k 1 leaves one token, top-k 2 two: wider nodes have fewer children, also below."""
    for top_k in 1, 2:
        (draft,), _ = grow(
            [1], FixedWidths((3, 3)), sampling=[SamplingParams(1.0, top_k=top_k)], generators=[generator()]
        )
        assert draft.tree == DraftTree.from_widths((top_k, top_k))
        assert draft.probs.shape == (len(draft.tree), 7)
        for row, children in enumerate(draft.tree.children):
            assert all(draft.probs[row, draft.tokens[child]] > 0 for child in children)


def test_ragged_trees_of_drawn_children():
    """Top-p keeps another number of tokens at every node; parents, tokens and distributions still belong together."""
    params = SamplingParams(1.0, 0.7)
    shapes = set()
    for seed in range(30):
        (draft,), model = grow([1], FixedWidths((3, 3, 2)), seed=seed, sampling=[params], generators=[generator(seed)])
        shapes.add(draft.tree)
        for row, text in enumerate(texts_of(draft)):
            q = target_distribution(model.after(text), params)
            depth = draft.tree.depths[row]
            width = (3, 3, 2)[depth] if depth < 3 else 0
            assert len(draft.tree.children[row]) == min(width, int((q > 0).sum()))
            if width:
                assert torch.equal(draft.probs[row], q)
    assert len(shapes) > 10


def test_limits_cut_drawn_trees():
    params = [SamplingParams(1.0, 0.99), SamplingParams(1.0, top_k=6), SamplingParams(1.0)]
    drafts, model = grow(
        [1, 2, 3], FixedWidths((2, 2)), limits=[0, 1, 2], sampling=params, generators=[generator()] * 3
    )
    assert [len(draft.tree) for draft in drafts] == [1, 3, 7]
    assert drafts[0].probs is None
    assert torch.equal(drafts[1].probs[0], target_distribution(model.after((2,)), params[1]))
    assert torch.count_nonzero(drafts[1].probs[1:]) == 0


def test_children_are_drawn_without_replacement():
    """Ordered pairs (x, y) of siblings have probability q(x) q(y) / (1 - q(x))."""
    samples, vocab, params = 20_000, 4, SamplingParams(1.0)
    model = ToyModel([0] * samples, vocab)
    drafts = grow_drafts(
        [0] * samples,
        model.root_logits,
        FixedWidths((2,)),
        model,
        sampling=[params] * samples,
        generators=[generator()] * samples,
    )
    q = target_distribution(model.after((0,)), params).double()
    for x, y in itertools.permutations(range(vocab), 2):
        expected = float(q[x] * q[y] / (1 - q[x]))
        seen = sum(draft.tokens[1:] == [x, y] for draft in drafts) / samples
        assert abs(seen - expected) < 4 * math.sqrt(expected * (1 - expected) / samples)


# Node budgets


def full_tree(root, vocab, max_depth, seed):
    """All texts up to a depth, with their parents and log-probabilities, in level order."""
    texts, parents, log_probs = [(root,)], [-1], [0.0]
    for parent, text in enumerate(texts):
        if len(text) <= max_depth:
            for token, log_prob in enumerate(logits_after(text, vocab, seed).double().log_softmax(-1).tolist()):
                texts.append((*text, token))
                parents.append(parent)
                log_probs.append(log_prob)
    return texts, parents, log_probs


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(2, 4), st.integers(0, 1000))
def test_budget_gives_the_best_rows_of_the_full_tree(rows, max_depth, vocab, seed):
    texts, parents, log_probs = full_tree(1, vocab, max_depth, seed)
    tree, order = DraftTree.best_first(parents, log_probs, rows, max_depth)
    (draft,), model = grow([1], NodeBudget(rows, max_depth), vocab, seed)
    assert texts_of(draft) == [texts[index] for index in order]
    assert draft.tree == tree
    assert draft.probs is None

    # Only nodes that are among the best of all that is known are run, and a level is run once.
    score = {texts[0]: 0.0}
    for text, parent, log_prob in zip(texts[1:], parents[1:], log_probs[1:], strict=True):
        score[text] = score[texts[parent]] + log_prob
    known = {(1,), *((1, token) for token in range(vocab))}
    for depth, (ran,) in enumerate(model.ran, start=1):
        best = sorted(known, key=score.__getitem__, reverse=True)[: rows - 1]
        assert set(ran) == {text for text in best if len(text) == depth + 1}
        known |= {(*text, token) for text in ran for token in range(vocab)}


def test_budget_gives_another_shape_to_every_request_and_the_same_alone():
    roots, shape = list(range(8)), NodeBudget(9, 5)
    drafts, _ = grow(roots, shape, vocab=11, limits=[5, 5, 5, 5, 2, 1, 0, 9])
    assert len({draft.tree for draft in drafts}) > 4
    assert [draft.tree.depth for draft in drafts][4:7] == [2, 1, 0]
    for b, root in enumerate(roots):
        (alone,), _ = grow([root], shape, vocab=11, limits=[[5, 5, 5, 5, 2, 1, 0, 9][b]])
        assert alone == drafts[b]


def test_a_budget_scores_nodes_at_each_requests_temperature_but_not_below_0_7():
    """The same tree as from logits divided by hand."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 12, generator=generator) * 2

    def next_logits(scales):
        return lambda level: logits[(level.tokens * 3 + level.depth) % 40] / torch.tensor(scales)[:, None, None]

    temperatures, used = [0.0, 0.4, 0.7, 1.0, 2.5], [0.7, 0.7, 0.7, 1.0, 2.5]
    root, shape, ones = logits[:1].expand(5, -1), NodeBudget(10, 5), [1.0] * 5
    drafts = grow_drafts([0] * 5, root, shape, next_logits(ones), temperatures=temperatures)
    by_hand = grow_drafts([0] * 5, root / torch.tensor(used)[:, None], shape, next_logits(used))
    assert drafts == by_hand
    assert drafts[0] == drafts[1]
    assert drafts[1] != drafts[4]


def test_a_certain_draft_becomes_a_chain_and_an_uncertain_one_a_star():
    certain = torch.full((1, 50), -1e4)
    certain[0, 7] = 0.0
    (chain,) = grow_drafts([0], certain, NodeBudget(8, 7), lambda level: certain.expand(*level.tokens.shape, -1))
    assert chain.tree == DraftTree.chain(7)
    assert chain.tokens == [0] + [7] * 7
    flat = torch.randn(1, 50, generator=generator()) * 1e-3
    (star,) = grow_drafts([0], flat, NodeBudget(8, 7), lambda level: flat.expand(*level.tokens.shape, -1))
    assert star.tree == DraftTree.from_widths((7,))


def test_forbidden_tokens_are_never_drafted():
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    (draft,) = grow_drafts([0], logits, NodeBudget(64, 2), lambda level: logits.expand(*level.tokens.shape, -1))
    assert set(draft.tokens) == {0, 2}
    assert draft.tree == DraftTree.from_widths((2, 2))


def test_largest_budget():
    (draft,), _ = grow([1], NodeBudget(64, 20), vocab=300)
    assert len(draft.tree) == 64


# What is refused


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FixedWidths((3, 3, 3, 3)), r"draft_tree_widths \(3, 3, 3, 3\) need at least 121 rows"),
        (lambda: FixedWidths((2, 0)), "the width at depth 1 is 0"),
        (lambda: NodeBudget(0, 3), "draft_tree_budget of 0 rows: it is from 1 to 64"),
        (lambda: NodeBudget(65, 3), "draft_tree_budget of 65 rows: it is from 1 to 64, root included"),
        (lambda: NodeBudget(8, 0), "max_depth 0: it is 1 or more"),
        (
            lambda: NgramDrafter(NodeBudget(8, 3), 2, 3),
            "min_ngram 3, max_ngram 2: it takes 1 <= min_ngram <= max_ngram",
        ),
        (lambda: NgramDrafter(NodeBudget(8, 3), 2, 0), "min_ngram 0"),
        (
            lambda: grow([1], FixedWidths((1,)), sampling=[SamplingParams(1.0)]),
            "sampling and generators belong together",
        ),
        (lambda: grow([1], FixedWidths((1,)), generators=[generator()]), "sampling and generators belong together"),
        (lambda: grow([1, 2], FixedWidths((1,)), limits=[1]), "limits has length 1 for 2 root tokens"),
        (
            lambda: grow_drafts([1], torch.zeros(2, 3), FixedWidths((1,)), None),
            "root_logits has length 2 for 1 root tokens",
        ),
        (
            lambda: grow([1], NodeBudget(8, 3), sampling=[SamplingParams(1.0)], generators=[generator()]),
            "children cannot be drawn under a NodeBudget: .* would bias .* or use FixedWidths",
        ),
    ],
)
def test_faults_are_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_budget_takes_sampling_that_is_greedy_all_over():
    drafts, _ = grow([1], NodeBudget(8, 3), sampling=[SamplingParams()], generators=[generator()])
    assert drafts == grow([1], NodeBudget(8, 3))[0]


def test_no_requests_no_drafts():
    assert grow_drafts([], torch.zeros(0, 5), FixedWidths((1,)), None) == []


# N-grams


def request(tokens, index=0, max_new_tokens=100):
    return Request(index, list(tokens), len(tokens), max_new_tokens, SamplingParams(), generator())


def ngram_draft(tokens, rows=8, max_depth=7, max_new_tokens=100, **options):
    (draft,) = NgramDrafter(NodeBudget(rows, max_depth), **options).draft(
        [request(tokens, max_new_tokens=max_new_tokens)]
    )
    check(draft, tokens[-1])
    assert draft.probs is None
    return draft


def test_a_repeated_text_is_copied():
    draft = ngram_draft([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], rows=6)
    assert texts_of(draft)[-1] == (3, 4, 5, 6, 7, 8)
    assert draft.tree == DraftTree.chain(5)


def test_a_new_token_gives_the_bare_root():
    assert ngram_draft([1, 2, 3, 4]).tree == DraftTree.chain(0)
    assert ngram_draft([7]).tree == DraftTree.chain(0)


def test_a_copy_runs_to_the_end_of_the_text_and_stops():
    """Period 2: the occurrence one period back can be followed for two tokens, longer ones further."""
    draft = ngram_draft([1, 2, 1, 2, 1, 2], rows=8)
    assert set(texts_of(draft)) == {(2, 1, 2, 1, 2)[:n] for n in range(1, 6)}


def test_frequent_continuations_come_before_rare_ones():
    tokens = [1, 5, 0, 1, 6, 0, 1, 6, 0, 1]
    draft = ngram_draft(tokens, rows=3, max_depth=1, max_ngram=1)
    assert draft.tokens == [1, 6, 5]


def test_recent_continuations_come_first_among_equals():
    assert ngram_draft([1, 5, 8, 1, 6, 9, 1], rows=3, max_depth=1).tokens == [1, 6, 5]


def test_longer_matches_come_first_and_shorter_ones_fill_the_budget():
    """After 2 1 came 9 once; after 1 alone came 5 twice."""
    tokens = [2, 1, 9, 3, 1, 5, 4, 1, 5, 2, 1]
    assert ngram_draft(tokens, rows=3, max_depth=1).tokens == [1, 9, 5]
    assert ngram_draft(tokens, rows=3, max_depth=1, max_ngram=1).tokens == [1, 5, 9]
    assert ngram_draft(tokens, rows=3, max_depth=1, min_ngram=2).tokens == [1, 9]


def test_continuations_merge_into_one_tree():
    tokens = [1, 2, 3, 9, 1, 2, 4, 8, 1]
    draft = ngram_draft(tokens, rows=4, max_depth=2)
    assert sorted(texts_of(draft)) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4)]


def test_drafts_go_no_deeper_than_what_may_still_be_emitted():
    tokens = [1, 2, 3, 4, 5, 6, 7, 1]
    for remaining, depth in (1, 0), (2, 1), (4, 3), (50, 6):
        assert ngram_draft(tokens, max_depth=6, max_new_tokens=remaining).tree.depth == depth


small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(small_texts, st.integers(1, 20), st.integers(1, 6))
def test_every_draft_continues_an_earlier_occurrence(tokens, rows, max_depth):
    draft = ngram_draft(tokens, rows, max_depth)
    assert len(draft.tree) <= rows
    assert draft.tree.depth <= max_depth
    seen = {tuple(tokens[start : start + n]) for start in range(len(tokens)) for n in range(1, max_depth + 2)}
    assert set(texts_of(draft)) <= seen
    # The budget is filled as long as there are continuations of the last token.
    continuations = {text for text in seen if text[0] == tokens[-1]}
    assert len(draft.tree) == min(rows, len(continuations))


@given(small_texts, st.lists(st.integers(1, 5), max_size=10))
def test_the_index_grows_with_the_text_and_equals_a_fresh_one(tokens, steps):
    drafter, running = NgramDrafter(NodeBudget(12, 4)), request(tokens[:1])
    for step in steps:
        running.tokens += tokens[len(running.tokens) : len(running.tokens) + step]
        drafter.observe(running, torch.zeros(step % 3, 5))  # any size of hidden will do
        fresh = NgramDrafter(NodeBudget(12, 4)).draft([running])
        assert drafter.draft([running]) == fresh
        index = drafter._indexes[0]
        # Every n-gram stands in the index once.
        assert sum(map(len, index.ends.values())) == sum(max(0, len(running.tokens) - n + 1) for n in range(1, 5))


def test_requests_do_not_see_each_other_and_release_forgets():
    drafter = NgramDrafter(NodeBudget(8, 3))
    first, second = request([1, 2, 3, 1], index=0), request([1, 5, 6, 1], index=7)
    drafts = drafter.draft([first, second])
    assert [draft.tokens[1] for draft in drafts] == [2, 5]
    drafter.release(7)
    drafter.release(7)
    (draft,) = drafter.draft([request([1, 8, 1], index=7)])
    assert draft.tokens[1] == 8
    assert drafter.draft([first])[0] == drafts[0]


def test_very_frequent_tokens_stay_cheap():
    """A text of one token has thousands of occurrences; only a bounded number of them votes."""
    drafter = NgramDrafter(NodeBudget(64, 63))
    running = request([0] * 5000)
    (draft,) = drafter.draft([running])
    assert draft.tree == DraftTree.chain(63)
    votes = drafter._indexes[0].votes(running.tokens)
    assert len(votes) <= 256
    # The end of the text itself is an occurrence that nothing follows.
    assert max(end for end, _ in votes) == 4999
