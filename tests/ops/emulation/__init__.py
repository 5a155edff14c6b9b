"""Runs verify.cu on a CPU: compiled by a C++ compiler with the machine of hardware.cuh in this folder."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch

from treewy.ops.cuda import build

HERE, SOURCE = Path(__file__).parent, Path(build.__file__).parent
"""Of the machine, and of verify.cu."""


class TensorMap(ctypes.Structure):
    """`TensorMap` of hardware.cuh."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("address", "slots", "heads", "dv", "dk", "slot_bytes")]


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="treewy-emulation-"))


@cache
def _compiled(defines: tuple[tuple[str, int], ...]) -> Any:
    """`launch` of launch.cpp with these definitions."""
    library = _folder() / ("-".join(str(value) for _, value in defines) + ".so")
    command = [
        os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing",
        "-U_FORTIFY_SOURCE", f"-I{HERE}", f"-I{SOURCE}",
    ]  # fmt: skip
    command += [f"-D{name}={value}" for name, value in defines]
    subprocess.run([*command, str(HERE / "launch.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).launch


def tensor_map(
    address: int, dtype: torch.dtype, slots: int, heads: int, dv: int, dk: int, slot_bytes: int
) -> SimpleNamespace:
    """In the place of `treewy.ops.cuda.build.tensor_map`."""
    made = TensorMap(address, slots, heads, dv, dk, slot_bytes)
    return SimpleNamespace(getPtr=lambda: ctypes.addressof(made))


def kernel(name: str, defines: tuple[tuple[str, int], ...], device: int, *, seed: int = 1) -> Callable[..., None]:
    """In the place of `treewy.ops.cuda.build.kernel`; another seed is another order of threads and blocks.

    Raises:
        AssertionError: what the machine found wrong.
    """
    assert name == "verify"
    run = _compiled(defines)

    def launch(grid: tuple[int, int], arguments: int, states: int) -> None:
        what = ctypes.create_string_buffer(400)
        failed = run(ctypes.c_void_p(arguments), ctypes.c_void_p(states), *grid, ctypes.c_uint64(seed), what, len(what))
        assert not failed, f"{what.value.decode()}; {dict(defines)}, seed {seed}"

    return launch
