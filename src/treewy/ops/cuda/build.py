"""Compiles CUDA C++ at first use, through NVRTC: no compiler has to be installed, and PyTorch for CUDA brings NVRTC."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from cuda.bindings import driver, nvrtc

_SOURCE = Path(__file__).parent


@dataclass(frozen=True)
class Kernel:
    """A function loaded on one device."""

    handle: driver.CUfunction
    threads: int
    shared_bytes: int

    def __call__(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        """Launches on the current stream of the current device; `arguments` is the kernel's one parameter."""
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = torch.cuda.current_stream().cuda_stream
        _check(
            driver.cuLaunchKernel(
                self.handle, *grid, 1, self.threads, 1, 1, self.shared_bytes, stream, ctypes.addressof(pointer), 0
            )
        )


def compile_source(name: str, defines: tuple[tuple[str, int], ...], arch: str) -> tuple[bytes, str]:
    """Machine code of `name`.cu for an architecture, such as "sm_90", and what the assembler says of it.

    Raises:
        RuntimeError: the compiler's log.
    """
    source = (_SOURCE / f"{name}.cu").read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{key}={value}" for key, value in defines]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode().strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{name}.cu does not compile for {arch} with {dict(defines)}:\n{text}")
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return code, text


@lru_cache(maxsize=None)
def kernel(name: str, defines: tuple[tuple[str, int], ...], threads: int, device: int) -> Kernel:
    """The kernel `name` of `name`.cu on a device; compiled once a process, in about a second.

    Raises:
        RuntimeError: the compiler's log, or what the driver refused.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        major, minor = torch.cuda.get_device_capability(device)
        code, _ = compile_source(name, defines, f"sm_{major}{minor}")
        module = _check(driver.cuModuleLoadData(code))
        handle = _check(driver.cuModuleGetFunction(module, name.encode()))
        at, size = _check(driver.cuModuleGetGlobal(module, b"shared_bytes"))
        shared = ctypes.c_int()
        _check(driver.cuMemcpyDtoH(ctypes.addressof(shared), at, size))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(handle, attribute, shared.value))
        return Kernel(handle, threads, shared.value)


def _check(result: tuple) -> object:  # type: ignore[type-arg]
    status, *values = result
    if status.value:
        raise RuntimeError(f"{type(status).__name__} {status.name} in a call of the CUDA driver or compiler")
    return values[0] if len(values) == 1 else tuple(values)
