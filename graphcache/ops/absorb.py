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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rows import Rows
from ._compress import (
    Compressor,
    TailParts,
    append_tail,
    check_compressor,
    check_norm,
    check_pair,
    compress,
    compressor_arguments,
    emit_entries,
    flat,
    lands,
    require,
    written,
)
from ._library import register
from ._rows import (
    as_rows,
    check_rows,
    format_of,
    normalise,
    normed,
    rotate,
    rotated,
    row_of_parts,
    row_strides,
    scatter,
    store_row,
)
from ._triton import jit, jit_for_any, tl, triton

__all__ = ["Compressor", "Rotation", "TailParts", "WindowParts", "absorb"]


class Rotation(NamedTuple):
    """Of the last 2·n dims of a token's vectors, in neighbouring pairs: cos, sin [T, n] float32."""

    cos: Tensor
    sin: Tensor


class WindowParts(NamedTuple):
    """Where window rows go: rows [S1, R, ...] and the position that each holds, [S1, R] int32."""

    rows: Rows
    positions: Tensor


# --- the reference --------------------------------------------------------------------------------


def _absorb_window(
    entries: Tensor,
    norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    window: Rows,
    tags: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    if tags is None:
        tokens = (slots >= 0).nonzero().squeeze(1)
        place, row = torch.zeros_like(tokens), tokens
    else:
        tokens = written(slots, q_len, tags.shape[1])
        place, row = slots[tokens].long(), positions[tokens].long() % tags.shape[1]
        tags[place, row] = positions[tokens]
    vectors = entries[tokens].float()
    if norm is not None:
        vectors = normed(vectors, norm, eps)
    if cos is not None and sin is not None:
        vectors = rotated(vectors, cos[tokens], sin[tokens])
    scatter(window, place, row, row_of_parts(window).encode(vectors))


def _reference(
    entries: Tensor,
    norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    window: list[Tensor],
    tags: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    inputs: list[Tensor],
    tail: list[Tensor],
    stored: list[Tensor],
    index_inputs: list[Tensor],
    index_tail: list[Tensor],
    index_stored: list[Tensor],
    block_cos: Tensor | None,
    block_sin: Tensor | None,
    table: Tensor | None,
    emit: bool,
    write: bool,
) -> None:
    compressors = [
        Compressor(given[0], given[1], given[2], given[3], TailParts(*rings), as_rows(rows))
        for given, rings, rows in (
            (inputs, tail, stored),
            (index_inputs, index_tail, index_stored),
        )
        if given
    ]
    if emit and block_cos is not None and block_sin is not None and table is not None:
        # Before anything is written: rings hold what was there before the batch.
        for parts in compressors:
            emit_entries(parts, block_cos, block_sin, eps, table, slots, positions, q_len)
    _absorb_window(
        entries, norm, cos, sin, eps, as_rows(window), tags, slots, positions, q_len
    )  # fmt: skip
    if write:
        for parts in compressors:
            append_tail(parts, slots, positions, q_len)


# --- the kernel -----------------------------------------------------------------------------------


@jit
def _window_row(  # type: ignore[no-untyped-def]
    entries,
    norm,
    cos,
    sin,
    values,
    rope,
    scales,
    tags,
    slots,
    token,
    slot,
    position,
    q_len,
    eps,
    entry_stride,
    values_stride,
    values_row,
    rope_stride,
    rope_row,
    scales_stride,
    scales_row,
    tags_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    KEPT_ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    ASIDE: tl.constexpr,
    OUTRUNS: tl.constexpr,
):
    """A token's window entry: into the ring, or, for a chunk, aside in the order of its tokens."""
    lane = tl.arange(0, BLOCK)
    # Not predicated on the slot: all loads are in flight together.
    at = entries + token.to(tl.int64) * entry_stride + lane
    vector = tl.load(at, mask=lane < WIDTH, other=0).to(tl.float32)
    if HAS_NORM:
        vector = normalise(vector, norm, lane, eps, WIDTH)
    if HAS_ROTATION:
        line = token.to(tl.int64) * (ROPE_DIM // 2)
        vector = rotate(vector, cos + line, sin + line, WIDTH, ROPE_DIM, BLOCK)
    if ASIDE:
        write = slot >= 0
        place = tl.zeros([], tl.int64)
        row = token
    else:
        write = lands(slots, token, q_len, slot, ROWS, OUTRUNS)
        place = slot.to(tl.int64)
        row = position % ROWS
        tl.store(tags + place * tags_stride + row, position, mask=write)
    store_row(
        vector,
        lane,
        values + place * values_stride + row.to(tl.int64) * values_row,
        rope + place * rope_stride + row.to(tl.int64) * rope_row,
        scales + place * scales_stride + row.to(tl.int64) * scales_row,
        write,
        WIDTH,
        KEPT_ROPE,
        BLOCK,
        FORMAT,
    )


@jit_for_any("q_len")
def _absorb_kernel(  # type: ignore[no-untyped-def]
    slots,
    positions,
    q_len,
    eps,
    # window
    entries,
    norm,
    cos,
    sin,
    w_values,
    w_rope,
    w_scales,
    tags,
    entry_stride,
    w_values_stride,
    w_values_row,
    w_rope_stride,
    w_rope_row,
    w_scales_stride,
    w_scales_row,
    tags_stride,
    # what both compressors share
    block_cos,
    block_sin,
    table,
    table_stride,
    # the entries' compressor
    c_values,
    c_gates,
    c_bias,
    c_norm,
    c_ring_values,
    c_ring_gates,
    c_previous_values,
    c_previous_gates,
    c_out_values,
    c_out_rope,
    c_out_scales,
    c_in_stride,
    c_ring_stride,
    c_values_stride,
    c_values_row,
    c_rope_stride,
    c_rope_row,
    c_scales_stride,
    c_scales_row,
    # the index keys' compressor
    i_values,
    i_gates,
    i_bias,
    i_norm,
    i_ring_values,
    i_ring_gates,
    i_previous_values,
    i_previous_gates,
    i_out_values,
    i_out_rope,
    i_out_scales,
    i_in_stride,
    i_ring_stride,
    i_values_stride,
    i_values_row,
    i_rope_stride,
    i_rope_row,
    i_scales_stride,
    i_scales_row,
    ROPE_DIM: tl.constexpr,
    W_ROWS: tl.constexpr,
    W_WIDTH: tl.constexpr,
    W_KEPT_ROPE: tl.constexpr,
    W_BLOCK: tl.constexpr,
    W_FORMAT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    ASIDE: tl.constexpr,
    W_OUTRUNS: tl.constexpr,
    M: tl.constexpr,
    OVERLAP: tl.constexpr,
    C_ROWS: tl.constexpr,
    C_ENTRIES: tl.constexpr,
    C_WIDTH: tl.constexpr,
    C_KEPT_ROPE: tl.constexpr,
    C_BLOCK: tl.constexpr,
    C_CHUNK: tl.constexpr,
    C_FORMAT: tl.constexpr,
    C_OUTRUNS: tl.constexpr,
    I_WIDTH: tl.constexpr,
    I_KEPT_ROPE: tl.constexpr,
    I_BLOCK: tl.constexpr,
    I_CHUNK: tl.constexpr,
    I_FORMAT: tl.constexpr,
    EMIT: tl.constexpr,
    WRITE: tl.constexpr,
):
    """One program a token and part: 0 the window, 1 the entries' compressor, 2 the index keys'."""
    token = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    if part == 0:
        _window_row(
            entries,
            norm,
            cos,
            sin,
            w_values,
            w_rope,
            w_scales,
            tags,
            slots,
            token,
            slot,
            position,
            q_len,
            eps,
            entry_stride,
            w_values_stride,
            w_values_row,
            w_rope_stride,
            w_rope_row,
            w_scales_stride,
            w_scales_row,
            tags_stride,
            W_ROWS,
            W_WIDTH,
            ROPE_DIM,
            W_KEPT_ROPE,
            W_BLOCK,
            W_FORMAT,
            HAS_NORM,
            HAS_ROTATION,
            ASIDE,
            W_OUTRUNS,
        )
    if C_WIDTH > 0:
        if part == 1:
            compress(
                c_values,
                c_gates,
                c_bias,
                c_norm,
                block_cos,
                block_sin,
                c_ring_values,
                c_ring_gates,
                c_previous_values,
                c_previous_gates,
                c_out_values,
                c_out_rope,
                c_out_scales,
                table,
                slots,
                token,
                slot,
                position,
                q_len,
                eps,
                c_in_stride,
                c_ring_stride,
                table_stride,
                c_values_stride,
                c_values_row,
                c_rope_stride,
                c_rope_row,
                c_scales_stride,
                c_scales_row,
                M,
                OVERLAP,
                C_ROWS,
                C_ENTRIES,
                C_WIDTH,
                ROPE_DIM,
                C_KEPT_ROPE,
                C_BLOCK,
                C_CHUNK,
                C_FORMAT,
                EMIT,
                WRITE,
                C_OUTRUNS,
            )
    if I_WIDTH > 0:
        if part == 2:
            compress(
                i_values,
                i_gates,
                i_bias,
                i_norm,
                block_cos,
                block_sin,
                i_ring_values,
                i_ring_gates,
                i_previous_values,
                i_previous_gates,
                i_out_values,
                i_out_rope,
                i_out_scales,
                table,
                slots,
                token,
                slot,
                position,
                q_len,
                eps,
                i_in_stride,
                i_ring_stride,
                table_stride,
                i_values_stride,
                i_values_row,
                i_rope_stride,
                i_rope_row,
                i_scales_stride,
                i_scales_row,
                M,
                OVERLAP,
                C_ROWS,
                C_ENTRIES,
                I_WIDTH,
                ROPE_DIM,
                I_KEPT_ROPE,
                I_BLOCK,
                I_CHUNK,
                I_FORMAT,
                EMIT,
                WRITE,
                C_OUTRUNS,
            )


def _launch(
    entries: Tensor,
    norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    window: list[Tensor],
    tags: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    inputs: list[Tensor],
    tail: list[Tensor],
    stored: list[Tensor],
    index_inputs: list[Tensor],
    index_tail: list[Tensor],
    index_stored: list[Tensor],
    block_cos: Tensor | None,
    block_sin: Tensor | None,
    table: Tensor | None,
    emit: bool,
    write: bool,
) -> None:
    tokens, width = entries.shape
    if not tokens:
        return
    rows = as_rows(window)
    ring_rows = 1 if tags is None else tags.shape[1]
    tail_rows = tail[0].shape[1] if tail else 1
    rotation = cos if cos is not None else block_cos
    main, main_constants = compressor_arguments(inputs, tail, stored, slots)
    index, index_constants = compressor_arguments(index_inputs, index_tail, index_stored, slots)
    kernel: Any = _absorb_kernel
    kernel[(tokens, 1 + bool(inputs) + bool(index_inputs))](
        slots,
        positions,
        q_len,
        eps,
        entries,
        slots if norm is None else norm,
        slots if cos is None else cos,
        slots if sin is None else sin,
        *(slots if part is None else part for part in rows),
        slots if tags is None else tags,
        entries.stride(0),
        *row_strides(rows),
        0 if tags is None else tags.stride(0),
        slots if block_cos is None else block_cos,
        slots if block_sin is None else block_sin,
        slots if table is None else table,
        0 if table is None else table.stride(0),
        *main,
        *index,
        ROPE_DIM=0 if rotation is None else 2 * rotation.shape[1],
        W_ROWS=ring_rows,
        W_WIDTH=width,
        W_KEPT_ROPE=0 if rows.rope is None else rows.rope.shape[-1],
        W_BLOCK=triton.next_power_of_2(width),
        W_FORMAT=format_of(rows),
        HAS_NORM=norm is not None,
        HAS_ROTATION=cos is not None,
        ASIDE=tags is None,
        W_OUTRUNS=q_len > ring_rows,
        M=inputs[2].shape[0] if inputs else 1,
        OVERLAP=int(len(tail) == 4),
        C_ROWS=tail_rows,
        C_ENTRIES=stored[0].shape[1] if stored else 1,
        C_OUTRUNS=q_len > tail_rows,
        **{f"C_{name}": value for name, value in main_constants.items()},
        **{f"I_{name}": value for name, value in index_constants.items()},
        EMIT=emit,
        WRITE=write,
        num_warps=_warps(width, bool(inputs)),
    )


def _warps(width: int, compresses: bool) -> int:
    if not compresses:
        return max(1, width // 512)
    return 4 if width >= 256 else 1


def _fake(*_: Any) -> None:
    return None


_op = register(
    "absorb(Tensor entries, Tensor? norm, Tensor? cos, Tensor? sin, float eps, "
    "Tensor(a!)[] window, Tensor(b!)? tags, Tensor slots, Tensor positions, int q_len, "
    "Tensor[] inputs, Tensor(c!)[] tail, Tensor(d!)[] stored, "
    "Tensor[] index_inputs, Tensor(e!)[] index_tail, Tensor(f!)[] index_stored, "
    "Tensor? block_cos, Tensor? block_sin, Tensor? table, bool emit, bool write) -> ()",
    reference=_reference,
    kernel=_launch,
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
    _check_batch(entries, slots, positions, q_len)
    _check_window(entries, rows, tags)
    check_norm(norm, entries.shape[1], "norm")
    _check_rotation(rotation, entries)
    require(compressor is not None or index is None, "an index compressor goes with a compressor")
    if compressor is not None:
        _check_rotation(block_rotation, entries)
        require(block_rotation is not None, "a compressor needs block_rotation")
        _check_table(table)
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


def _check_batch(entries: Tensor, slots: Tensor, positions: Tensor, q_len: int) -> None:
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


def _check_window(entries: Tensor, rows: Rows, tags: Tensor | None) -> None:
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


def _check_rotation(rotation: Rotation | None, entries: Tensor) -> None:
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


def _check_table(table: Tensor | None) -> None:
    require(
        table is not None
        and table.dtype == torch.int32
        and table.dim() == 2
        and table.stride(1) == 1,
        "a compressor needs table, [S1, width] int32 with contiguous rows",
    )
