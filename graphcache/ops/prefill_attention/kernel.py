"""The kernel: one program a tile of the chunk's rows and a K/V head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._kv import (
    load_block,
    logit_scales,
    softmax_step,
    with_sink,
)
from .._triton import jit, jit_for_any, tl, triton

TILES: dict[bool, tuple[tuple[float, tuple[int, int, int, int]], ...]] = {
    False: (
        (64, (64, 64, 4, 3)),
        (128, (64, 64, 8, 3)),
        (256, (64, 32, 8, 2)),
        (math.inf, (16, 16, 8, 2)),
    ),
    True: ((64, (32, 32, 8, 3)), (128, (16, 32, 8, 2)), (math.inf, (16, 16, 8, 2))),
}
"""Queries, keys, warps and stages of a program by width of a head; True for fp32 arithmetic, which
has no matrix units and keeps its operands in registers."""


@jit
def _load_own(  # type: ignore[no-untyped-def]
    k,
    v,
    column,
    inside,
    k_token_stride,
    v_token_stride,
    k_cache,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """K and V of the row's columns as the cache will hold them; 0 where not inside."""
    k_lane = tl.arange(0, K_BLOCK)[None, :]
    v_lane = tl.arange(0, V_BLOCK)[None, :]
    token = column.to(tl.int64)[:, None]
    k_inside = inside[:, None] & (k_lane < K_DIM)
    v_inside = inside[:, None] & (v_lane < V_DIM)
    k_rows = tl.load(k + token * k_token_stride + k_lane, mask=k_inside, other=0)
    v_rows = tl.load(v + token * v_token_stride + v_lane, mask=v_inside, other=0)
    return k_rows.to(k_cache.dtype.element_ty), v_rows.to(k_cache.dtype.element_ty)


