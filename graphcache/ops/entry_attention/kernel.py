"""The kernels in Triton, and which implementation serves a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...rows import Rows
from .._rows import format_of, row_strides
from .._triton import jit, jit_for_any, tl, triton
from . import sm90
from .pieces import by_row, decode, list_of, load_piece, rotate_back, store_piece

MAX_SPLITS = 16
MIN_TILES = 5
"""Fewest tiles of rows in a split, where a list has more than one split."""
STAGES = 3
"""Tiles in flight: a list's indices, its rows, and those worked on."""
ADD_HEADS = 4
"""Heads that one program adds the splits of."""


@jit_for_any("q_len")
def _attend_kernel(  # type: ignore[no-untyped-def]
    q,
    w_values,
    w_rope,
    w_scales,
    o_values,
    o_rope,
    o_scales,
    e_values,
    e_rope,
    e_scales,
    slots,
    positions,
    table,
    selected,
    sinks,
    cos,
    sin,
    out,
    partials,
    stats,
    q_len,
    factor,
    q_token_stride,
    q_head_stride,
    w_values_stride,
    w_values_row,
    w_rope_stride,
    w_rope_row,
    w_scales_stride,
    w_scales_row,
    o_values_row,
    o_rope_row,
    o_scales_row,
    e_values_stride,
    e_values_row,
    e_rope_stride,
    e_rope_row,
    e_scales_stride,
    e_scales_row,
    table_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PIECE: tl.constexpr,
    ROPE_PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    M: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """One program a token, tile of heads and split: an online softmax over the split's rows.

    A row is taken in pieces of one width, and its rotated dims by themselves. Codes of e4m3 are
    exact in float16, which the device makes of them in one instruction; rotated dims stay in
    bfloat16. A scale a token is multiplied into logits and weights, not into the row.
    """
    FIXED: tl.constexpr = WIDTH - ROPE_DIM
    PIECES: tl.constexpr = (FIXED + PIECE - 1) // PIECE
    rotated: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    fixed: tl.constexpr = rotated if WIDE or FORMAT == 0 else tl.float16
    FOLDED: tl.constexpr = FORMAT == 1 and not WIDE
    token = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    head = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = head < HEADS
    line = token.to(tl.int64) * HEADS + head
    out_at = out + line * WIDTH
    if slot < 0:
        if SPLITS == 1:
            nothing = tl.zeros([BLOCK_M, PIECE], tl.float32)
            for offset in tl.static_range(0, WIDTH, PIECE):
                store_piece(out_at, nothing, real, offset, PIECE, WIDTH)
        return
    in_window, count, window_tiles, tiles, per_split = list_of(
        position, WINDOW, M, TOP_K, BLOCK_N, SPLITS, MIN
    )
    begin = split * per_split
    if begin >= tiles:
        return

    q_at = q + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
    query = ()
    acc = ()
    for i in tl.static_range(PIECES):
        query += (load_piece(q_at, real, i * PIECE, PIECE, FIXED).to(fixed),)  # type: ignore[assignment]
        acc += (tl.zeros([BLOCK_M, PIECE], tl.float32),)  # type: ignore[assignment]
    query_r = load_piece(q_at + FIXED, real, 0, ROPE_PIECE, ROPE_DIM).to(rotated)
    acc_r = tl.zeros([BLOCK_M, ROPE_PIECE], tl.float32)
    slot = slot.to(tl.int64)
    first = position + 1 - in_window
    run_start = position - token % q_len
    ring_values = w_values + slot * w_values_stride
    ring_rope = w_rope + slot * w_rope_stride
    ring_scales = w_scales + slot * w_scales_stride
    table_row = table + slot * table_stride
    chosen = selected + token.to(tl.int64) * TOP_K

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    for step in tl.range(begin, tl.minimum(begin + per_split, tiles), num_stages=STAGES):
        # What is loaded for each row is loaded by as many lanes as there are threads and then
        # gathered: loads of fewer the compiler repeats in every layout that uses them.
        spread = tl.arange(0, BLOCK_N * SPREAD) // SPREAD
        lane = tl.arange(0, BLOCK_N)
        index = step * BLOCK_N + lane
        inside = index < in_window
        row = (first + index) % RING
        values_at = ring_values + row * w_values_row
        rope_at = ring_rope + row * w_rope_row
        scales_at = ring_scales + row * w_scales_row
        if HAS_OWN:
            own = first + index >= run_start
            aside = (token - position + first + index).to(tl.int64)
            values_at = tl.where(own, o_values + aside * o_values_row, values_at)
            rope_at = tl.where(own, o_rope + aside * o_rope_row, rope_at)
            scales_at = tl.where(own, o_scales + aside * o_scales_row, scales_at)
        if M > 0:
            compressed = step >= window_tiles
            offset = (step - window_tiles) * BLOCK_N
            known = compressed & (offset + spread < count)
            entry = offset + spread
            if TOP_K > 0:
                entry = tl.load(chosen + entry, mask=known, other=0)
            place = tl.load(table_row + entry // ENTRIES, mask=known, other=0)
            place = by_row(place, BLOCK_N, SPREAD).to(tl.int64)
            row = by_row(entry, BLOCK_N, SPREAD) % ENTRIES
            e_at = e_values + place * e_values_stride + row * e_values_row
            values_at = tl.where(compressed, e_at, values_at)
            e_at = e_rope + place * e_rope_stride + row * e_rope_row
            rope_at = tl.where(compressed, e_at, rope_at)
            e_at = e_scales + place * e_scales_stride + row * e_scales_row
            scales_at = tl.where(compressed, e_at, scales_at)
            inside = tl.where(compressed, offset + lane < count, inside)
        if FORMAT == 0:
            rope_at = values_at + FIXED
        scale = tl.full([BLOCK_N], 1.0, tl.float32)
        if FORMAT == 1:
            shape: tl.constexpr = [BLOCK_N, SPREAD]
            at = tl.broadcast_to(scales_at[:, None], shape)
            loaded = tl.load(at, mask=tl.broadcast_to(inside[:, None], shape), other=0)
            scale = tl.max(loaded, axis=1)
        # All pieces before the first product: one barrier for their way through shared memory.
        kv = ()
        for i in tl.static_range(PIECES):
            codes = load_piece(values_at, inside, i * PIECE, PIECE, FIXED)
            if FORMAT == 2:
                exponent = tl.load(scales_at + i, mask=inside, other=0)
                scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            kv += (decode(codes, scale, FORMAT, fixed),)  # type: ignore[assignment]
        kv_r = load_piece(rope_at, inside, 0, ROPE_PIECE, ROPE_DIM).to(rotated)
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.static_range(PIECES):
            logits = tl.dot(query[i], tl.trans(kv[i]), logits, input_precision="ieee")
        if FOLDED:
            logits = logits * scale[None, :]
        logits = tl.dot(query_r, tl.trans(kv_r), logits, input_precision="ieee") * factor
        logits = tl.where(inside[None, :], logits, float("-inf"))
        # A tile holds a row that is inside, so its maximum is finite.
        top = tl.maximum(most, tl.max(logits, 1))
        weight = tl.exp2(logits - top[:, None])
        shrink = tl.exp2(most - top)
        weights = weights * shrink + tl.sum(weight, 1)
        acc_r = tl.dot(weight.to(rotated), kv_r, acc_r * shrink[:, None], input_precision="ieee")
        if FOLDED:
            # 512: a scale is about a 448th of the row's largest value, and float16 is short.
            weight = weight * (scale * 512.0)[None, :]
        weight = weight.to(fixed)
        added = ()
        for i in tl.static_range(PIECES):
            added += (tl.dot(weight, kv[i], acc[i] * shrink[:, None], input_precision="ieee"),)  # type: ignore[assignment]
        acc = added
        most = top

    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if SPLITS == 1:
        sink = tl.load(sinks + head, mask=real, other=0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(most, sink)
        shrink = tl.exp2(most - top)
        gain = shrink / (weights * shrink + tl.exp2(sink - top))
        angle = token.to(tl.int64) * (ROPE_DIM // 2)
        acc_r = rotate_back(
            acc_r, cos + angle, sin + angle, BLOCK_M, ROPE_DIM, ROPE_DIM, ROPE_PIECE
        )
        target = out_at
    else:
        at = line * SPLITS + split
        tl.store(stats + at * 2, most, mask=real)
        tl.store(stats + at * 2 + 1, weights, mask=real)
        target = partials + at * WIDTH
    store_piece(target + FIXED, acc_r * gain[:, None], real, 0, ROPE_PIECE, ROPE_DIM)
    if FOLDED:
        gain = gain * (1.0 / 512.0)
    for i in tl.static_range(PIECES):
        store_piece(target, acc[i] * gain[:, None], real, i * PIECE, PIECE, FIXED)


@jit
def _add_kernel(  # type: ignore[no-untyped-def]
    partials,
    stats,
    slots,
    positions,
    sinks,
    cos,
    sin,
    out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a token and group of heads: its splits, added in their order."""
    token = tl.program_id(0)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    real = head < HEADS
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    lane = tl.arange(0, BLOCK)
    line = token.to(tl.int64) * HEADS + head
    whole = real[:, None] & (lane < WIDTH)[None, :]
    out_at = out + line[:, None] * WIDTH + lane[None, :]
    if slot < 0:
        tl.store(out_at, tl.zeros([GROUP, BLOCK], out.dtype.element_ty), mask=whole)
        return
    _, _, _, tiles, per_split = list_of(position, WINDOW, M, TOP_K, BLOCK_N, SPLITS, MIN)
    # The sink is the first part: a weight without a value.
    most = tl.load(sinks + head, mask=real, other=0).to(tl.float32) * 1.4426950408889634
    weights = tl.full([GROUP], 1.0, tl.float32)
    acc = tl.zeros([GROUP, BLOCK], tl.float32)
    for split in range(0, tl.cdiv(tiles, per_split)):
        at = line * SPLITS + split
        part = tl.load(partials + at[:, None] * WIDTH + lane[None, :], mask=whole, other=0.0)
        part_most = tl.load(stats + at * 2, mask=real, other=float("-inf"))
        part_weights = tl.load(stats + at * 2 + 1, mask=real, other=0.0)
        top = tl.maximum(most, part_most)
        shrink = tl.exp2(most - top)
        gain = tl.exp2(part_most - top)
        weights = weights * shrink + part_weights * gain
        acc = acc * shrink[:, None] + part * gain[:, None]
        most = top
    done = acc / weights[:, None]
    angle = token.to(tl.int64) * (ROPE_DIM // 2)
    done = rotate_back(done, cos + angle, sin + angle, GROUP, WIDTH, ROPE_DIM, BLOCK)
    tl.store(out_at, done.to(out.dtype.element_ty), mask=whole)


def tiling(
    q: Tensor, ring: Rows, rope_dim: int, window_size: int, most_entries: int, *, split: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tiles and splits, from the schema alone, and how the kernel is to be built."""
    heads, width = q.shape[1:]
    wide = q.dtype != torch.bfloat16
    block_m = min(16 if wide else 64, max(16, triton.next_power_of_2(heads)))
    block_n = 64
    if width > 128 and (wide or ring.values.dtype == torch.float32):
        block_n = 16 if wide else 32
    tiles = triton.cdiv(window_size, block_n) + triton.cdiv(most_entries, block_n)
    splits = min(MAX_SPLITS, triton.cdiv(tiles, MIN_TILES)) if split else 1
    shape = {
        "PIECE": max(16, min(64, triton.next_power_of_2(width - rope_dim))),
        "ROPE_PIECE": max(16, triton.next_power_of_2(rope_dim)),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "SPLITS": splits, "STAGES": STAGES,
    }  # fmt: skip
    warps = 8 if block_m == 64 and width > 128 else 4
    shape["SPREAD"] = max(1, 32 * warps // block_n)
    return shape, {"num_warps": warps}


def launch(
    q: Tensor,
    window: list[Tensor],
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    window_size: int,
    scale: float,
    sinks: Tensor,
    cos: Tensor,
    sin: Tensor,
    own: list[Tensor],
    entries: list[Tensor],
    table: Tensor | None,
    compression: int,
    selected: Tensor | None,
) -> Tensor:
    tokens, heads, width = q.shape
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    ring = Rows(*window)
    aside = Rows(*own) if own else None
    compressed = Rows(*entries) if entries else None
    top_k = 0 if selected is None else selected.shape[1]
    most = 0
    if compressed is not None and table is not None:
        most = min(table.shape[1] * compressed.values.shape[1], top_k or 1 << 30)
    rope_dim = 2 * cos.shape[1]
    if aside is None and sm90.serves(q, rope_dim, ring, compressed):
        sm90.attend(
            q, ring, slots, positions, window_size, scale, sinks, cos, sin, compressed, table,
            compression, selected, most, out,
        )  # fmt: skip
        return out
    shape, build = tiling(q, ring, rope_dim, window_size, most, split=not own)
    splits = shape["SPLITS"]
    partials = stats = out
    if splits > 1:
        partials = torch.empty(
            (tokens * heads * splits, width), dtype=torch.float32, device=q.device
        )
        stats = torch.empty((tokens * heads * splits, 2), dtype=torch.float32, device=q.device)
    listed = {
        "HEADS": heads, "WIDTH": width, "ROPE_DIM": rope_dim, "BLOCK_N": shape["BLOCK_N"],
        "WINDOW": window_size, "M": compression, "TOP_K": top_k, "SPLITS": splits,
        "MIN": MIN_TILES,
    }  # fmt: skip
    kernel: Any = _attend_kernel
    kernel[(tokens, triton.cdiv(heads, shape["BLOCK_M"]), splits)](
        q,
        *_pointers(ring, slots),
        *_pointers(aside, slots),
        *_pointers(compressed, slots),
        slots,
        positions,
        slots if table is None else table,
        slots if selected is None else selected,
        sinks,
        cos,
        sin,
        out,
        partials,
        stats,
        q_len,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        *row_strides(ring),
        *((0, 0, 0) if aside is None else row_strides(aside)[1::2]),
        *((0,) * 6 if compressed is None else row_strides(compressed)),
        0 if table is None else table.stride(0),
        **(listed | shape),
        RING=ring.values.shape[1],
        ENTRIES=1 if compressed is None else compressed.values.shape[1],
        FORMAT=format_of(ring),
        HAS_OWN=aside is not None,
        WIDE=q.dtype != torch.bfloat16,
        **build,
    )
    if splits > 1:
        add: Any = _add_kernel
        add[(tokens, triton.cdiv(heads, ADD_HEADS))](
            partials, stats, slots, positions, sinks, cos, sin, out, **listed,
            BLOCK=triton.next_power_of_2(width), GROUP=ADD_HEADS, num_warps=4,
        )  # fmt: skip
    return out


def _pointers(rows: Rows | None, unused: Tensor) -> list[Tensor]:
    if rows is None:
        return [unused] * 3
    return [unused if part is None else part for part in rows]
