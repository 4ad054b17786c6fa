"""The kernel: one program a row, K/V head and split; the last one of a line adds the splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._kv import (
    load_block,
    logit_scales,
    softmax_step,
    with_sink,
)
from .._triton import jit, tl, triton
from .counters import counters_of

MIN_SPLIT = 128
"""Fewest keys in a split, where the context has more than one."""
MAX_SPLITS = 32
MAX_SPLITS_FEW_HEADS = 64
"""For fewer than `FEW_HEADS` K/V heads, or one request would not fill the device."""
FEW_HEADS = 4
PROGRAMS = 1056
"""Programs to aim at: eight for each multiprocessor of an H200. Empty ones are not free."""
BLOCK_BYTES = 32768
"""Most bytes of K and V that a program takes at a time."""


@jit
def _attend_split(  # type: ignore[no-untyped-def]
    query,
    k_cache,
    v_cache,
    table_row,
    slot,
    kv_head,
    k_cache_stride,
    v_cache_stride,
    factor,
    cap,
    first,
    position,
    block,
    block_end,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over the keys first..position of some blocks: sum, total weight, maximum."""
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    for start in range(block * BLOCK_N, block_end * BLOCK_N, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = (key >= first) & (key <= position)
        k, v = load_block(
            k_cache,
            v_cache,
            table_row,
            slot,
            kv_head,
            k_cache_stride,
            v_cache_stride,
            start,
            inside,
            ROWS,
            K_DIM,
            V_DIM,
            K_BLOCK,
            V_BLOCK,
            BLOCK_N,
            HAS_TABLE,
        )
        acc, total, most = softmax_step(
            query, k, v, inside[None, :], acc, total, most, factor, cap, SOFTCAP, WIDE
        )
    return acc, total, most


@jit
def _add_splits(  # type: ignore[no-untyped-def]
    partials,
    stats,
    sinks,
    out,
    token,
    kv_head,
    tile,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The output of a token and tile of heads from its partial results, in the splits' order.

    Read past the first-level cache, which other programs' writes do not reach. A chunk's loads are
    all in flight before anything waits for one of them.
    """
    member = tile * BLOCK_M + tl.arange(0, MEMBERS)
    real = member < GROUP
    head = kv_head * GROUP + member
    line = token.to(tl.int64) * HEADS + head
    most = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, V_BLOCK], tl.float32)
    deep_lane = tl.arange(0, V_BLOCK)[None, None, :]
    for begin in range(0, splits, CHUNK):
        split = begin + tl.arange(0, CHUNK)
        there = real[:, None] & (split < splits)[None, :]
        at = line[:, None] * SPLITS + split[None, :]
        part = tl.load(
            partials + at[:, :, None] * V_DIM + deep_lane,
            mask=there[:, :, None] & (deep_lane < V_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        stat = stats + at * 2
        tops = tl.load(stat, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stat + 1, mask=there, other=0.0, cache_modifier=".cg")
        top = tl.maximum(most, tl.max(tops, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(tops - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(totals * weight, 1)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        most = top
    done = with_sink(acc, total, most, sinks, head, real, HAS_SINKS)
    lane = tl.arange(0, V_BLOCK)[None, :]
    tl.store(
        out + line[:, None] * V_DIM + lane,
        done.to(out.dtype.element_ty),
        mask=real[:, None] & (lane < V_DIM),
    )


@jit
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    slots,
    positions,
    table,
    sinks,
    out,
    partials,
    stats,
    counters,
    factor,
    cap,
    q_token_stride,
    q_head_stride,
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
    MIN_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a token, tile of a group of heads, and share of the splits."""
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    token = tl.program_id(0)
    unit = tl.program_id(1)
    share = tl.program_id(2)
    shares = tl.num_programs(2)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)

    kv_head = unit // TILES
    member = unit % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    real = member < GROUP
    head = kv_head * GROUP + member
    line = token.to(tl.int64) * HEADS + head
    k_lane = tl.arange(0, K_BLOCK)
    v_lane = tl.arange(0, V_BLOCK)
    v_mask = real[:, None] & (v_lane < V_DIM)[None, :]
    out_at = out + line[:, None] * V_DIM + v_lane[None, :]
    if slot < 0:
        nothing = tl.zeros([BLOCK_M, V_BLOCK], out.dtype.element_ty)
        tl.store(out_at, nothing, mask=v_mask & (share == 0))
        return

    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    block = first // BLOCK_N
    blocks = position // BLOCK_N + 1 - block
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), MIN_BLOCKS)
    splits = tl.cdiv(blocks, per_split)
    if share >= splits:
        return

    q_at = q + token.to(tl.int64) * q_token_stride + head[:, None].to(tl.int64) * q_head_stride
    query = tl.load(q_at + k_lane[None, :], mask=real[:, None] & (k_lane < K_DIM)[None, :], other=0)
    if WIDE:
        query = query.to(tl.float32)
    slot = slot.to(tl.int64)
    table_row = table + slot * table_stride
    for split in range(share, splits, shares):
        begin = block + split * per_split
        acc, total, most = _attend_split(
            query,
            k_cache,
            v_cache,
            table_row,
            slot,
            kv_head,
            k_cache_stride,
            v_cache_stride,
            factor,
            cap,
            first,
            position,
            begin,
            tl.minimum(begin + per_split, block + blocks),
            ROWS,
            K_DIM,
            V_DIM,
            K_BLOCK,
            V_BLOCK,
            BLOCK_M,
            BLOCK_N,
            HAS_TABLE,
            SOFTCAP,
            WIDE,
        )
        if splits == 1:
            done = with_sink(acc, total, most, sinks, head, real, HAS_SINKS)
            tl.store(out_at, done.to(out.dtype.element_ty), mask=v_mask)
        elif SPLITS > 1:
            at = line * SPLITS + split
            tl.store(partials + at[:, None] * V_DIM + v_lane[None, :], acc, mask=v_mask)
            tl.store(stats + at * 2, most, mask=real)
            tl.store(stats + at * 2 + 1, total, mask=real)

    if SPLITS > 1 and splits > 1:
        counter = counters + token * tl.num_programs(1) + unit
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.minimum(shares, splits) - 1:
            tl.debug_barrier()
            tl.store(counter, 0)
            _add_splits(
                partials,
                stats,
                sinks,
                out,
                token,
                kv_head,
                unit % TILES,
                splits,
                HEADS,
                GROUP,
                V_DIM,
                V_BLOCK,
                BLOCK_M,
                MEMBERS,
                SPLITS,
                CHUNK,
                HAS_SINKS,
            )


