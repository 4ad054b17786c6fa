"""Triton where the platform has it; elsewhere kernels can be named but not launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import UnsupportedPlatform

__all__ = ["HAVE_TRITON", "jit", "jit_for_any", "tl", "triton"]

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
    jit: Callable[..., Any] = triton.jit
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


def jit_for_any(*names: str) -> Callable[[Any], Any]:
    """`jit`, with the integers named left general.

    Triton compiles anew where an integer becomes 1 or a multiple of 16; an argument that changes
    from call to call must not, or a first-seen value would load a module in mid-flight.
    """
    return partial(jit, do_not_specialize=list(names)) if HAVE_TRITON else jit
