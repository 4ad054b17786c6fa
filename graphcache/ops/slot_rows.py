"""Rows of a field by slot, taken out for a step and put back: a kernel each way.

For state that torch operations compute on. Padding (slot -1) reads zeros and writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._triton import jit, tl, triton

__all__ = ["read_slots", "write_slots"]

BLOCK = 2048
"""Most elements that one program moves."""

# Bits are moved, so one kernel serves all types of a size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _read_reference(field: Tensor, slots: Tensor) -> Tensor:
    rows = _bits(field)[slots.clamp(min=0).long()]
    rows[slots < 0] = 0
    return rows.view(field.dtype)


def _write_reference(field: Tensor, slots: Tensor, values: Tensor) -> None:
    written = slots >= 0
    _bits(field)[slots[written].long()] = _bits(values)[written]


@jit
def _read_kernel(  # type: ignore[no-untyped-def]
    field, slots, out, field_stride, elements, BLOCK: tl.constexpr
):
    """One program a row and block of elements."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    bits = tl.load(field + slot * field_stride + at, mask=inside & (slot >= 0), other=0)
    tl.store(out + row * elements + at, bits, mask=inside)


@jit
def _write_kernel(  # type: ignore[no-untyped-def]
    field, slots, values, field_stride, elements, BLOCK: tl.constexpr
):
    """One program a row and block of elements."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    bits = tl.load(values + row * elements + at, mask=inside, other=0)
    tl.store(field + slot * field_stride + at, bits, mask=inside & (slot >= 0))


def _launch(kernel: Any, field: Tensor, slots: Tensor, rows: Tensor) -> None:
    count, elements = slots.shape[0], field[0].numel()
    if not count:
        return
    block = min(BLOCK, triton.next_power_of_2(elements))
    kernel[(count, triton.cdiv(elements, block))](
        _bits(field), slots, _bits(rows), field.stride(0), elements, BLOCK=block,
        num_warps=max(1, min(4, block // 512)),
    )  # fmt: skip


def _read_launch(field: Tensor, slots: Tensor) -> Tensor:
    out = _read_fake(field, slots)
    _launch(_read_kernel, field, slots, out)
    return out


def _write_launch(field: Tensor, slots: Tensor, values: Tensor) -> None:
    _launch(_write_kernel, field, slots, values)


def _read_fake(field: Tensor, slots: Tensor) -> Tensor:
    return field.new_empty((slots.shape[0], *field.shape[1:]))


def _write_fake(field: Tensor, slots: Tensor, values: Tensor) -> None:
    return None


_read = register(
    "read_slots(Tensor field, Tensor slots) -> Tensor",
    reference=_read_reference,
    kernel=_read_launch,
    fake=_read_fake,
)
_write = register(
    "write_slots(Tensor(a!) field, Tensor slots, Tensor values) -> ()",
    reference=_write_reference,
    kernel=_write_launch,
    fake=_write_fake,
)


def read_slots(field: Tensor, slots: Tensor) -> Tensor:
    """Each row's state, packed. One node on the current stream; no synchronization.

    Args:
        field: [S1, *shape] of any type; the stride of the first axis is free, the rest contiguous.
        slots: [rows] int32, contiguous; -1 for padding.

    Returns:
        [rows, *shape] in the field's dtype, contiguous; zeros at padding.

    Raises:
        SchemaError: for other shapes, dtypes or strides.
    """
    _check("read_slots", field, slots)
    rows: Tensor = _read(field, slots)
    return rows


def write_slots(field: Tensor, slots: Tensor, values: Tensor) -> None:
    """Put each row's state back; padding writes nothing. One node on the current stream.

    Args:
        field: [S1, *shape] of any type, strided as for `read_slots`; written.
        slots: [rows] int32, contiguous; -1 for padding, every other at most once.
        values: [rows, *shape] in the field's dtype, contiguous.

    Raises:
        SchemaError: for other shapes, dtypes or strides; nothing is written then.
    """
    _check("write_slots", field, slots)
    expected = (slots.shape[0], *field.shape[1:])
    if values.shape != expected or values.dtype != field.dtype or not values.is_contiguous():
        raise SchemaError(
            f"write_slots: values must be {list(expected)} {field.dtype}, contiguous, "
            f"got {list(values.shape)} {values.dtype}"
        )
    _write(field, slots, values)


def _check(operation: str, field: Tensor, slots: Tensor) -> None:
    if field.dim() < 1 or not field[0].is_contiguous() or field.dtype.itemsize not in _BITS:
        raise SchemaError(
            f"{operation}: a field is [S1, ...] whose rows are contiguous, "
            f"got {list(field.shape)} {field.dtype} with strides {list(field.stride())}"
        )
    if slots.dtype != torch.int32 or slots.dim() != 1 or not slots.is_contiguous():
        raise SchemaError(
            f"{operation}: slots must be [rows] int32 and contiguous, "
            f"got {list(slots.shape)} {slots.dtype}"
        )
