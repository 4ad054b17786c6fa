"""`entry_attention` on compute capability 9.0 at DeepSeek-V4's dims: one kernel in CUDA C++.

Triton waits for each product of a tile by itself. Here decoding rows and both products overlap,
and a token's splits add up through the shared memory of a cluster, without a second kernel.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from ...rows import Rows
from .._cuda import cuda_kernel, launch, nvrtc_is_there
from .._rows import format_of, row_strides

__all__ = ["attend", "serves"]

WIDTH, ROPE_DIM, TILE = 512, 64, 64
MOST_SPLITS = 8
MIN_TILES = 5
"""Fewest tiles of 64 rows in a split, where a list has more than one split."""
THREADS = 384
SHARED_BYTES = 3 * TILE * WIDTH * 2 + 4 * TILE * 4 + 64 + 9 * 2048
"""Queries and two buffers of rows; their scales; maxima and sums; barriers; a tile's weights."""


class _Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("values", "rope", "scales")] + [
        (f"{part}_{axis}", ctypes.c_int64)
        for part in ("values", "rope", "scales")
        for axis in ("place", "row")
    ]


class _Arguments(ctypes.Structure):
    _fields_ = (
        [("window", _Rows), ("entries", _Rows)]
        + [
            (name, ctypes.c_uint64)
            for name in ("q", "slots", "positions", "table", "selected", "sinks", "cos", "sin",
                         "out")
        ]
        + [(name, ctypes.c_int64) for name in ("q_token", "q_head", "table_stride")]
        + [
            (name, ctypes.c_int)
            for name in ("heads", "window_size", "ring", "compression", "held", "top_k",
                         "min_tiles")
        ]
        + [("factor", ctypes.c_float)]
    )  # fmt: skip


@cache
def _device_serves(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0) and nvrtc_is_there()


def serves(q: Tensor, rope_dim: int, ring: Rows, entries: Rows | None) -> bool:
    """Whether this kernel takes these arguments: by device, dims and strides, whatever the batch.

    It reads 16 bytes at a time: queries and rows must lie so.
    """
    if not (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and q.shape[2] == WIDTH
        and q.shape[1] % TILE == 0
        and rope_dim == ROPE_DIM
        and ring.values.dtype in (torch.uint8, torch.bfloat16)
        and _device_serves(q.device.index)
    ):
        return False
    if any(byte % 16 for byte in (q.data_ptr(), q.stride(0) * 2, q.stride(1) * 2)):
        return False
    return all(_is_aligned(rows) for rows in (ring, entries) if rows is not None)


def _is_aligned(rows: Rows) -> bool:
    for part, unit in zip(rows, (16, 16, 4), strict=True):
        if part is None:
            continue
        size = part.element_size()
        if any(b % unit for b in (part.data_ptr(), part.stride(0) * size, part.stride(1) * size)):
            return False
    return rows.rope is None or rows.rope.shape[-1] == ROPE_DIM


def splits_of(window_size: int, most_entries: int) -> int:
    """Blocks that share a token: a power of two, from the schema alone."""
    tiles = -(-window_size // TILE) + -(-most_entries // TILE)
    return 1 << max(0, min(MOST_SPLITS, tiles // MIN_TILES).bit_length() - 1)


def attend(
    q: Tensor,
    ring: Rows,
    slots: Tensor,
    positions: Tensor,
    window_size: int,
    scale: float,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    entries: Rows | None,
    table: Tensor | None,
    compression: int,
    selected: Tensor | None,
    most_entries: int,
    out: Tensor,
) -> None:
    """Launch it; arguments as `entry_attention`'s."""
    tokens, heads, _ = q.shape
    splits = splits_of(window_size, most_entries)
    defines = (("FORMAT", format_of(ring)), ("SPLITS", splits))
    kernel = cuda_kernel("entry_attention/sm90.cu", "attend", defines, SHARED_BYTES, q.device.index)
    arguments = _Arguments(
        _rows(ring), _rows(entries), *(_pointer(part) for part in (
            q, slots, positions, table, selected, sinks, cos, sin, out
        )),
        q.stride(0), q.stride(1), 0 if table is None else table.stride(0),
        heads, window_size, ring.values.shape[1], compression,
        1 if entries is None else entries.values.shape[1],
        0 if selected is None else selected.shape[1], MIN_TILES, scale * math.log2(math.e),
    )  # fmt: skip
    launch(kernel, (tokens * splits, heads // TILE), THREADS, splits, SHARED_BYTES, arguments)


def _pointer(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()


def _rows(rows: Rows | None) -> _Rows:
    if rows is None:
        return _Rows()
    sizes = [0 if part is None else part.element_size() for part in rows for _ in range(2)]
    strides = [stride * size for stride, size in zip(row_strides(rows), sizes, strict=True)]
    return _Rows(*(_pointer(part) for part in rows), *strides)
