"""Triton where the platform has it; elsewhere kernels can be named but not launched."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedPlatform

__all__ = ["HAVE_TRITON", "jit", "tl", "triton"]

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
    jit = triton.jit
except ImportError:  # pragma: no cover - platforms without Triton

    class _Absent:
        """Stands for the package in annotations; using it says what is missing."""

        def __getattr__(self, name: str) -> Any:
            if name in ("constexpr", "tensor"):
                return object
            raise UnsupportedPlatform("this operation's kernel needs the package triton")

    HAVE_TRITON = False
    triton = tl = _Absent()

    def jit(fn: Any) -> Any:
        return triton
