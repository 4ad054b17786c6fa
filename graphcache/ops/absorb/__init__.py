"""Take a batch's tokens into an entry layer's state: window, tails, compressed entries. One kernel.

A token's window entry is normed, rotated and quantised on its way into the ring. A compressor's
values and gates go into the tail's rings, and a token that completes a block of `m` tokens *emits*
that block's entry:

    weight = softmax of gates over the rows read, by channel      rows before position 0 left out
    entry  = rotate(rms_norm(sum of weight * values), first position of the block)

and stores it, quantised, behind the block table. With overlap the rows read are the block's own in
the `current` stream and those of the block before it in the `previous` one (arXiv 2606.19348,
eqs. 9-12 and 20-23).

A program reads what this batch brings from its inputs and only older rows from the rings. The
rings are long enough that no row written by the batch is among those, so one kernel can do both
in any order. A prefill chunk may be longer than a ring: it emits first, with its window rows kept
aside, and writes the rings in a second call, of a run only the last rows.

Padding (slot -1) reads and writes nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...rows import Rows
from .._library import register
from . import kernel, reference
from .checks import (
    check_batch,
    check_compressor,
    check_norm,
    check_pair,
    check_rotation,
    check_table,
    check_window,
    require,
)
from .parts import Compressor, Rotation, TailParts, WindowParts, flat

__all__ = ["Compressor", "Rotation", "TailParts", "WindowParts", "absorb"]


def _fake(*_: Any) -> None:
    return None


_op = register(
    "absorb(Tensor entries, Tensor? norm, Tensor? cos, Tensor? sin, float eps, "
    "Tensor(a!)[] window, Tensor(b!)? tags, Tensor slots, Tensor positions, int q_len, "
    "Tensor[] inputs, Tensor(c!)[] tail, Tensor(d!)[] stored, "
    "Tensor[] index_inputs, Tensor(e!)[] index_tail, Tensor(f!)[] index_stored, "
    "Tensor? block_cos, Tensor? block_sin, Tensor? table, bool emit, bool write) -> ()",
    reference=reference.absorb,
    kernel=kernel.launch,
    fake=_fake,
)


def absorb(
    entries: Tensor,
    window: WindowParts | Rows,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    *,
    norm: Tensor | None = None,
    rotation: Rotation | None = None,
    eps: float = 1e-6,
    compressor: Compressor | None = None,
    index: Compressor | None = None,
    block_rotation: Rotation | None = None,
    table: Tensor | None = None,
    emit: bool = True,
    write: bool = True,
) -> None:
    """Write a batch's window rows and tail rows, and emit the entries that it completes.

    One kernel, one node; current stream; no synchronization, no allocation; can be captured. A
    token's bits don't depend on the batch around it. For the formulas see the module.

    Args:
        entries: [T, D] float32, bfloat16 or float16, projected; any row stride.
        window: where they go, a ring by slot; or rows [1, T, ...], to keep a chunk's aside in the
            order of its tokens.
        slots: [T] int32, -1 for padding, which writes nothing and may hold NaN.
        positions: [T] int32; each run ascends from its slot's length.
        q_len: tokens a row; T is a multiple of it. Of a run longer than a ring the last rows are
            written.
        norm: [D], weight of an RMS norm before rotation; None where entries come normed.
        rotation: of the entries, at their positions; None where they come rotated.
        eps: of every norm.
        compressor: of the layer's compressed entries; None for a layer of window only.
        index: of an indexer's keys, with the same m, overlap, rings and blocks.
        block_rotation: at position + 1 - m, the first of the block that the token completes.
        table: [S1, width] int32 block ids.
        emit: emit entries.
        write: write the tail's rings.

    Raises:
        SchemaError: for shapes, dtypes or strides other than these, or a run too long to be
            emitted and written at once; before anything is written.
    """
    rows, tags = (window.rows, window.positions) if isinstance(window, WindowParts) else (
        window, None
    )  # fmt: skip
    check_batch(entries, slots, positions, q_len)
    check_window(entries, rows, tags)
    check_norm(norm, entries.shape[1], "norm")
    check_rotation(rotation, entries)
    require(compressor is not None or index is None, "an index compressor goes with a compressor")
    if compressor is not None:
        check_rotation(block_rotation, entries)
        require(block_rotation is not None, "a compressor needs block_rotation")
        check_table(table)
        check_compressor("compressor", compressor, entries, q_len, both=emit and write)
    if index is not None and compressor is not None:
        check_compressor("index", index, entries, q_len, both=emit and write)
        check_pair(compressor, index)
    cos, sin = rotation or (None, None)
    block_cos, block_sin = block_rotation or (None, None)
    _op(
        entries, norm, cos, sin, eps, rows.parts(), tags, slots, positions, q_len,
        *flat(compressor), *flat(index), block_cos, block_sin, table, emit, write,
    )  # fmt: skip
