"""A compiled piece of a step as one operation.

What a compiler made is called past the dispatcher, where a recording, a lint or a watch would not
see it. As an operation it is seen as any other: its inputs, its outputs, and nothing between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from ._library import register

__all__ = ["CompiledPiece"]

Function: TypeAlias = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class _Entry:
    function: Function
    outputs: tuple[Tensor, ...]


_pieces: dict[int, _Entry] = {}
_numbers = count()


def _run(inputs: list[Tensor], piece: int) -> list[Tensor]:
    return list(_pieces[piece].function(*inputs))


def _fake(inputs: list[Tensor], piece: int) -> list[Tensor]:
    return [
        torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        for like in _pieces[piece].outputs
    ]


_op = register(
    "run_compiled(Tensor[] inputs, int piece) -> Tensor[]",
    reference=_run,
    kernel=_run,
    fake=_fake,
)


class CompiledPiece:
    """A compiled function of tensors that writes nothing but what it returns. One node to a tape.

    Args:
        function: tensors to a sequence of tensors; runs on the current stream.
        outputs: tensors of the shapes, strides and dtypes that it returns; may be fake.

    Recordings that run it must not outlive it.
    """

    def __init__(self, function: Function, outputs: Sequence[Tensor]) -> None:
        self._number = next(_numbers)
        _pieces[self._number] = _Entry(function, tuple(outputs))
        weakref.finalize(self, _pieces.pop, self._number, None)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run it on the current stream without synchronizing."""
        given: list[Tensor] = _op(inputs, self._number)
        return given
