"""Attention of tokens over their slots' windows and compressed entries, rotated back.

K and V are one entry, shared by all heads. A token at position p of a slot with window W sees

    window rows of positions max(0, p - W + 1) .. p, then
    compressed entries: the n = (p + 1) // m complete ones, or those of them selected

as one list of rows; logits in float32, a sink's exp in the denominator, and the output's last dims
rotated by -p (arXiv 2606.19348, §2.3).

The list is split so that one request fills the device. Where a split ends follows from the position
and the schema alone, and splits are added in their order, so a token's bits are the same in every
batch. Padding (slot -1) reads nothing and gives zeros.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ..rows import Rows
from . import _entry_attention_sm90 as sm90
from ._library import register
from ._rows import check_rows, format_of, gather, row_of_parts, row_strides
from ._triton import jit, jit_for_any, tl, triton
from .absorb import Rotation

__all__ = ["entry_attention"]

MAX_SPLITS = 16
MIN_TILES = 5
"""Fewest tiles of rows in a split, where a list has more than one split."""
STAGES = 3
"""Tiles in flight: a list's indices, its rows, and those worked on."""
ADD_HEADS = 4
"""Heads that one program adds the splits of."""


# --- the reference --------------------------------------------------------------------------------


def _reference(
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
    ring, aside, compressed = (_as_rows(parts) for parts in (window, own, entries))
    assert ring is not None
    decode = row_of_parts(ring).decode
    out = torch.zeros_like(q)
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        x = torch.arange(max(0, position - window_size + 1), position + 1)
        run_start = position - token % q_len if aside is not None else position + 1
        old, new = x[x < run_start], x[x >= run_start]
        seen = [decode(gather(ring, slot, old % ring.values.shape[1]))]
        if aside is not None:
            seen.append(decode(gather(aside, 0, new - position + token)))
        if compressed is not None and table is not None:
            count = (position + 1) // compression
            index = torch.arange(count)
            if selected is not None:
                index = selected[token][: min(count, selected.shape[1])].long()
            held = compressed.values.shape[1]
            place = table[slot, index // held].long()
            seen.append(decode(gather(compressed, place, index % held)))
        kv = torch.cat(seen)
        logits = q[token].float() @ kv.T * scale
        sink = sinks.float()[:, None]
        top = torch.maximum(logits.amax(1, keepdim=True), sink)
        weight = torch.exp(logits - top)
        mixed = weight @ kv / (weight.sum(1, keepdim=True) + torch.exp(sink - top))
        out[token] = _rotated_back(mixed, cos[token], sin[token]).to(q.dtype)
    return out


def _rotated_back(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[0]
    even, odd = vectors[:, -width::2], vectors[:, -width + 1 :: 2]
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((vectors[:, :-width], turned), -1)


def _as_rows(parts: list[Tensor]) -> Rows | None:
    return Rows(*parts) if parts else None


# --- the kernels ----------------------------------------------------------------------------------


@jit
def _list_of(  # type: ignore[no-untyped-def]
    position,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN: tl.constexpr,
):
    """A token's list: window rows, entries, tiles of the window, all tiles, and tiles a split.

    A tile is of window rows or of entries, never of both.
    """
    in_window = tl.minimum(position + 1, WINDOW)
    window_tiles = tl.cdiv(in_window, BLOCK_N)
    entries = 0
    if M > 0:
        entries = (position + 1) // M
        if TOP_K > 0:
            entries = tl.minimum(entries, TOP_K)
    tiles = window_tiles + tl.cdiv(entries, BLOCK_N)
    return in_window, entries, window_tiles, tiles, tl.maximum(tl.cdiv(tiles, SPLITS), MIN)


@jit
def _rotate_back(  # type: ignore[no-untyped-def]
    acc,
    cos,
    sin,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[HEADS, BLOCK] with the last ROPE_DIM of WIDTH dims rotated by minus the angle."""
    pair = tl.arange(0, BLOCK // 2) - (WIDTH - ROPE_DIM) // 2
    turned = (pair >= 0) & (pair < ROPE_DIM // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turned, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(acc, [HEADS, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [HEADS, BLOCK])


@jit
def _load_piece(  # type: ignore[no-untyped-def]
    at, inside, OFFSET: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr
):
    """Dims OFFSET .. OFFSET + SIZE of the rows at `at`; 0 where not inside and from END on.

    Zeros, since a row that was never written may hold NaN, and a weight of 0 does not mask that.
    """
    lane = OFFSET + tl.arange(0, SIZE)
    if OFFSET + SIZE <= END:
        return tl.load(at[:, None] + lane[None, :], mask=inside[:, None], other=0)
    else:
        there = inside[:, None] & (lane < END)[None, :]
        return tl.load(at[:, None] + lane[None, :], mask=there, other=0)


@jit
def _store_piece(  # type: ignore[no-untyped-def]
    target, piece, real, OFFSET: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr
):
    """Dims OFFSET .. OFFSET + SIZE of each head's row, up to END."""
    lane = OFFSET + tl.arange(0, SIZE)
    inside = real[:, None] & (lane < END)[None, :]
    tl.store(target[:, None] + lane[None, :], piece.to(target.dtype.element_ty), mask=inside)


@jit
def _decode(  # type: ignore[no-untyped-def]
    codes, scale, FORMAT: tl.constexpr, dtype: tl.constexpr
):
    """A piece of rows in `dtype`; codes with a scale a token stay without it but in float32."""
    if FORMAT == 0:
        return codes.to(dtype)
    else:
        decoded = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
        if FORMAT == 2 or dtype == tl.float32:
            decoded = decoded * scale.to(dtype)[:, None]
        return decoded


@jit
def _by_row(value, BLOCK_N: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N] of [BLOCK_N * SPREAD], where neighbours are equal."""
    return tl.max(tl.reshape(value, [BLOCK_N, SPREAD]), axis=1)


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
                _store_piece(out_at, nothing, real, offset, PIECE, WIDTH)
        return
    in_window, count, window_tiles, tiles, per_split = _list_of(
        position, WINDOW, M, TOP_K, BLOCK_N, SPLITS, MIN
    )
    begin = split * per_split
    if begin >= tiles:
        return

    q_at = q + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
    query = ()
    acc = ()
    for i in tl.static_range(PIECES):
        query += (_load_piece(q_at, real, i * PIECE, PIECE, FIXED).to(fixed),)  # type: ignore[assignment]
        acc += (tl.zeros([BLOCK_M, PIECE], tl.float32),)  # type: ignore[assignment]
    query_r = _load_piece(q_at + FIXED, real, 0, ROPE_PIECE, ROPE_DIM).to(rotated)
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
            place = _by_row(place, BLOCK_N, SPREAD).to(tl.int64)
            row = _by_row(entry, BLOCK_N, SPREAD) % ENTRIES
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
            codes = _load_piece(values_at, inside, i * PIECE, PIECE, FIXED)
            if FORMAT == 2:
                exponent = tl.load(scales_at + i, mask=inside, other=0)
                scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            kv += (_decode(codes, scale, FORMAT, fixed),)  # type: ignore[assignment]
        kv_r = _load_piece(rope_at, inside, 0, ROPE_PIECE, ROPE_DIM).to(rotated)
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
        acc_r = _rotate_back(
            acc_r, cos + angle, sin + angle, BLOCK_M, ROPE_DIM, ROPE_DIM, ROPE_PIECE
        )
        target = out_at
    else:
        at = line * SPLITS + split
        tl.store(stats + at * 2, most, mask=real)
        tl.store(stats + at * 2 + 1, weights, mask=real)
        target = partials + at * WIDTH
    _store_piece(target + FIXED, acc_r * gain[:, None], real, 0, ROPE_PIECE, ROPE_DIM)
    if FOLDED:
        gain = gain * (1.0 / 512.0)
    for i in tl.static_range(PIECES):
        _store_piece(target, acc[i] * gain[:, None], real, i * PIECE, PIECE, FIXED)


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
    _, _, _, tiles, per_split = _list_of(position, WINDOW, M, TOP_K, BLOCK_N, SPLITS, MIN)
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
    done = _rotate_back(done, cos + angle, sin + angle, GROUP, WIDTH, ROPE_DIM, BLOCK)
    tl.store(out_at, done.to(out.dtype.element_ty), mask=whole)


def _plan(
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


def _launch(
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
    shape, build = _plan(q, ring, rope_dim, window_size, most, split=not own)
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


def _fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


_op = register(
    "entry_attention(Tensor q, Tensor[] window, Tensor slots, Tensor positions, int q_len, "
    "int window_size, float scale, Tensor sinks, Tensor cos, Tensor sin, Tensor[] own, "
    "Tensor[] entries, Tensor? table, int compression, Tensor? selected) -> Tensor",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"entry_attention: {message}")


def entry_attention(
    q: Tensor,
    ring: Rows,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    *,
    window: int,
    scale: float,
    sinks: Tensor,
    rotation: Rotation,
    own: Rows | None = None,
    entries: Rows | None = None,
    table: Tensor | None = None,
    compression: int = 0,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend to each token's window and compressed entries, and rotate the result back.

    One kernel or, where the list of rows is split, two; on the current stream, without
    synchronizing; can be captured. With a float32 query all products are float32. With bfloat16
    the products of quantised dims are float16, in which codes are exact, the others bfloat16;
    all sums are float32. There a quantised value beyond 65504 becomes infinite.

    Args:
        q: [T, H, d] bfloat16 or float32, rotated; contiguous last axis.
        ring: the window's rows, [S1, R, ...], R >= window.
        slots: [T] int32, -1 for padding.
        positions: [T] int32.
        q_len: tokens a row.
        window: tokens that a token sees uncompressed, itself included (W).
        scale: of the logits.
        sinks: [H] float32, each a logit that takes weight and gives no value.
        rotation: at the tokens' positions.
        own: a prefill chunk's window rows, [1, T, ...], not yet in the ring.
        entries: compressed entries in the ring's format, [blocks, entries of a block, ...].
        table: [S1, width] int32 block ids, with entries.
        compression: tokens of an entry (m), with entries.
        selected: [T, K] int32, entries to attend to, ascending, then -1; None for all.

    Returns:
        [T, H, d] in q's dtype; zeros at padding.

    Raises:
        SchemaError: for shapes, dtypes or strides other than these.
    """
    _require(
        q.dtype in (torch.bfloat16, torch.float32) and q.dim() == 3 and q.stride(2) == 1,
        "q must be [T, H, d] bfloat16 or float32 with a contiguous last axis, "
        f"got {list(q.shape)} {q.dtype}",
    )
    tokens, heads, width = q.shape
    for name, given in (("slots", slots), ("positions", positions)):
        _require(
            given.dtype == torch.int32 and given.shape == (tokens,) and given.is_contiguous(),
            f"{name} must be [{tokens}] int32, contiguous, got {list(given.shape)} {given.dtype}",
        )
    _require(
        q_len >= 1 and tokens % q_len == 0,
        f"{tokens} tokens don't make whole rows of q_len={q_len}",
    )
    _require(
        sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous(),
        f"sinks must be [{heads}] float32, contiguous, got {list(sinks.shape)} {sinks.dtype}",
    )
    for part in rotation:
        _require(
            part.dtype == torch.float32
            and part.dim() == 2
            and part.shape[0] == tokens
            and part.is_contiguous(),
            f"cos and sin must be [{tokens}, rope_dim / 2] float32, contiguous, "
            f"got {list(part.shape)} {part.dtype}",
        )
    check_rows("entry_attention", "ring", ring, width)
    _require(
        1 <= window <= ring.values.shape[1],
        f"a ring of {ring.values.shape[1]} rows can't hold a window of {window}",
    )
    if own is not None:
        check_rows("entry_attention", "own", own, width)
        _require(own.values.shape[:2] == (1, tokens), f"own must be [1, {tokens}, ...]")
    if entries is not None:
        check_rows("entry_attention", "entries", entries, width)
        _require(
            compression >= 1
            and table is not None
            and table.dtype == torch.int32
            and table.dim() == 2
            and table.stride(1) == 1,
            "entries need a compression and a table, [S1, width] int32 with contiguous rows",
        )
        _require(format_of(entries) == format_of(ring), "entries and ring share a format")
    _require(
        selected is None
        or (
            entries is not None
            and selected.dtype == torch.int32
            and selected.dim() == 2
            and selected.shape[0] == tokens
            and selected.is_contiguous()
        ),
        f"selected must be [{tokens}, K] int32, contiguous, and goes with entries",
    )
    result: Tensor = _op(
        q, ring.parts(), slots, positions, q_len, window, scale, sinks, *rotation,
        [] if own is None else own.parts(), [] if entries is None else entries.parts(), table,
        compression if entries is not None else 0, selected,
    )  # fmt: skip
    return result