def tiling(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, window: int
) -> dict[str, Any]:
    """Tiles and splits, from the schema alone: heads, dims, dtypes, rows and the window."""
    heads, k_dim = q.shape[1:]
    kv_heads, rows, v_dim = v_cache.shape[1:]
    group = heads // kv_heads
    wide = q.dtype != k_cache.dtype or q.dtype == torch.float32
    k_block, v_block = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    block_m = min(64, max(16, triton.next_power_of_2(group)))
    block_n = BLOCK_BYTES // ((k_block + v_block) * (4 if wide else 2))
    block_n = max(16, min(32 if wide else 64, block_n // 16 * 16))
    block_n = 1 << (block_n.bit_length() - 1)

    blocks = triton.cdiv(rows if table is None else rows * table.shape[1], block_n)
    if window:
        blocks = min(blocks, triton.cdiv(window, block_n) + 1)
    min_blocks = max(1, MIN_SPLIT // block_n)
    most_splits = MAX_SPLITS_FEW_HEADS if kv_heads < FEW_HEADS else MAX_SPLITS
    splits = min(most_splits, triton.cdiv(blocks, min_blocks))
    warps = 4 if block_m == 16 else 8
    # A block's address waits for the table: two stages more keep two blocks in flight.
    deep = block_n * (k_block + v_block) * k_cache.element_size() <= 2 * BLOCK_BYTES
    stages = (3 if deep else 2) if table is None else (5 if deep else 3)
    members = min(block_m, triton.next_power_of_2(group))
    return {
        "HEADS": heads,
        "GROUP": group,
        "ROWS": rows,
        "WINDOW": window,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_BLOCK": k_block,
        "V_BLOCK": v_block,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "MIN_BLOCKS": min_blocks,
        "SPLITS": splits,
        "MEMBERS": members,
        "CHUNK": max(1, min(triton.next_power_of_2(splits), 1024 * warps // (members * v_block))),
        "HAS_TABLE": table is not None,
        "WIDE": wide,
        "num_warps": warps,
        "num_stages": stages,
    }


def launch(
    q: Tensor,
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
    tokens, heads, v_dim = q.shape[0], q.shape[1], v_cache.shape[3]
    out = q.new_empty(tokens, heads, v_dim)
    if not tokens:
        return out
    plan = tiling(q, k_cache, v_cache, table, window)
    splits = plan["SPLITS"]
    units = k_cache.shape[1] * triton.cdiv(plan["GROUP"], plan["BLOCK_M"])
    shares = max(1, min(splits, triton.cdiv(PROGRAMS, tokens * units)))
    partials = stats = counters = out
    if splits > 1:
        partials = q.new_empty(tokens * heads * splits * v_dim, dtype=torch.float32)
        stats = q.new_empty(tokens * heads * splits * 2, dtype=torch.float32)
        counters = counters_of(q.device, tokens * units)
    factor, cap = logit_scales(scale, softcap)
    kernel: Any = _decode_attention_kernel
    kernel[(tokens, units, shares)](
        q,
        k_cache,
        v_cache,
        slots,
        positions,
        slots if table is None else table,
        q if sinks is None else sinks,
        out,
        partials,
        stats,
        counters,
        factor,
        cap,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        0 if table is None else table.stride(0),
        **plan,
        HAS_SINKS=sinks is not None,
        SOFTCAP=softcap > 0,
    )
    return out
