"""What a step does past every dispatcher: Python functions that a lint must put itself in front of.

Waits and questions to the driver, random numbers of the host, and kernels launched outside any
operation never reach torch's dispatcher. While a thread lints, these functions refuse it; other
threads call them as ever.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import numpy as np
import torch

from graphcache.ops._triton import HAVE_TRITON

from .rules import Rule

__all__ = ["guards"]

Refuse = Callable[[str, Rule], None]


def _guarded() -> Iterator[tuple[Any, str, str, Rule]]:
    """Owner and name of each function, what an error calls it, and the rule it breaks."""
    for name in ("synchronize", "empty_cache"):
        yield torch.cuda, name, f"torch.cuda.{name}", Rule.WAITS
    for name in ("synchronize", "query"):
        yield torch.cuda.Stream, name, f"torch.cuda.Stream.{name}", Rule.WAITS
    for name in ("synchronize", "query", "elapsed_time"):
        yield torch.cuda.Event, name, f"torch.cuda.Event.{name}", Rule.WAITS
    for name in _PYTHON_DRAWS:
        yield random, name, f"random.{name}", Rule.HOST_DRAW
    for name in _NUMPY_DRAWS:
        yield np.random, name, f"numpy.random.{name}", Rule.HOST_DRAW
    if HAVE_TRITON:
        from triton.runtime.jit import KernelInterface

        yield KernelInterface, "__getitem__", "a Triton kernel", Rule.UNSEEN_KERNEL


_PYTHON_DRAWS = (
    "betavariate", "choice", "choices", "expovariate", "gammavariate", "gauss", "getrandbits",
    "lognormvariate", "normalvariate", "randbytes", "randint", "random", "randrange", "sample",
    "shuffle", "triangular", "uniform",
)  # fmt: skip
_NUMPY_DRAWS = (
    "choice", "exponential", "gumbel", "normal", "permutation", "rand", "randint", "randn",
    "random", "random_sample", "shuffle", "standard_normal", "uniform",
)  # fmt: skip


class _Guards(threading.local):
    """The guards as one thread sees them."""

    def __init__(self) -> None:
        self.refuse: list[Refuse] = []
        # Operations that run now, one inside the other: what they launch, they answer for.
        self.operations = 0

    # Of all threads together: the first to lint puts the guards in place, the last takes them away.
    _lock: Final = threading.Lock()
    _originals: Final[list[tuple[Any, str, Any]]] = []
    _users = 0

    @contextmanager
    def set(self, refuse: Refuse) -> Iterator[None]:
        """Guard this thread: `refuse(operation, rule)` is called, and raises."""
        with self._lock:
            if not _Guards._users:
                self._put_in_place()
            _Guards._users += 1
        self.refuse.append(refuse)
        try:
            yield
        finally:
            self.refuse.pop()
            with self._lock:
                _Guards._users -= 1
                if not _Guards._users:
                    self._take_away()

    def _put_in_place(self) -> None:
        for owner, name, shown, rule in _guarded():
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, self._guard(original, shown, rule))

    def _take_away(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def _guard(self, original: Callable[..., Any], shown: str, rule: Rule) -> Callable[..., Any]:
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # Tuners of kernels wait and launch when a kernel first runs: what rehearsals are for.
            if self.refuse and not self.operations and not _is_tuner(sys._getframe(1)):
                self.refuse[-1](shown, rule)
            return original(*args, **kwargs)

        return guarded


guards = _Guards()
"""One set of guards for the process, each thread with a list of its own."""


def _is_tuner(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).split(".")[0]
    return package in ("torch", "triton")
