"""Requests of other kinds: stopped at once or early, with prompts longer than blocks and steps, bound to a grammar."""

import pytest
import torch

from tests.vllm.engine import MARGIN, Engine, Oracle, compare_states, prompts, running

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower


@pytest.fixture(scope="module")
def engine(checkpoint):
    with running(checkpoint, "deferred") as engine:
        yield engine


def finish(engine: Engine, oracle: Oracle) -> int:
    """Runs until all requests have ended; states that were compared on the way."""
    compared = 0
    while engine.busy:
        engine.step()
        compared += compare_states(engine, oracle)
    return compared


def test_one_token(engine, oracle: Oracle) -> None:
    """A request that ends with its first token, before any window, beside one that goes on; slots are used again."""
    lasting = prompts(1, 9, 9, 1)[0]
    name = engine.add(lasting, 30)
    some = prompts(6, 1, 70, 2)
    short = [engine.add(prompt, 1) for prompt in some]
    finish(engine, oracle)
    oracle.check(lasting, engine.emitted[name])
    for prompt, one in zip(some, short, strict=True):
        assert len(engine.emitted[one]) == 1
        oracle.check(prompt, engine.emitted[one])


def test_stopped_inside_a_window(engine, oracle: Oracle) -> None:
    """By a token that the request writes first, second, ... : it ends there, also where more rows were accepted."""
    prompt = prompts(1, 20, 20, 3)[0]
    (text,) = engine.generate([prompt], 10)
    for place in range(5):
        name = engine.add(prompt, 10, stop_token_ids=[text[place]])
        other = engine.add(prompt, 10)
        finish(engine, oracle)
        assert engine.emitted[name] == text[: text.index(text[place]) + 1]
        oracle.check(prompt, engine.emitted[other])


@pytest.mark.parametrize("length", [64, 65, 320])
def test_prompts_longer_than_a_block(engine, oracle: Oracle, length: int) -> None:
    """Of two blocks, one token more, ten; a step takes 64 tokens at most."""
    prompt = prompts(1, length, length, 4)[0]
    name = engine.add(prompt, 12)
    assert finish(engine, oracle) > 0
    oracle.check(prompt, engine.emitted[name])


def test_a_grammar(engine, oracle: Oracle) -> None:
    """Only t4 to t9 are allowed: drafts that are not are no rows, so windows are of all lengths."""
    from vllm.sampling_params import StructuredOutputsParams

    some = prompts(2, 5, 30, 5)
    grammar = StructuredOutputsParams(regex="(t[4-9]){16}")
    names = [engine.add(prompt, 16, structured_outputs=grammar) for prompt in some]
    free = engine.add(some[0], 16)
    assert finish(engine, oracle) > 0
    oracle.check(some[0], engine.emitted[free])
    allowed = torch.arange(4, 10)
    for name, prompt in zip(names, some, strict=True):
        text = engine.emitted[name]
        assert len(text) == 16
        assert set(text) <= set(allowed.tolist())
        assert oracle.deficits(prompt, text, allowed).max() < MARGIN
