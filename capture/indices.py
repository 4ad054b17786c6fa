"""Whether the indices that an operation is given lie where they may, when all rows are padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_outside", "slot_of_padding"]

_aten = torch.ops.aten
# Indices by dimension: (self, indices, ...).
_BY_PLACE = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
# One dimension: (self, dim, index, ...).
_BY_DIMENSION = {
    _aten.gather, _aten.index_add, _aten.index_add_, _aten.index_copy, _aten.index_copy_,
    _aten.index_fill, _aten.index_fill_, _aten.index_reduce, _aten.index_reduce_,
    _aten.index_select, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_,
    _aten.scatter_reduce, _aten.scatter_reduce_,
}  # fmt: skip
# All elements, as if in one dimension: (self, index, ...).
_FLAT = {_aten.take, _aten.put, _aten.put_}


def first_outside(packet: Any, args: tuple[Any, ...]) -> str | None:
    """The first index below zero or past its dimension's end, in words; None where all lie inside.

    Waits for the device.

    Args:
        packet: an operation of aten.
        args: its arguments.
    """
    for index, size in _indexed(packet, args):
        if not index.numel() or index.is_meta:
            continue
        # Modes of the dispatcher are off in here, those over Python's methods are not.
        with torch._C.DisableTorchFunction():
            low, high = (int(end) for end in index.aminmax())
        if low < 0 or high >= size:
            return f"index {low if low < 0 else high} in a dimension of {size}"
    return None


def slot_of_padding(func: Any, args: tuple[Any, ...]) -> int | None:
    """The first slot that one of the state's operations would write for a row of padding, if any.

    Waits for the device.

    Args:
        func: any operation.
        args: its arguments.
    """
    if func.namespace != "graphcache" or not func._schema.is_mutable:
        return None
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "slots":
            with torch._C.DisableTorchFunction():
                given = value[value >= 0].tolist()
            return int(given[0]) if given else None
    return None


def _indexed(packet: Any, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int]]:
    """Each index tensor with the size of the dimension that it indexes."""
    if packet in _BY_PLACE:
        for dimension, index in enumerate(args[1]):
            # A mask spans as many dimensions as it has; what comes after it can't be placed.
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                return
            if index is not None:
                yield index, args[0].shape[dimension]
    elif packet in _BY_DIMENSION:
        yield args[2], args[0].shape[args[1]] if args[0].dim() else 1
    elif packet in _FLAT:
        yield args[1], args[0].numel()
    elif packet is _aten.embedding:
        yield args[1], args[0].shape[0]
