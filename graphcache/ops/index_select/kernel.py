"""Both kernels, one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._triton import triton
from .score import BLOCK_N, GROUP, PROGRAMS, score_kernel, score_plan
from .select import select_kernel, select_plan


def launch(
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
        plan = score_plan(q, key_values, key_scales, compression, top_k)
        tiles = triton.cdiv(entries, plan["BLOCK_N"])
        capacity = triton.cdiv(entries, BLOCK_N) * BLOCK_N
        keys, places = out.new_empty((2, tokens, capacity))
        maxima, listed = out.new_empty((2, tokens, capacity // GROUP))
        notes = out.new_empty((tokens, 4))
        score: Any = score_kernel
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
    select: Any = select_kernel
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
        **select_plan(compression, top_k, entries > top_k),
    )
    return out
