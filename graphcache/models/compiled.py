"""Decode steps compiled by Inductor, `torch.compile`'s compiler, and captured like any other.

A step is traced once for each batch size, as a capture would record it: Python's control flow and
numbers are gone by then. What lies between this package's operations is compiled, they themselves
run as ever, and so does prefill. No graphs of the compiler's own are made: that is the runtime's
part.
"""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import scopes
from ..batch import Batch
from ..decode_state import DecodeState
from ..errors import UnsupportedModel, UnsupportedPlatform
from ..ops._library import register
from ..ops._triton import HAVE_TRITON
from ..ops.run_compiled import CompiledPiece
from ..probes import unheard
from .program import Program, build_program

__all__ = ["check_compiler", "compiled"]

M = TypeVar("M")


def compiled(model: M) -> M:
    """A model like this one whose `decode` is compiled, with the same weights; no copy of them.

    Each batch size is compiled when its step first runs, which a runtime's `capture()` does before
    it captures: seconds to minutes. A replay has the bits of an eager step of this model; those of
    the model uncompiled may differ in the last ones. Inside the model a step keeps no probes, and
    the scope of a compiled piece is what all of it lies in.

    Args:
        model: anything with `decode(batch)`, see `DecodeModel`. Its `decode` writes through this
            package only, and draws no random numbers.

    Raises:
        UnsupportedPlatform: when there is no compiler for the model's device.
        UnsupportedModel: from the first step, naming what of it can't be compiled.
    """
    check_compiler(torch.device(getattr(model, "device", "cpu")))
    twin = copy.copy(model)
    # Models may be frozen; what is set here is not one of their fields.
    object.__setattr__(twin, "decode", _CompiledDecode(model.decode))  # type: ignore[attr-defined]
    return twin


class _CompiledDecode:
    """`decode`, as one program for each state and batch size."""

    def __init__(self, decode: Callable[[Batch], Tensor]) -> None:
        self._decode = decode
        # A program holds the addresses of a state's tensors, and goes with it.
        self._programs: WeakKeyDictionary[DecodeState, dict[tuple[int, int], Program]] = (
            WeakKeyDictionary()
        )
        self._known: dict[str, CompiledPiece] = {}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        programs = self._programs.setdefault(batch.state, {})
        key = (batch.slots.shape[0], batch.q_len)
        if key not in programs:
            programs[key] = self._build(batch)
        return programs[key].run(batch.slots, batch.positions, batch.tokens)

    def _build(self, batch: Batch) -> Program:
        if batch.slots.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedModel(
                f"a step of {batch.slots.shape[0]} tokens is not compiled yet, and a capture is "
                "under way: run it once before"
            )
        state, q_len, base = batch.state, batch.q_len, len(scopes.path())

        def decode(slots: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
            return self._decode(Batch(slots, positions, tokens, q_len, state))

        given = (batch.slots, batch.positions, batch.tokens)
        return _undisturbed(lambda: build_program(decode, given, base, self._known), batch.slots)


def _undisturbed(build: Callable[[], Program], near: Tensor) -> Program:
    """Build inside an operation: whoever watches the step sees that one, and not the compiler."""
    built: list[Program] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with unheard():
                built.append(build())
        except BaseException as error:
            errors.append(error)

    _thread.work.append(work)
    try:
        _op(near)
    finally:
        _thread.work.pop()
    if errors:
        raise errors[0]
    return built[0]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []


_thread = _Thread()


def _run_work(near: Tensor) -> None:
    _thread.work[-1]()


_op = register(
    "compile_step(Tensor near) -> ()",
    reference=_run_work,
    kernel=_run_work,
    fake=lambda near: None,
)


def check_compiler(device: torch.device) -> None:
    """See to it that steps can be compiled for a device.

    Raises:
        UnsupportedPlatform: naming what is missing.
    """
    if device.type == "cuda":
        if not HAVE_TRITON:
            raise UnsupportedPlatform(
                "compiling for a GPU needs Triton, which is missing: use the model uncompiled"
            )
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UnsupportedPlatform(
            f"compiling for the CPU needs a C++ compiler, and there is no {compiler!r}: install "
            "g++, name another in $CXX, or use the model uncompiled"
        )
