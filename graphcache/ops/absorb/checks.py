"""What a batch and its rings must be, checked before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SchemaError
from ...rows import Rows
from .._rows import (
    check_rows,
)
from .parts import Compressor, Rotation


def check_batch(entries: Tensor, slots: Tensor, positions: Tensor, q_len: int) -> None:
    require(
        entries.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and entries.dim() == 2
        and entries.stride(1) == 1,
        "entries are [T, D] float32, bfloat16 or float16 with a contiguous last axis, "
        f"got {list(entries.shape)} {entries.dtype} with strides {list(entries.stride())}",
    )
    for name, given in (("slots", slots), ("positions", positions)):
        require(
            given.dtype == torch.int32
            and given.shape == entries.shape[:1]
            and given.is_contiguous(),
            f"{name} must be [{entries.shape[0]}] int32, contiguous, "
            f"got {list(given.shape)} {given.dtype}",
        )
    require(
        q_len >= 1 and entries.shape[0] % q_len == 0,
        f"{entries.shape[0]} tokens don't make whole rows of q_len={q_len}",
    )


def check_window(entries: Tensor, rows: Rows, tags: Tensor | None) -> None:
    check_rows("absorb", "window rows", rows, entries.shape[1])
    shape = rows.values.shape[:2]
    if tags is None:
        require(
            shape[0] == 1 and shape[1] >= entries.shape[0],
            f"rows kept aside are [1, {entries.shape[0]}, ...], got {list(rows.values.shape)}",
        )
        return
    require(
        tags.dtype == torch.int32 and tags.shape == shape and tags.stride(1) == 1,
        f"the window's positions must be {list(shape)} int32, contiguous within a slot, "
        f"got {list(tags.shape)} {tags.dtype}",
    )


def check_rotation(rotation: Rotation | None, entries: Tensor) -> None:
    for part in rotation or ():
        require(
            part.dtype == torch.float32
            and part.dim() == 2
            and part.shape[0] == entries.shape[0]
            and 2 * part.shape[1] <= entries.shape[1]
            and part.is_contiguous(),
            f"cos and sin must be [{entries.shape[0]}, rope_dim / 2] float32, contiguous, "
            f"got {list(part.shape)} {part.dtype}",
        )


def check_table(table: Tensor | None) -> None:
    require(
        table is not None
        and table.dtype == torch.int32
        and table.dim() == 2
        and table.stride(1) == 1,
        "a compressor needs table, [S1, width] int32 with contiguous rows",
    )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"absorb: {message}")


def check_norm(norm: Tensor | None, width: int, name: str) -> None:
    if norm is not None:
        require(
            norm.shape == (width,) and norm.is_floating_point() and norm.is_contiguous(),
            f"{name} must be [{width}] float, contiguous, got {list(norm.shape)} {norm.dtype}",
        )


def check_compressor(
    name: str, parts: Compressor, entries: Tensor, q_len: int, *, both: bool
) -> None:
    tail, width = parts.tail, parts.norm.shape[0]
    overlap = int(tail.previous_values is not None)
    columns = (1 + overlap) * width
    check_norm(parts.norm, width, f"{name}.norm")
    m = parts.bias.shape[0]
    require(
        m >= 1 and parts.bias.shape == (m, columns) and parts.bias.is_contiguous(),
        f"{name}.bias must be [m, {columns}], contiguous, got {list(parts.bias.shape)}",
    )
    for given in (parts.values, parts.gates):
        require(
            given.shape == (entries.shape[0], columns)
            and given.stride() == (parts.values.stride(0), 1)
            and given.dtype == parts.values.dtype,
            f"{name}.values and gates must be [{entries.shape[0]}, {columns}] of one dtype and "
            f"stride, got {list(given.shape)} {given.dtype} with strides {list(given.stride())}",
        )
    ring = tail.values
    for part in (part for part in tail if part is not None):
        require(
            part.dim() == 3
            and part.dtype in (torch.float32, torch.bfloat16)
            and (part.shape, part.dtype, part.stride()) == (ring.shape, ring.dtype, ring.stride())
            and part.shape[2] == width
            and part.stride()[1:] == (width, 1),
            f"{name}.tail must be [S1, R, {width}] float32 or bfloat16 of one stride, contiguous "
            f"within a slot, got {list(part.shape)} {part.dtype}",
        )
    needed = (1 + overlap) * m + q_len - 1
    require(
        not both or ring.shape[1] >= needed,
        f"a step of {q_len} tokens a slot needs {needed} rows in {name}.tail, "
        f"it has {ring.shape[1]}: lay the layer out with step_width={q_len}",
    )
    check_rows("absorb", f"{name}.entries", parts.entries, width)


def check_pair(compressor: Compressor, index: Compressor) -> None:
    same = (
        compressor.bias.shape[0] == index.bias.shape[0]
        and (compressor.tail.previous_values is None) == (index.tail.previous_values is None)
        and compressor.tail.values.shape[1] == index.tail.values.shape[1]
        and compressor.entries.values.shape[1] == index.entries.values.shape[1]
    )
    require(same, "index must share m, overlap, tail rows and block entries with compressor")
