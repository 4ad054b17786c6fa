"""The kernel: one program a token for its window row, one for each of its compressors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._rows import (
    as_rows,
    format_of,
    normalise,
    rotate,
    row_strides,
    store_row,
)
from .._triton import jit, jit_for_any, tl, triton
from .compress import compress, compressor_arguments, lands


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


def launch(
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
