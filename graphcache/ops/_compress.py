"""The compressor's part of `absorb`: a token's tail rows, and the entry of the block it completes.

The reference, the kernel's device functions and the checks; `absorb` is the operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SchemaError
from ..rows import Rows
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
from ._triton import jit, tl, triton

__all__ = [
    "Compressor",
    "TailParts",
    "append_tail",
    "check_compressor",
    "check_norm",
    "check_pair",
    "compress",
    "compressor_arguments",
    "emit_entries",
    "flat",
    "lands",
    "require",
    "written",
]


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


def written(slots: Tensor, q_len: int, ring_rows: int) -> Tensor:
    """Tokens whose rows land in a ring: of each run the last `ring_rows`."""
    written = slots >= 0
    if q_len > ring_rows:
        written.view(-1, q_len)[:, :-ring_rows] &= slots.view(-1, q_len)[:, ring_rows:] < 0
    return written.nonzero().squeeze(1)


def emit_entries(
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
        entry = rotated(normed(pooled, parts.norm, eps), cos[token], sin[token])
        index = position // m
        block = table[slot, index // block_entries].long()
        row = torch.tensor(index % block_entries)
        scatter(parts.entries, block, row, row_of_parts(parts.entries).encode(entry))


def _tail_rows(parts: Compressor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gates of a batch as its tail rows hold them: biased, and in the tail's dtype."""
    dtype = parts.tail.values.dtype
    bias = parts.bias.float()[positions.long() % parts.bias.shape[0]]
    return parts.values.to(dtype), (parts.gates.float() + bias).to(dtype)


def append_tail(parts: Compressor, slots: Tensor, positions: Tensor, q_len: int) -> None:
    values, gates = _tail_rows(parts, positions)
    tail, width = parts.tail, parts.norm.shape[0]
    tokens = written(slots, q_len, tail.values.shape[1])
    place, row = slots[tokens].long(), positions[tokens].long() % tail.values.shape[1]
    tail.values[place, row] = values[tokens, -width:]
    tail.gates[place, row] = gates[tokens, -width:]
    if tail.previous_values is not None and tail.previous_gates is not None:
        tail.previous_values[place, row] = values[tokens, :width]
        tail.previous_gates[place, row] = gates[tokens, :width]


# --- in the kernel --------------------------------------------------------------------------------


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


# --- arguments ------------------------------------------------------------------------------------


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


def flat(parts: Compressor | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if parts is None:
        return [], [], []
    rings = [ring for ring in parts.tail if ring is not None]
    return list(parts[:4]), rings, parts.entries.parts()


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
