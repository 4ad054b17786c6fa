"""Compile a Triton kernel for an H200 on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest


def build_for_sm90(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> bytes:
    """Return the cubin of `kernel` for compute capability 9.0.

    Args:
        kernel: a `triton.jit` function.
        signature: type of every argument by name, such as `"*bf16"`, `"i32"`, `"fp32"`.
        constexprs: value of every constexpr argument by name.
        num_warps: as the launch has it.
        num_stages: as the launch has it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=named, constexprs=constexprs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin: bytes = compiled.asm["cubin"]
    return cubin


def _interpreter_fits_numpy() -> bool:
    try:
        import numpy
        import triton
    except ImportError:
        return False

    def minor(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    return minor(triton.__version__) >= (3, 7) or minor(numpy.__version__) < (2, 4)


needs_loop_interpreter = pytest.mark.skipif(
    not _interpreter_fits_numpy(),
    reason="Triton's interpreter before 3.7 runs no loop with a run-time bound under numpy >= 2.4",
)