@jit
def _allowed(position, key, first, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_M, BLOCK_N]: which keys the queries at `position` see."""
    sees = (key >= first)[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        sees = sees & (key[None, :] > position[:, None] - WINDOW)
    return sees


@jit_for_any("q_len")
def _prefill_attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    k_cache,
    v_cache,
    slots,
    positions,
    table,
    sinks,
    out,
    factor,
    cap,
    q_len,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_cache_stride,
    v_cache_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a head, tile of BLOCK_M columns, and row. The last tiles see most: they start."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    base = tl.program_id(2).to(tl.int64) * q_len
    column = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + base)
    start = tl.load(positions + base)
    active = tl.load(slots + base + column, mask=column < q_len, other=-1) >= 0
    count = tl.max(tl.where(active, column + 1, 0), 0)

    v_lane = tl.arange(0, V_BLOCK)[None, :]
    out_at = out + ((base + column) * HEADS + head)[:, None] * V_DIM + v_lane
    out_mask = (column < q_len)[:, None] & (v_lane < V_DIM)
    if count == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, V_BLOCK], out.dtype.element_ty), mask=out_mask)
        return

    k_lane = tl.arange(0, K_BLOCK)[None, :]
    q_at = q + (base + column)[:, None] * q_token_stride + head.to(tl.int64) * q_head_stride
    query = tl.load(q_at + k_lane, mask=active[:, None] & (k_lane < K_DIM), other=0)
    if WIDE:
        query = query.to(tl.float32)
    kv_head = head // GROUP
    slot = slot.to(tl.int64)
    table_row = table + slot * table_stride
    k_own = k + base * k_token_stride + kv_head.to(tl.int64) * k_head_stride
    v_own = v + base * v_token_stride + kv_head.to(tl.int64) * v_head_stride

    position = start + column
    end = start + count
    first = 0
    if WINDOW > 0:
        first = tl.maximum(start + tile * BLOCK_M - WINDOW + 1, 0)
    # Blocks wholly below the chunk, the block it begins in, and blocks wholly within it.
    lowest = first // BLOCK_N * BLOCK_N
    below = start // BLOCK_N * BLOCK_N
    within = tl.maximum(tl.cdiv(start, BLOCK_N) * BLOCK_N, lowest)

    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    for block in range(lowest, below, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        k_rows, v_rows = load_block(
            k_cache,
            v_cache,
            table_row,
            slot,
            kv_head,
            k_cache_stride,
            v_cache_stride,
            block,
            key >= first,
            ROWS,
            K_DIM,
            V_DIM,
            K_BLOCK,
            V_BLOCK,
            BLOCK_N,
            HAS_TABLE,
        )
        allowed = _allowed(position, key, first, WINDOW)
        acc, total, most = softmax_step(
            query, k_rows, v_rows, allowed, acc, total, most, factor, cap, SOFTCAP, WIDE
        )
    for block in tl.range(tl.maximum(below, lowest), within, BLOCK_N, num_stages=1):
        key = block + tl.arange(0, BLOCK_N)
        is_own = key >= start
        k_old, v_old = load_block(
            k_cache,
            v_cache,
            table_row,
            slot,
            kv_head,
            k_cache_stride,
            v_cache_stride,
            block,
            (key >= first) & (key < start),
            ROWS,
            K_DIM,
            V_DIM,
            K_BLOCK,
            V_BLOCK,
            BLOCK_N,
            HAS_TABLE,
        )
        k_new, v_new = _load_own(
            k_own,
            v_own,
            key - start,
            is_own & (key >= first) & (key < end),
            k_token_stride,
            v_token_stride,
            k_cache,
            K_DIM,
            V_DIM,
            K_BLOCK,
            V_BLOCK,
        )
        k_rows = tl.where(is_own[:, None], k_new, k_old)
        v_rows = tl.where(is_own[:, None], v_new, v_old)
        allowed = _allowed(position, key, first, WINDOW)
        acc, total, most = softmax_step(
            query, k_rows, v_rows, allowed, acc, total, most, factor, cap, SOFTCAP, WIDE
        )
    for block in range(within, end, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        k_rows, v_rows = _load_own(
            k_own,
            v_own,
            key - start,
            (key >= first) & (key < end),
            k_token_stride,
            v_token_stride,
            k_cache,
            K_DIM,
            V_DIM,
            K_BLOCK,
            V_BLOCK,
        )
        allowed = _allowed(position, key, first, WINDOW)
        acc, total, most = softmax_step(
            query, k_rows, v_rows, allowed, acc, total, most, factor, cap, SOFTCAP, WIDE
        )

    always = tl.full([BLOCK_M], 1, tl.int1)
    done = with_sink(acc, total, most, sinks, head + column * 0, always, HAS_SINKS)
    done = tl.where(active[:, None], done, 0.0)
    tl.store(out_at, done.to(out.dtype.element_ty), mask=out_mask)


def tiling(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, window: int
) -> dict[str, Any]:
    """Tiles, from the schema alone: heads, dims, dtypes, rows and the window."""
    heads, k_dim = q.shape[1:]
    kv_heads, rows, v_dim = v_cache.shape[1:]
    wide = q.dtype != k_cache.dtype or q.dtype == torch.float32
    k_block, v_block = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    tiles = next(tiles for widest, tiles in TILES[wide] if max(k_block, v_block) <= widest)
    return {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "ROWS": rows,
        "WINDOW": window,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_BLOCK": k_block,
        "V_BLOCK": v_block,
        "BLOCK_M": tiles[0],
        "BLOCK_N": tiles[1],
        "HAS_TABLE": table is not None,
        "WIDE": wide,
        "num_warps": tiles[2],
        "num_stages": tiles[3],
    }


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    scale: float,
    table: Tensor | None,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    tokens, heads, v_dim = q.shape[0], q.shape[1], v.shape[2]
    out = q.new_empty(tokens, heads, v_dim)
    if not tokens:
        return out
    plan = tiling(q, k_cache, v_cache, table, window)
    factor, cap = logit_scales(scale, softcap)
    kernel: Any = _prefill_attention_kernel
    kernel[(heads, triton.cdiv(q_len, plan["BLOCK_M"]), tokens // q_len)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        slots,
        positions,
        slots if table is None else table,
        q if sinks is None else sinks,
        out,
        factor,
        cap,
        q_len,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        0 if table is None else table.stride(0),
        **plan,
        HAS_SINKS=sinks is not None,
        SOFTCAP=softcap > 0,
    )
    return out
