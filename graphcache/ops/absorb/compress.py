"""The compressor's part of the kernel: tail rows, and the entry of the block they complete."""

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
from .._triton import jit, tl, triton


@jit
def lands(slots, token, q_len, slot, ROWS: tl.constexpr, OUTRUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a token's row goes into a ring: it is among the last ROWS of its run."""
    lands = slot >= 0
    if OUTRUNS:
        goes_on = lands & (token % q_len + ROWS < q_len)
        lands = lands & (tl.load(slots + token + ROWS, mask=goes_on, other=-1) < 0)
    return lands


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
    # Row by row, each spread over all threads: a sum over rows is then each thread's own.
    inside = lane < WIDTH
    for start in range(0, M, CHUNK):
        values = ()
        gates = ()
        for i in tl.static_range(CHUNK):
            x = first + start + i
            there = (x >= 0) & (start + i < M)
            own = there & (x >= run_start)
            old = inside & there & (x < run_start)
            new = inside & own
            ring_at = (x % ROWS) * WIDTH + lane
            input_at = (token_of_first + start + i).to(tl.int64) * in_stride + lane
            value = tl.load(ring_values + ring_at, mask=old, other=0).to(tl.float32)
            gate = tl.load(ring_gates + ring_at, mask=old, other=0).to(tl.float32)
            new_value = tl.load(in_values + input_at, mask=new, other=0).to(tl.float32)
            new_gate = tl.load(in_gates + input_at, mask=new, other=0).to(tl.float32)
            added = tl.load(bias + (start + i) * bias_stride + lane, mask=new, other=0)
            new_gate = new_gate + added.to(tl.float32)
            # As the ring would have held them.
            new_value = new_value.to(ring_values.dtype.element_ty).to(tl.float32)
            new_gate = new_gate.to(ring_gates.dtype.element_ty).to(tl.float32)
            # Selected, not multiplied: rows of positions before 0 may hold NaN.
            values += (tl.where(own, new_value, value),)  # type: ignore[assignment]
            gate = tl.where(own, new_gate, gate)
            gates += (tl.where(there, gate, float("-inf")),)  # type: ignore[assignment]
        peak = top
        for i in tl.static_range(CHUNK):
            peak = tl.maximum(peak, gates[i])
        # Where every gate so far is -inf, -inf - -inf would be NaN.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        shrink = tl.exp(top - base)
        total = total * shrink
        acc = acc * shrink
        for i in tl.static_range(CHUNK):
            weight = tl.exp(gates[i] - base)
            total += weight
            acc += weight * values[i]
        top = peak
    return acc, total, top


@jit
def compress(  # type: ignore[no-untyped-def]
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
        landing = lands(slots, token, q_len, slot, ROWS, OUTRUNS)
        row_at = ring_at + (position % ROWS) * WIDTH + lane
        inside = lane < WIDTH
        bias_at = bias + (position % M) * COLUMNS + lane
        value = tl.load(in_values + wide * in_stride + CURRENT + lane, mask=inside, other=0)
        gate = tl.load(in_gates + wide * in_stride + CURRENT + lane, mask=inside, other=0)
        gate = gate.to(tl.float32) + tl.load(bias_at + CURRENT, mask=inside, other=0).to(tl.float32)
        kept = landing & inside
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


MAX_CHUNK = 8
"""Most rows of a block that a program has on their way at a time."""


def compressor_arguments(
    given: list[Tensor], tail: list[Tensor], stored: list[Tensor], unused: Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """Pointers and strides of a compressor in the kernel's order, and its constants."""
    if not given:
        return [unused] * 11 + [0] * 8, {"WIDTH": 0, "KEPT_ROPE": 0, "BLOCK": 16, "CHUNK": 1,
                                         "FORMAT": 0}  # fmt: skip
    rows = as_rows(stored)
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
