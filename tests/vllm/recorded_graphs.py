"""Piecewise CUDA graphs of vLLM on a CPU: segments that remember their operations take the place of captured graphs.

vLLM captures a forward once for every number of tokens, in segments between the operations that must see the step
(attention, GDN core), and afterwards runs segments and these operations in turn. What such a replay can get wrong, a
tensor of the capture's step in place of this step's, is the same here: a segment repeats its operations on the tensors
it had, and writes results where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.vllm.engine import Engine


class Segment:
    """In the place of `torch.cuda.CUDAGraph`."""

    open: ClassVar[Segment | None] = None
    """That records."""
    replayed: ClassVar[int] = 0

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, pool: Any = None) -> None:
        Segment.open = self

    def capture_end(self) -> None:
        Segment.open = None

    def replay(self) -> None:
        Segment.replayed += 1
        for function, arguments, named, results in self.operations:
            again = function(*arguments, **named)
            for place, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class Recorder(TorchDispatchMode):
    """Notes every operation in the segment that is open; one that ends its segment belongs to none."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        segment, named = Segment.open, named or {}
        results = function(*arguments, **named)
        if segment is not None and segment is Segment.open:
            segment.operations.append((function, arguments, named, results))
        return results


@contextmanager
def piecewise(engine: Engine, monkeypatch: Any, sizes: Sequence[int]) -> Iterator[type[Segment]]:
    """The engine runs all steps of at most the largest of these numbers of tokens in segments, padded to the next."""
    from vllm.compilation import breakable_cudagraph
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Segment)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(breakable_cudagraph, "capture_pool", lambda *_: nullcontext())
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", "none")
    for name in ("weak_ref_tensor", "weak_ref_tensors"):  # which keep the place and not the memory
        monkeypatch.setattr(breakable_cudagraph, name, lambda value: value)
    runner = engine.runner
    runner.compilation_config.cudagraph_capture_sizes = list(sizes)
    runner.compilation_config.max_cudagraph_capture_size = max(sizes)
    manager = cudagraph_utils.ModelCudaGraphManager(
        runner.vllm_config, runner.device, CUDAGraphMode.PIECEWISE, runner.decode_query_len
    )
    assert manager.use_breakable_cg
    with Recorder():
        manager.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
        )
    runner.cudagraph_manager = manager
    Segment.replayed = 0
    yield Segment
