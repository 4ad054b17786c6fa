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

from ..errors import SchemaError
from ..rows import Rows
from ._library import register
from ._rows import (
    check_rows,
    format_of,
    normalise,
    rotate,
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


class TailParts(NamedTuple):
    """A tail's rings, each [S1, R, D] of one dtype; the previous stream's only with overlap."""

    values: Tensor
    gates: Tensor
    previous_values: Tensor | None = None
    previous_gates: Tensor | None = None


class Compressor(NamedTuple):
    """What a compressor is given for a batch, and where it keeps it. ov is 1 with overlap, else 0.

    Attributes:
        values: [T, (1+ov)·D], projected; with overlap the previous stream's dims come first.
        gates: [T, (1+ov)·D], likewise, before the bias.
        bias: [m, (1+ov)·D], added to the gates by position in the block.
        norm: [D], weight of the entry's norm.
        tail: the rings.
        entries: [blocks, entries of a block, ...]: where entries are stored.
    """

    values: Tensor
    gates: Tensor
    bias: Tensor
    norm: Tensor
    tail: TailParts
    entries: Rows


# --- the reference --------------------------------------------------------------------------------


def _normed(vectors: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = vectors.square().mean(-1, keepdim=True)
    return vectors / (mean + eps).sqrt() * weight.float()


def _rotated(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    even, odd = vectors[..., -width::2], vectors[..., -width + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((vectors[..., :-width], turned), -1)


def _written(slots: Tensor, q_len: int, ring_rows: int) -> Tensor:
    """Tokens whose rows land in a ring: of each run the last `ring_rows`."""
    written = slots >= 0
    if q_len > ring_rows:
        written.view(-1, q_len)[:, :-ring_rows] &= slots.view(-1, q_len)[:, ring_rows:] < 0
    return written.nonzero().squeeze(1)


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
        tokens = _written(slots, q_len, tags.shape[1])
        place, row = slots[tokens].long(), positions[tokens].long() % tags.shape[1]
        tags[place, row] = positions[tokens]
    vectors = entries[tokens].float()
    if norm is not None:
        vectors = _normed(vectors, norm, eps)
    if cos is not None and sin is not None:
        vectors = _rotated(vectors, cos[tokens], sin[tokens])
    scatter(window, place, row, row_of_parts(window).encode(vectors))


def _emit(
    parts: Compressor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    values, gates = _tail_rows(parts, positions)
    tail, m, width = parts.tail, parts.bias.shape[0], parts.norm.shape[0]
    ring_rows = tail.values.shape[1]
    block_entries = parts.entries.values.shape[1]
    streams = [(tail.values, tail.gates, 0, slice(-width, None))]
    if tail.previous_values is not None and tail.previous_gates is not None:
        streams.insert(0, (tail.previous_values, tail.previous_gates, m, slice(0, width)))
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0 or (position + 1) % m:
            continue
        run_start = position - token % q_len
        read_values, read_gates = [], []
        for ring_values, ring_gates, back, columns in streams:
            for x in range(max(0, position - m + 1 - back), position - back + 1):
                if x >= run_start:
                    own = token - (position - x)
                    read_values.append(values[own, columns])
                    read_gates.append(gates[own, columns])
                else:
                    read_values.append(ring_values[slot, x % ring_rows])
                    read_gates.append(ring_gates[slot, x % ring_rows])
        weight = torch.stack(read_gates).float().softmax(0)
        pooled = (weight * torch.stack(read_values).float()).sum(0)
        entry = _rotated(_normed(pooled, parts.norm, eps), cos[token], sin[token])
        index = position // m
        block = table[slot, index // block_entries].long()
        row = torch.tensor(index % block_entries)
        scatter(parts.entries, block, row, row_of_parts(parts.entries).encode(entry))


def _tail_rows(parts: Compressor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gates of a batch as its tail rows hold them: biased, and in the tail's dtype."""
    dtype = parts.tail.values.dtype
    bias = parts.bias.float()[positions.long() % parts.bias.shape[0]]
    return parts.values.to(dtype), (parts.gates.float() + bias).to(dtype)


def _append_tail(parts: Compressor, slots: Tensor, positions: Tensor, q_len: int) -> None:
    values, gates = _tail_rows(parts, positions)
    tail, width = parts.tail, parts.norm.shape[0]
    tokens = _written(slots, q_len, tail.values.shape[1])
    place, row = slots[tokens].long(), positions[tokens].long() % tail.values.shape[1]
    tail.values[place, row] = values[tokens, -width:]
    tail.gates[place, row] = gates[tokens, -width:]
    if tail.previous_values is not None and tail.previous_gates is not None:
        tail.previous_values[place, row] = values[tokens, :width]
        tail.previous_gates[place, row] = gates[tokens, :width]


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
        Compressor(given[0], given[1], given[2], given[3], TailParts(*rings), _as_rows(rows))
        for given, rings, rows in (
            (inputs, tail, stored),
            (index_inputs, index_tail, index_stored),
        )
        if given
    ]
    if emit and block_cos is not None and block_sin is not None and table is not None:
        # Before anything is written: rings hold what was there before the batch.
        for parts in compressors:
            _emit(parts, block_cos, block_sin, eps, table, slots, positions, q_len)
    _absorb_window(
        entries, norm, cos, sin, eps, _as_rows(window), tags, slots, positions, q_len
    )  # fmt: skip
    if write:
        for parts in compressors:
            _append_tail(parts, slots, positions, q_len)


def _as_rows(parts: list[Tensor]) -> Rows:
    """Rows from their parts: values; values, scales; or values, rope, scales."""
    if len(parts) == 2:
        return Rows(parts[0], None, parts[1])
    return Rows(*parts)


# --- the kernel -----------------------------------------------------------------------------------


@jit
def _lands(slots, token, q_len, slot, ROWS: tl.constexpr, OUTRUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a token's row goes into a ring: it is among the last ROWS of its run."""
    lands = slot >= 0
    if OUTRUNS:
        goes_on = lands & (token % q_len + ROWS < q_len)
        lands = lands & (tl.load(slots + token + ROWS, mask=goes_on, other=-1) < 0)
    return lands


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
        write = _lands(slots, token, q_len, slot, ROWS, OUTRUNS)
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


@jit
def _pool_stream(  # type: ignore[no-untyped-def]
    acc,
    total,
    top,
    in_values,
    in_gates,
    bias,
    ring_values,
    ring_gates,
    first,
    run_start,
    token_of_first,
    in_stride,
    bias_stride,
    lane,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The M rows of one stream from position `first` into an online softmax by channel.

    Args:
        in_values, in_gates, bias: pointers to the stream's first column.
        ring_values, ring_gates: pointers to the slot's ring.
        run_start: position of the run's first token: from there on rows come from the inputs.
        token_of_first: token of the batch that has position `first`, were it part of the run.
    """
    for start in tl.static_range(0, M, CHUNK):
        offset = start + tl.arange(0, CHUNK)
        x = first + offset
        there = (offset < M) & (x >= 0)
        own = there & (x >= run_start)
        old = there & (x < run_start)
        inside = (lane < WIDTH)[None, :]
        ring_at = (x % ROWS)[:, None] * WIDTH + lane[None, :]
        input_at = (token_of_first + offset).to(tl.int64)[:, None] * in_stride + lane[None, :]
        old_mask = old[:, None] & inside
        own_mask = own[:, None] & inside
        value = tl.load(ring_values + ring_at, mask=old_mask, other=0).to(tl.float32)
        gate = tl.load(ring_gates + ring_at, mask=old_mask, other=0).to(tl.float32)
        new_value = tl.load(in_values + input_at, mask=own_mask, other=0).to(tl.float32)
        new_gate = tl.load(in_gates + input_at, mask=own_mask, other=0).to(tl.float32)
        added = tl.load(
            bias + offset[:, None] * bias_stride + lane[None, :], mask=own_mask, other=0
        )
        new_gate = new_gate + added.to(tl.float32)
        # As the ring would have held them.
        new_value = new_value.to(ring_values.dtype.element_ty).to(tl.float32)
        new_gate = new_gate.to(ring_gates.dtype.element_ty).to(tl.float32)
        # Selected, not multiplied: rows of positions before 0 may hold NaN.
        value = tl.where(own[:, None], new_value, value)
        gate = tl.where(own[:, None], new_gate, gate)
        gate = tl.where(there[:, None], gate, float("-inf"))
        peak = tl.maximum(top, tl.max(gate, axis=0))
        # Where every gate so far is -inf, -inf - -inf would be NaN.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp(gate - base[None, :])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(weight * value, axis=0)
        top = peak
    return acc, total, top


@jit
def _compress(  # type: ignore[no-untyped-def]
    in_values,
    in_gates,
    bias,
    norm,
    cos,
    sin,
    ring_values,
    ring_gates,
    previous_values,
    previous_gates,
    values,
    rope,
    scales,
    table,
    slots,
    token,
    slot,
    position,
    q_len,
    eps,
    in_stride,
    ring_stride,
    table_stride,
    values_stride,
    values_row,
    rope_stride,
    rope_row,
    scales_stride,
    scales_row,
    M: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    KEPT_ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FORMAT: tl.constexpr,
    EMIT: tl.constexpr,
    WRITE: tl.constexpr,
    OUTRUNS: tl.constexpr,
):
    """A token's tail rows, and the entry of the block that it completes."""
    lane = tl.arange(0, BLOCK)
    COLUMNS: tl.constexpr = WIDTH * (1 + OVERLAP)
    CURRENT: tl.constexpr = WIDTH * OVERLAP
    wide = token.to(tl.int64)
    slot = slot.to(tl.int64)
    ring_at = slot * ring_stride
    if WRITE:
        lands = _lands(slots, token, q_len, slot, ROWS, OUTRUNS)
        row_at = ring_at + (position % ROWS) * WIDTH + lane
        inside = lane < WIDTH
        bias_at = bias + (position % M) * COLUMNS + lane
        value = tl.load(in_values + wide * in_stride + CURRENT + lane, mask=inside, other=0)
        gate = tl.load(in_gates + wide * in_stride + CURRENT + lane, mask=inside, other=0)
        gate = gate.to(tl.float32) + tl.load(bias_at + CURRENT, mask=inside, other=0).to(tl.float32)
        kept = lands & inside
        tl.store(ring_values + row_at, value.to(ring_values.dtype.element_ty), mask=kept)
        tl.store(ring_gates + row_at, gate.to(ring_gates.dtype.element_ty), mask=kept)
        if OVERLAP:
            value = tl.load(in_values + wide * in_stride + lane, mask=inside, other=0)
            gate = tl.load(in_gates + wide * in_stride + lane, mask=inside, other=0)
            gate = gate.to(tl.float32) + tl.load(bias_at, mask=inside, other=0).to(tl.float32)
            tl.store(previous_values + row_at, value.to(ring_values.dtype.element_ty), mask=kept)
            tl.store(previous_gates + row_at, gate.to(ring_gates.dtype.element_ty), mask=kept)
    if EMIT:
        if (slot >= 0) & ((position + 1) % M == 0):
            column = token % q_len
            run_start = position - column
            first = position - (M - 1)
            acc = tl.zeros([BLOCK], tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            if OVERLAP:
                acc, total, top = _pool_stream(
                    acc,
                    total,
                    top,
                    in_values,
                    in_gates,
                    bias,
                    previous_values + ring_at,
                    previous_gates + ring_at,
                    first - M,
                    run_start,
                    token - (2 * M - 1),
                    in_stride,
                    COLUMNS,
                    lane,
                    M,
                    ROWS,
                    WIDTH,
                    CHUNK,
                )
            acc, total, top = _pool_stream(
                acc,
                total,
                top,
                in_values + CURRENT,
                in_gates + CURRENT,
                bias + CURRENT,
                ring_values + ring_at,
                ring_gates + ring_at,
                first,
                run_start,
                token - (M - 1),
                in_stride,
                COLUMNS,
                lane,
                M,
                ROWS,
                WIDTH,
                CHUNK,
            )
            pooled = tl.where(lane < WIDTH, acc / total, 0.0)
            entry = normalise(pooled, norm, lane, eps, WIDTH)
            line = wide * (ROPE_DIM // 2)
            entry = rotate(entry, cos + line, sin + line, WIDTH, ROPE_DIM, BLOCK)
            index = position // M
            block = tl.load(table + slot * table_stride + index // ENTRIES).to(tl.int64)
            row = (index % ENTRIES).to(tl.int64)
            store_row(
                entry,
                lane,
                values + block * values_stride + row * values_row,
                rope + block * rope_stride + row * rope_row,
                scales + block * scales_stride + row * scales_row,
                True,
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
            _compress(
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
            _compress(
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


MAX_CHUNK = 16
"""Most rows of a block that a program reads at a time."""


def _compressor_arguments(
    given: list[Tensor], tail: list[Tensor], stored: list[Tensor], unused: Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """Pointers and strides of a compressor in the kernel's order, and its constants."""
    if not given:
        return [unused] * 11 + [0] * 8, {"WIDTH": 0, "KEPT_ROPE": 0, "BLOCK": 16, "CHUNK": 1,
                                         "FORMAT": 0}  # fmt: skip
    rows = _as_rows(stored)
    bias, norm = given[2], given[3]
    width = norm.shape[0]
    block = triton.next_power_of_2(width)
    rings = tail if len(tail) == 4 else [*tail, *tail]
    pointers = [*given, *rings, *(unused if part is None else part for part in rows)]
    strides = [given[0].stride(0), tail[0].stride(0), *row_strides(rows)]
    return pointers + strides, {
        "WIDTH": width,
        "KEPT_ROPE": 0 if rows.rope is None else rows.rope.shape[-1],
        "BLOCK": block,
        "CHUNK": min(MAX_CHUNK, triton.next_power_of_2(bias.shape[0])),
        "FORMAT": format_of(rows),
    }


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
    rows = _as_rows(window)
    ring_rows = 1 if tags is None else tags.shape[1]
    tail_rows = tail[0].shape[1] if tail else 1
    rotation = cos if cos is not None else block_cos
    main, main_constants = _compressor_arguments(inputs, tail, stored, slots)
    index, index_constants = _compressor_arguments(index_inputs, index_tail, index_stored, slots)
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


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"absorb: {message}")


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
    _check_norm(norm, entries.shape[1], "norm")
    _check_rotation(rotation, entries)
    _require(compressor is not None or index is None, "an index compressor goes with a compressor")
    if compressor is not None:
        _check_rotation(block_rotation, entries)
        _require(block_rotation is not None, "a compressor needs block_rotation")
        _check_table(table)
        _check_compressor("compressor", compressor, entries, q_len, both=emit and write)
    if index is not None and compressor is not None:
        _check_compressor("index", index, entries, q_len, both=emit and write)
        _check_pair(compressor, index)
    cos, sin = rotation or (None, None)
    block_cos, block_sin = block_rotation or (None, None)
    _op(
        entries, norm, cos, sin, eps, rows.parts(), tags, slots, positions, q_len,
        *_flat(compressor), *_flat(index), block_cos, block_sin, table, emit, write,
    )  # fmt: skip


def _flat(parts: Compressor | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if parts is None:
        return [], [], []
    rings = [ring for ring in parts.tail if ring is not None]
    return list(parts[:4]), rings, parts.entries.parts()


def _check_batch(entries: Tensor, slots: Tensor, positions: Tensor, q_len: int) -> None:
    _require(
        entries.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and entries.dim() == 2
        and entries.stride(1) == 1,
        "entries are [T, D] float32, bfloat16 or float16 with a contiguous last axis, "
        f"got {list(entries.shape)} {entries.dtype} with strides {list(entries.stride())}",
    )
    for name, given in (("slots", slots), ("positions", positions)):
        _require(
            given.dtype == torch.int32
            and given.shape == entries.shape[:1]
            and given.is_contiguous(),
            f"{name} must be [{entries.shape[0]}] int32, contiguous, "
            f"got {list(given.shape)} {given.dtype}",
        )
    _require(
        q_len >= 1 and entries.shape[0] % q_len == 0,
        f"{entries.shape[0]} tokens don't make whole rows of q_len={q_len}",
    )


def _check_window(entries: Tensor, rows: Rows, tags: Tensor | None) -> None:
    check_rows("absorb", "window rows", rows, entries.shape[1])
    shape = rows.values.shape[:2]
    if tags is None:
        _require(
            shape[0] == 1 and shape[1] >= entries.shape[0],
            f"rows kept aside are [1, {entries.shape[0]}, ...], got {list(rows.values.shape)}",
        )
        return
    _require(
        tags.dtype == torch.int32 and tags.shape == shape and tags.stride(1) == 1,
        f"the window's positions must be {list(shape)} int32, contiguous within a slot, "
        f"got {list(tags.shape)} {tags.dtype}",
    )


def _check_norm(norm: Tensor | None, width: int, name: str) -> None:
    if norm is not None:
        _require(
            norm.shape == (width,) and norm.is_floating_point() and norm.is_contiguous(),
            f"{name} must be [{width}] float, contiguous, got {list(norm.shape)} {norm.dtype}",
        )


def _check_rotation(rotation: Rotation | None, entries: Tensor) -> None:
    for part in rotation or ():
        _require(
            part.dtype == torch.float32
            and part.dim() == 2
            and part.shape[0] == entries.shape[0]
            and 2 * part.shape[1] <= entries.shape[1]
            and part.is_contiguous(),
            f"cos and sin must be [{entries.shape[0]}, rope_dim / 2] float32, contiguous, "
            f"got {list(part.shape)} {part.dtype}",
        )


def _check_table(table: Tensor | None) -> None:
    _require(
        table is not None
        and table.dtype == torch.int32
        and table.dim() == 2
        and table.stride(1) == 1,
        "a compressor needs table, [S1, width] int32 with contiguous rows",
    )


def _check_compressor(
    name: str, parts: Compressor, entries: Tensor, q_len: int, *, both: bool
) -> None:
    tail, width = parts.tail, parts.norm.shape[0]
    overlap = int(tail.previous_values is not None)
    columns = (1 + overlap) * width
    _check_norm(parts.norm, width, f"{name}.norm")
    m = parts.bias.shape[0]
    _require(
        m >= 1 and parts.bias.shape == (m, columns) and parts.bias.is_contiguous(),
        f"{name}.bias must be [m, {columns}], contiguous, got {list(parts.bias.shape)}",
    )
    for given in (parts.values, parts.gates):
        _require(
            given.shape == (entries.shape[0], columns)
            and given.stride() == (parts.values.stride(0), 1)
            and given.dtype == parts.values.dtype,
            f"{name}.values and gates must be [{entries.shape[0]}, {columns}] of one dtype and "
            f"stride, got {list(given.shape)} {given.dtype} with strides {list(given.stride())}",
        )
    ring = tail.values
    for part in (part for part in tail if part is not None):
        _require(
            part.dim() == 3
            and part.dtype in (torch.float32, torch.bfloat16)
            and (part.shape, part.dtype, part.stride()) == (ring.shape, ring.dtype, ring.stride())
            and part.shape[2] == width
            and part.stride()[1:] == (width, 1),
            f"{name}.tail must be [S1, R, {width}] float32 or bfloat16 of one stride, contiguous "
            f"within a slot, got {list(part.shape)} {part.dtype}",
        )
    needed = (1 + overlap) * m + q_len - 1
    _require(
        not both or ring.shape[1] >= needed,
        f"a step of {q_len} tokens a slot needs {needed} rows in {name}.tail, "
        f"it has {ring.shape[1]}: lay the layer out with step_width={q_len}",
    )
    check_rows("absorb", f"{name}.entries", parts.entries, width)


def _check_pair(compressor: Compressor, index: Compressor) -> None:
    same = (
        compressor.bias.shape[0] == index.bias.shape[0]
        and (compressor.tail.previous_values is None) == (index.tail.previous_values is None)
        and compressor.tail.values.shape[1] == index.tail.values.shape[1]
        and compressor.entries.values.shape[1] == index.entries.values.shape[1]
    )
    _require(same, "index must share m, overlap, tail rows and block entries with compressor")
