"""Kernels in CUDA C++, for what Triton can't say: compiled by NVRTC at first use, kept for good."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import resources
from typing import Any

import torch

from ..errors import UnsupportedPlatform

__all__ = ["cuda_kernel", "launch", "nvrtc_is_there"]


@cache
def nvrtc_is_there() -> bool:
    """Whether this process can compile CUDA C++."""
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc.nvrtcVersion())
    except Exception:  # whatever a loader raises: the library is not usable
        return False
    return True


@cache
def cuda_kernel(
    source: str, name: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: int
) -> Any:
    """A kernel of a source file below this folder, loaded on a device.

    Synchronizes the device, as loading a module does: have it called before a capture.

    Args:
        source: path from this folder.
        name: of an `extern "C"` kernel in it.
        defines: macros and their values.
        shared_bytes: dynamic shared memory that launches of it take.
        device: CUDA's index.

    Raises:
        UnsupportedPlatform: when it doesn't compile or load.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    image = _compile(source, defines, f"sm_{major}{minor}a")
    (module,) = _checked(driver.cuModuleLoadData(image))
    (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function


def _compile(source: str, defines: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    from cuda.bindings import nvrtc

    text = (resources.files(__package__) / source).read_bytes()
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{macro}={value}" for macro, value in defines]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, None, None))
    result = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(result[0]):
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program))[0])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise UnsupportedPlatform(
            f"{source} does not compile for {architecture}:\n{log.decode(errors='replace')}"
        )
    image = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program))[0])
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return image


def launch(
    function: Any,
    grid: tuple[int, int],
    threads: int,
    cluster: int,
    shared_bytes: int,
    arguments: ctypes.Structure,
) -> None:
    """Launch on the current stream; `cluster` blocks along the first axis share their memory."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        config.attrs, config.numAttrs = [attribute], 1
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def _checked(results: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(results[0]):
        raise UnsupportedPlatform(f"a kernel in CUDA C++ can't be had: {results[0]!r}")
    return results[1:]
