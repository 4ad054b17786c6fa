"""Which compressed entries a token attends to: the top of an indexer's scores, by two kernels.

The first scores a token's visible entries. Many programs share one token's entries, each tile of
them a matrix product with the token's query heads, so one request fills the device. Scores are left
as integers in the same order, and the largest of each group of them beside.

The second finds the k-th largest, one program a token, without a pass over all scores where there
are many. A lane holds the largest of the scores that fall to it, and the k-th largest of the lanes,
to 16 bits, is a lower bound of what is sought: about 1.4 k entries reach it if there are 2 k lanes.
Only they are listed and searched, two bits of the score a step. Then those above the k-th
largest are taken, and of its equals the first ones, in the order of their indices.

Scores depend on the token, its slot's entries and the schema only, and the selection on the scores
only: a token's result is the same in every batch and at every row.

Both leave padding (slot -1), and tokens that see no more than k entries, without a look at them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._triton import jit, tl, triton

__all__ = ["index_select"]

BLOCK_N = 64
"""Entries in a tile: as many rows as one group of four warps multiplies at a time."""
WIDE_BLOCK_N = 32
"""The same where products are float32, for up to 64 heads; of more heads fewer."""

STAGE_BYTES = 49152
"""Most bytes of keys that a program has in flight."""
PROGRAMS = 396
"""Programs that score at a time: three for each multiprocessor of an H200."""
GROUP = 16
"""Entries whose largest score is kept."""
LANES, MOST_LANES = 1024, 8192
"""Fewest and most lanes of the lower bound, and candidates that are compared at a time."""
READ = 8192
"""Scores that the lanes take in at a time."""
TILE = 4096
"""Scores that are listed at a time: each takes part in a prefix sum."""


def _scores(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    blocks: Tensor,
    n: int,
) -> Tensor:
    """[n] float32: the scores of the first n entries that lie in the blocks given."""
    codes = key_values[blocks].flatten(0, 1)[:n]
    fp8 = codes.dtype == torch.uint8
    keys = (codes.view(torch.float8_e4m3fn) if fp8 else codes).float()
    # A copy: matrix products may round differently at another alignment, so at another token.
    dots = keys @ q.float().clone().T
    score = (dots.relu() * weights).sum(1)
    return score if key_scales is None else score * key_scales[blocks].flatten()[:n]


def _reference(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    compression: int,
    top_k: int,
) -> Tensor:
    out = slots.new_full((slots.shape[0], top_k), -1)
    rows = key_values.shape[1]
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        n = (position + 1) // compression
        if slot < 0:
            continue
        chosen = torch.arange(n)
        if n > top_k:
            blocks = table[slot, : (n - 1) // rows + 1].long()
            score = _scores(q[token], weights[token], key_values, key_scales, blocks, n)
            ranked = score.argsort(descending=True, stable=True)
            ranked = ranked[score[ranked].isnan().int().argsort(stable=True)]
            chosen = ranked[:top_k].sort().values
        out[token, : len(chosen)] = chosen.int()
    return out


@jit
def _score_kernel(  # type: ignore[no-untyped-def]
    q,
    weights,
    key_values,
    key_scales,
    table,
    slots,
    positions,
    keys,
    maxima,
    q_token_stride,
    q_head_stride,
    weights_stride,
    values_block_stride,
    values_row_stride,
    scales_block_stride,
    scales_row_stride,
    table_stride,
    capacity,
    COMPRESSION: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a token and share of its tiles: scores as ordered integers, and their maxima."""
    token = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    n = (tl.load(positions + token) + 1) // COMPRESSION
    if (slot < 0) | (n <= TOP_K) | (share * BLOCK_N >= n):
        return

    head = tl.arange(0, HEAD_BLOCK)
    lane = tl.arange(0, DIM_BLOCK)
    q_at = q + token * q_token_stride + head[:, None].to(tl.int64) * q_head_stride + lane[None, :]
    query = tl.load(q_at, mask=(head < HEADS)[:, None] & (lane < DIM)[None, :], other=0)
    if WIDE:
        query = query.to(tl.float32)
    query = tl.trans(query)
    weight = tl.load(weights + token * weights_stride + head, mask=head < HEADS, other=0)
    table_row = table + slot * table_stride
    near = tl.arange(0, BLOCK_N)
    values_near = near.to(tl.int64)[:, None] * values_row_stride + lane[None, :]
    scales_near = near.to(tl.int64) * scales_row_stride
    for start in range(share * BLOCK_N, n, tl.num_programs(1) * BLOCK_N):
        inside = near < n - start
        loaded = inside[:, None] & (lane < DIM)[None, :]
        if ROWS % BLOCK_N == 0:
            block = tl.load(table_row + start // ROWS).to(tl.int64)
            row = start % ROWS
            values = key_values + block * values_block_stride + row.to(tl.int64) * values_row_stride
            values_at = values + values_near
            scales = key_scales + block * scales_block_stride + row.to(tl.int64) * scales_row_stride
            scales_at = scales + scales_near
        else:
            entry = start + near
            block = tl.load(table_row + entry // ROWS, mask=inside, other=0).to(tl.int64)
            row = (entry % ROWS).to(tl.int64)
            values = key_values + block * values_block_stride + row * values_row_stride
            values_at = values[:, None] + lane[None, :]
            scales_at = key_scales + block * scales_block_stride + row * scales_row_stride
        key = tl.load(values_at, mask=loaded, other=0)
        if HAS_SCALES:
            scale = tl.load(scales_at, mask=inside, other=0)
            # By way of float32: the conversion to bfloat16 in one step is a slow instruction.
            key = key.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        key = key.to(query.dtype)
        part = tl.dot(key, query, input_precision="ieee")
        part = tl.maximum(part, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        if HEADS < HEAD_BLOCK:
            # Zero times an infinite key is NaN, also in heads that are not there.
            part = tl.where((head < HEADS)[None, :], part, 0.0)
        score = tl.sum(part, axis=1)
        if HAS_SCALES:
            score *= scale
        # Both zeros are one number. NaN comes below -inf.
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ordered = tl.where(inside & (score == score), ordered, -0x80000000)
        line = token * capacity + start
        tl.store(keys + line + near, ordered, mask=inside)
        grouped = tl.max(tl.reshape(ordered, [BLOCK_N // GROUP, GROUP]), axis=1)
        tl.store(maxima + line // GROUP + tl.arange(0, BLOCK_N // GROUP), grouped)


@jit
def _lane_maxima(keys, count, ROWS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """[LANES]: the largest of every LANES-th key from each lane on; the lowest integer of none."""
    most = tl.full([LANES], -0x80000000, tl.int32)
    offset = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, count, ROWS * LANES):
        at = start + offset
        key = tl.load(keys + at, mask=at < count, other=-0x80000000)
        most = tl.maximum(most, tl.max(key, axis=0))
    return most


@jit
def _lower_bound(most, k):  # type: ignore[no-untyped-def]
    """The k-th largest lane rounded down to 16 bits, or the lowest integer."""
    digit = tl.arange(0, 4)
    low = tl.full([], -0x80000000, tl.int32)
    for step in range(8):
        least = low + (digit << (30 - 2 * step))
        reached = tl.sum((most[None, :] >= least[:, None]).to(tl.int32), axis=1)
        chosen = tl.sum((reached >= k).to(tl.int32), axis=0) - 1
        # Fewer lanes than k never reach it.
        low += tl.maximum(chosen, 0) << (30 - 2 * step)
        tl.debug_barrier()
    return low


@jit
def _compact(  # type: ignore[no-untyped-def]
    keys,
    listed,
    places,
    count,
    n,
    low,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
):
    """List where keys reach `low`, ascending; how many there are.

    Looks at `count` keys: the first ones, or where GROUP is more than 1 those of the groups listed.
    With KEEP_KEYS the keys found are moved to the front of all keys, over ones already looked at:
    the i-th found never lies before i.
    """
    found = 0
    for start in range(0, count, TILE):
        lane = start + tl.arange(0, TILE)
        at = lane
        if GROUP > 1:
            at = tl.load(listed + lane // GROUP, mask=lane < count, other=0) * GROUP + lane % GROUP
        inside = (lane < count) & (at < n)
        key = tl.load(keys + at, mask=inside, other=-0x80000000)
        taken = inside & (key >= low)
        flag = taken.to(tl.int32)
        to = found + tl.cumsum(flag, axis=0) - 1
        found += tl.sum(flag, axis=0)
        # Every key of the tile is read before one is moved.
        tl.debug_barrier()
        tl.store(places + to, at, mask=taken)
        if KEEP_KEYS:
            tl.store(keys + to, key, mask=taken)
    return found


@jit
def _kth_largest(keys, count, k, low, span, steps, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest integer in low..low + span that k keys reach; that `low` is one is given."""
    digit = tl.arange(0, 4).to(tl.int64)
    above = tl.zeros([], tl.int64)
    for step in range(0, steps):
        shift = 2 * (steps - 1 - step)
        offset = above + (digit << shift)
        least = (low + offset).to(tl.int32)
        reached = tl.zeros([4, TILE], tl.int32)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)[None, :]
            key = tl.load(keys + at, mask=at < count, other=-0x80000000)
            reached += (key >= least[:, None]).to(tl.int32)
        # Past the span the sum may have left the integers' range.
        enough = (tl.sum(reached, axis=1) >= k) & (offset <= span)
        above += (tl.sum(enough.to(tl.int32), axis=0) - 1).to(tl.int64) << shift
        tl.debug_barrier()
    return (low + above).to(tl.int32)


@jit
def _emit(keys, places, out, count, k, kth, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the places of keys above the k-th largest, and of its first equals, k in all."""
    higher = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < count, other=-0x80000000)
        higher += (key > kth).to(tl.int32)
    equals = k - tl.sum(higher, axis=0)
    tl.debug_barrier()

    higher_before = 0
    equal_before = 0
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < count
        key = tl.load(keys + at, mask=inside, other=-0x80000000)
        place = tl.load(places + at, mask=inside, other=0)
        is_higher = inside & (key > kth)
        is_equal = inside & (key == kth)
        # Both counts in one integer: neither exceeds TILE.
        both = is_higher.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(both, axis=0) - both
        higher_here = higher_before + (before & 0xFFFF)
        equal_here = equal_before + (before >> 16)
        taken = is_higher | (is_equal & (equal_here < equals))
        tl.store(out + higher_here + tl.minimum(equal_here, equals), place, mask=taken)
        total = tl.sum(both, axis=0)
        higher_before += total & 0xFFFF
        equal_before += total >> 16
        tl.debug_barrier()


@jit
def _reload(note, value):  # type: ignore[no-untyped-def]
    """The value through memory: bounds of loops must be the same number in every thread."""
    tl.store(note, value)
    tl.debug_barrier()
    return tl.load(note)


@jit
def _select_kernel(  # type: ignore[no-untyped-def]
    slots,
    positions,
    keys,
    maxima,
    listed,
    places,
    notes,
    out,
    capacity,
    COMPRESSION: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """One program a token: the indices of its k largest scores, ascending."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    n = (tl.load(positions + token) + 1) // COMPRESSION
    out += token * TOP_K
    if (slot < 0) | (n <= TOP_K):
        index = tl.arange(0, K_BLOCK)
        seen = (slot >= 0) & (index < n)
        tl.store(out + index, tl.where(seen, index, -1), mask=index < TOP_K)
        return

    if HAS_SCORES:
        line = token * capacity
        keys += line
        places += line
        maxima += line // GROUP
        listed += line // GROUP
        notes += token * 4
        # Fewer groups than k give no bound.
        direct = n <= GROUP * TOP_K
        if direct:
            most = _lane_maxima(keys, n, ROWS, LANES)
        else:
            most = _lane_maxima(maxima, tl.cdiv(n, GROUP), ROWS, LANES)
        low = _lower_bound(most, TOP_K)
        span = tl.max(most, axis=0).to(tl.int64) - low
        used = (span >> (2 * tl.arange(0, 16)).to(tl.int64)) > 0
        tl.store(notes, tl.sum(used.to(tl.int32), axis=0))
        if direct:
            found = _compact(keys, listed, places, n, n, low, TILE, 1, True)
        else:
            groups = tl.cdiv(n, GROUP)
            groups = _compact(maxima, listed, listed, groups, groups, low, TILE, 1, False)
            looked_at = _reload(notes + 1, groups * GROUP)
            found = _compact(keys, listed, places, looked_at, n, low, TILE, GROUP, True)
        found = _reload(notes + 2, found)
        steps = tl.load(notes)
        kth = _kth_largest(keys, found, TOP_K, low, span, steps, LANES)
        _emit(keys, places, out, found, TOP_K, kth, LANES)


def _score_plan(
    q: Tensor, key_values: Tensor, key_scales: Tensor | None, compression: int, top_k: int
) -> dict[str, Any]:
    """Constants of the first kernel, from the schema alone."""
    heads, dim = q.shape[1:]
    wide = q.dtype == torch.float32 or key_values.dtype == torch.float32
    head_block = max(16, triton.next_power_of_2(heads))
    block_n = max(16, WIDE_BLOCK_N * 64 // max(64, head_block)) if wide else BLOCK_N
    dim_block = max(16, triton.next_power_of_2(dim))
    tile_bytes = block_n * dim_block * key_values.element_size()
    return {
        "COMPRESSION": compression,
        "TOP_K": top_k,
        "ROWS": key_values.shape[1],
        "HEADS": heads,
        "DIM": dim,
        "HEAD_BLOCK": head_block,
        "DIM_BLOCK": dim_block,
        "BLOCK_N": block_n,
        "GROUP": GROUP,
        "HAS_SCALES": key_scales is not None,
        "WIDE": wide,
        "num_warps": 8 if wide else 4,
        "num_stages": max(2, min(5, STAGE_BYTES // tile_bytes)),
    }


def _select_plan(compression: int, top_k: int, has_scores: bool) -> dict[str, Any]:
    """Constants of the second kernel."""
    k_block = triton.next_power_of_2(top_k)
    lanes = min(MOST_LANES, max(LANES, 2 * k_block))
    return {
        "COMPRESSION": compression,
        "TOP_K": top_k,
        "K_BLOCK": k_block,
        "GROUP": GROUP,
        "ROWS": READ // lanes,
        "LANES": lanes,
        "TILE": TILE,
        "HAS_SCORES": has_scores,
        "num_warps": 8,
    }


def _launch(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    compression: int,
    top_k: int,
) -> Tensor:
    tokens = slots.shape[0]
    out = slots.new_empty((tokens, top_k))
    if not tokens:
        return out
    entries = table.shape[1] * key_values.shape[1]
    keys = maxima = listed = places = notes = out
    capacity = 0
    if entries > top_k:
        plan = _score_plan(q, key_values, key_scales, compression, top_k)
        tiles = triton.cdiv(entries, plan["BLOCK_N"])
        capacity = triton.cdiv(entries, BLOCK_N) * BLOCK_N
        keys, places = out.new_empty((2, tokens, capacity))
        maxima, listed = out.new_empty((2, tokens, capacity // GROUP))
        notes = out.new_empty((tokens, 4))
        score: Any = _score_kernel
        score[(tokens, max(1, min(tiles, PROGRAMS // tokens)))](
            q,
            weights,
            key_values,
            weights if key_scales is None else key_scales,
            table,
            slots,
            positions,
            keys,
            maxima,
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            key_values.stride(0),
            key_values.stride(1),
            0 if key_scales is None else key_scales.stride(0),
            0 if key_scales is None else key_scales.stride(1),
            table.stride(0),
            capacity,
            **plan,
        )
    select: Any = _select_kernel
    select[(tokens,)](
        slots,
        positions,
        keys,
        maxima,
        listed,
        places,
        notes,
        out,
        capacity,
        **_select_plan(compression, top_k, entries > top_k),
    )
    return out


def _fake(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    compression: int,
    top_k: int,
) -> Tensor:
    return slots.new_empty((slots.shape[0], top_k))


_op = register(
    "index_select(Tensor q, Tensor weights, Tensor key_values, Tensor? key_scales, Tensor table,"
    " Tensor slots, Tensor positions, int compression, int top_k) -> Tensor",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"index_select: {message}")


def _check_keys(key_values: Tensor, key_scales: Tensor | None, dim: int) -> None:
    _require(
        key_values.dim() == 3
        and key_values.shape[2] == dim
        and key_values.shape[1] > 0
        and key_values.stride(2) == 1,
        f"key_values must be [N, E, Di={dim}] with a contiguous last axis, "
        f"got {list(key_values.shape)} with strides {list(key_values.stride())}",
    )
    if key_scales is None:
        _require(
            key_values.dtype in (torch.float32, torch.bfloat16),
            f"key_values without scales must be float32 or bfloat16, got {key_values.dtype}",
        )
        return
    _require(
        key_values.dtype == torch.uint8,
        f"key_values with scales must be uint8 (e4m3fn codes), got {key_values.dtype}",
    )
    _require(
        key_scales.dtype == torch.float32 and key_scales.shape == key_values.shape[:2],
        f"key_scales must be float32 {list(key_values.shape[:2])}, "
        f"got {key_scales.dtype} {list(key_scales.shape)}",
    )


def index_select(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    compression: int,
    top_k: int,
) -> Tensor:
    """Select the compressed entries that each token attends to. Two nodes.

    A token at position p sees the first `n = (p + 1) // compression` entries of its slot, the one
    that it completes itself included: call this after that entry was written. With

        score[s] = sum over heads h of weights[t, h] * relu(q[t, h] . key[s])        s < n

    (DeepSeek-V4 report, arXiv 2606.19348, the lightning indexer) the `min(top_k, n)` entries of the
    largest scores are selected; of equal scores the lower index. A NaN ranks below every number,
    -inf too. Products and sums are float32; bfloat16 factors, to which e4m3 codes convert exactly,
    go through tensor cores.

    Runs on the current stream without synchronizing; allocates the output, and scratch of
    `8.5 * width * E + 16` bytes a token. Where no slot has room for more than `top_k` entries there
    is neither scratch nor scoring, and one node. An entry at or past n is never read, nor a column
    of the table past `(n - 1) // E`. Where every score differs by more than rounding, kernels and
    reference select the same.

    Args:
        q: [T, Hi, Di] bfloat16 or float32, rotated. Any strides but the last.
        weights: [T, Hi] float32, every scaling folded in; may be negative. Contiguous rows.
        key_values: [N, E, Di], the entries in blocks: uint8 (e4m3fn codes) with `key_scales`, or
            bfloat16 or float32 without. Any strides but the last.
        key_scales: [N, E] float32, positive or NaN; a key is `e4m3 * scale`. Any strides.
        table: [S1, width] int32: entry s of slot b is row `s % E` of block `table[b, s // E]`.
            Every visible entry must have its block there: it is not checked.
        slots: [T] int32, contiguous; -1 for padding.
        positions: [T] int32, contiguous.
        compression: tokens an entry stands for, m.
        top_k: most entries selected, K.

    Returns:
        [T, K] int32: the selected entries' indices, ascending, then -1; nothing but -1 at padding.

    Raises:
        SchemaError: for other dtypes, shapes or strides.
    """
    _require(
        q.dim() == 3 and q.dtype in (torch.bfloat16, torch.float32) and q.stride(2) == 1,
        "q must be [T, Hi, Di] bfloat16 or float32 with a contiguous last axis, "
        f"got {q.dtype} {list(q.shape)} with strides {list(q.stride())}",
    )
    tokens, heads, dim = q.shape
    _require(
        weights.dtype == torch.float32
        and weights.shape == (tokens, heads)
        and (weights.stride(1) == 1 or heads == 1),
        f"weights must be float32 {[tokens, heads]} with contiguous rows, "
        f"got {weights.dtype} {list(weights.shape)} with strides {list(weights.stride())}",
    )
    _check_keys(key_values, key_scales, dim)
    _require(
        table.dtype == torch.int32
        and table.dim() == 2
        and table.shape[1] > 0
        and (table.stride(1) == 1 or table.shape[1] == 1),
        "table must be [S1, width] int32 with contiguous rows, "
        f"got {table.dtype} {list(table.shape)} with strides {list(table.stride())}",
    )
    for name, index in (("slots", slots), ("positions", positions)):
        _require(
            index.dtype == torch.int32 and index.shape == (tokens,) and index.is_contiguous(),
            f"{name} must be contiguous int32 [{tokens}], got {index.dtype} {list(index.shape)}",
        )
    _require(
        compression >= 1 and top_k >= 1,
        f"compression and top_k are at least 1, got {compression} and {top_k}",
    )
    out: Tensor = _op(
        q, weights, key_values, key_scales, table, slots, positions, compression, top_k
    )
    return out
