"""The operation in torch: what the kernel is checked against, and what runs on a CPU."""

from __future__ import annotations

from torch import Tensor

from .._kv import (
    attend,
    gather_rows,
)


def decode_attention(
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
    out = q.new_zeros(*q.shape[:2], v_cache.shape[3])
    for token, (slot, last) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        first = max(0, last - window + 1) if window else 0
        k = gather_rows(k_cache, table, slot, first, last)
        v = gather_rows(v_cache, table, slot, first, last)
        # A copy: matrix products may round differently at another alignment, so at another token.
        query = q[token].clone()[:, None]
        out[token] = attend(query, k, v, scale, softcap, sinks)[:, 0].to(q.dtype)
    return out
