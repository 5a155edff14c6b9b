"""Engines for the tests, in this process: vLLM for CPUs with model runner V2, whose kernels Triton interprets; or vLLM
for CUDA, where there is a device."""

import os
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
elif find_spec("vllm") is None:
    collect_ignore_glob = ["test_*"]  # a machine for the other GPU tests
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # test workers would share a core
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # greedy only
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # read when vLLM is imported; of tests with piecewise graphs
os.environ.setdefault("HF_HUB_OFFLINE", "1")
huggingface_hub.constants.HF_HUB_OFFLINE = True  # read when it was imported, by a test before perhaps


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of three drafts are right."""
    from tests.vllm.checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), noise=0.5)


@pytest.fixture(scope="session")
def oracle(checkpoint: Path):
    from tests.vllm.engine import Oracle

    return Oracle(checkpoint)
