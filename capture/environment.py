"""What this machine has for capturing and replaying steps, and what the lack of it costs."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import torch

import graphcache
from graphcache.ops._cuda import nvrtc_is_there
from graphcache.ops._triton import HAVE_TRITON

__all__ = ["Finding", "inspect_environment"]

MIB = 1024 * 1024
PACKAGES = (
    ("torch", ""),
    ("triton", "kernels on a GPU need it"),
    ("cuda-python", "launching graphs needs it"),
    ("nvtx", "names in Nsight Systems need it"),
    ("transformers", "load_model needs it: install the extra `models`"),
    ("gguf", "loading .gguf files needs it: install the extra `models`"),
)


@dataclass(frozen=True)
class Finding:
    """One thing looked for.

    Attributes:
        name: what was looked for.
        value: what was found.
        note: what it is good for, or what its lack costs.
        present: whether it is there.
    """

    name: str
    value: str
    note: str = ""
    present: bool = True


def inspect_environment() -> list[Finding]:
    """Look at packages, device and driver. Makes no context where there is no GPU."""
    findings = [
        Finding("graphcache", graphcache.__version__),
        Finding("python", platform.python_version()),
        *(_package(name, note) for name, note in PACKAGES),
    ]
    if not torch.cuda.is_available():
        findings.append(
            Finding(
                "CUDA GPU",
                "none",
                "steps are replayed from the tape, on the CPU: right, and slow",
                present=False,
            )
        )
        return findings
    return findings + _device() + _driver()


def _package(name: str, note: str) -> Finding:
    if name == "torch":
        return Finding(name, torch.__version__)
    for distribution in (name, name.replace("cuda-python", "cuda-bindings")):
        try:
            return Finding(name, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(name, "missing", note, present=False)


def _device() -> list[Finding]:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return [
        Finding(
            "CUDA GPU",
            properties.name,
            f"compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, "
            f"{free // MIB} of {total // MIB} MiB free",
        ),
        Finding("CUDA of torch", str(torch.version.cuda)),
        Finding(
            "Triton kernels",
            "yes" if HAVE_TRITON else "no",
            "" if HAVE_TRITON else "no operation runs on the GPU",
            present=HAVE_TRITON,
        ),
        _compiler((properties.major, properties.minor)),
    ]


def _compiler(capability: tuple[int, int]) -> Finding:
    if capability != (9, 0):
        return Finding("kernels in CUDA C++", "none for this GPU", "Triton's serve")
    present = nvrtc_is_there()
    cost = "" if present else "no NVRTC: attention over DeepSeek-V4's entries is in Triton, slower"
    return Finding("kernels in CUDA C++", "yes" if present else "no", cost, present)


def _driver() -> list[Finding]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return [Finding("driver bindings", "missing", f"no graph can be launched: {error}", False)]
    _, version = driver.cuDriverGetVersion()
    found = [Finding("CUDA of the driver", f"{version // 1000}.{version % 1000 // 10}")]
    for name, since, cost in (
        ("graphs with conditional nodes", 12040, "no loops on the device"),
        ("torch's CUDA version or newer", _torch_cuda(), "torch may fail to start"),
    ):
        present = version >= since
        found.append(Finding(name, "yes" if present else "no", "" if present else cost, present))
    return found


def _torch_cuda() -> int:
    """The CUDA version that torch was built for, as the driver writes versions; 0 if unknown."""
    major, _, minor = str(torch.version.cuda or "0.0").partition(".")
    return int(major) * 1000 + int(minor or 0) * 10
