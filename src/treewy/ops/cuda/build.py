"""Compiles CUDA C++ at first use, through NVRTC: no compiler has to be installed, and PyTorch for CUDA brings NVRTC."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc  # type: ignore[import-untyped]

_SOURCE = Path(__file__).parent
RESERVED = 1024
"""Bytes of shared memory that CUDA takes of an SM for each block."""
GRANULE = 128
"""Bytes in multiples of which it is given out."""


@dataclass(frozen=True)
class Kernel:
    """A function loaded on one device."""

    handle: Any
    threads: int
    shared_bytes: int
    blocks: int  # that fit an SM
    properties: Any  # of the device

    def __call__(self, grid: tuple[int, int, int], *parameters: int) -> None:
        """Launches on the current stream of the current device.

        It may begin while the launch before it in the stream ends; the kernel itself waits before it reads anything.

        Args:
            grid: blocks.
            parameters: addresses of the kernel's parameters.
        """
        pointers = (ctypes.c_void_p * len(parameters))(*parameters)
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self.threads, 1, 1
        launch.sharedMemBytes = self.shared_for(math.prod(grid))
        launch.hStream = torch.cuda.current_stream().cuda_stream
        launch.attrs, launch.numAttrs = [early], 1
        _check(driver.cuLaunchKernelEx(launch, self.handle, ctypes.addressof(pointers), 0))

    def shared_for(self, grid: int) -> int:
        """Bytes of shared memory for each of `grid` blocks: what they need, or so much that they spread evenly.

        Blocks that begin while the launch before them ends go where there is room. If a launch fits the SMs at once,
        but two do not, some SMs would be given more blocks than others.
        """
        sms = self.properties.multi_processor_count
        each = -(-grid // sms)
        if each >= self.blocks or 2 * grid <= self.blocks * sms:
            return self.shared_bytes
        share: int = (self.properties.shared_memory_per_multiprocessor // each - RESERVED) // GRANULE * GRANULE
        most: int = self.properties.shared_memory_per_block_optin
        return max(self.shared_bytes, min(share, most))


def compile_source(name: str, defines: tuple[tuple[str, int], ...], arch: str) -> tuple[bytes, str]:
    """Machine code of `name`.cu for an architecture, such as "sm_90", and what the assembler says of it.

    Raises:
        RuntimeError: the compiler's log.
    """
    source = (_SOURCE / f"{name}.cu").read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
    options.append(f"--include-path={_SOURCE}")
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


@cache
def kernel(name: str, defines: tuple[tuple[str, int], ...], device: int) -> Kernel:
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
        at, size = _check(driver.cuModuleGetGlobal(module, b"launch_bounds"))
        bounds = (ctypes.c_int * 2)()
        _check(driver.cuMemcpyDtoH(ctypes.addressof(bounds), at, size))
        threads, shared_bytes = bounds
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        properties: Any = torch.cuda.get_device_properties(device)
        _check(driver.cuFuncSetAttribute(handle, attribute, properties.shared_memory_per_block_optin))
        blocks = _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(handle, threads, shared_bytes))
        return Kernel(handle, threads, shared_bytes, blocks, properties)


@lru_cache(maxsize=4096)
def tensor_map(address: int, dtype: torch.dtype, slots: int, heads: int, dv: int, dk: int, slot_bytes: int) -> Any:
    """How the copy engine sees a pool of states [slots, heads, dv, dk]: heads of dv rows in slices of 128 bytes.

    Args:
        address: of the first element, divisible by 16.
        dtype: of the states.
        slots: blocks in the pool.
        heads: value heads.
        dv: rows of a head.
        dk: columns.
        slot_bytes: from one slot to the next, divisible by 16.
    """
    types = driver.CUtensorMapDataType
    kinds = {
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    whole, size = (driver.cuuint64_t, driver.cuuint32_t)
    return _check(
        driver.cuTensorMapEncodeTiled(
            kinds[dtype],
            3,
            address,
            [whole(dk), whole(heads * dv), whole(slots)],
            [whole(dk * dtype.itemsize), whole(slot_bytes)],
            [size(128 // dtype.itemsize), size(dv), size(1)],
            [size(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status.value:
        raise RuntimeError(f"{type(status).__name__} {status.name} in a call of the CUDA driver or compiler")
    return values[0] if len(values) == 1 else tuple(values)
