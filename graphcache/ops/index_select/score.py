"""The scores of a slot's entries: ReLU of each head's product, weighted and summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._triton import jit, tl, triton

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


@jit
def score_kernel(  # type: ignore[no-untyped-def]
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


def score_plan(
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
