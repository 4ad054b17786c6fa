"""The operation in torch: what the kernel is checked against, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .._kv import (
    attend,
    gather_rows,
)


def prefill_attention(
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
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    for begin in range(0, q.shape[0], q_len):
        slot, start = int(slots[begin]), int(positions[begin])
        run = int((slots[begin : begin + q_len] >= 0).sum())
        if not run:
            continue
        first = max(0, start - window + 1) if window else 0
        tokens = slice(begin, begin + run)
        keys = k[tokens].to(k_cache.dtype).transpose(0, 1)
        values = v[tokens].to(v_cache.dtype).transpose(0, 1)
        if first < start:
            old_keys = gather_rows(k_cache, table, slot, first, start - 1)
            old_values = gather_rows(v_cache, table, slot, first, start - 1)
            keys = torch.cat([old_keys, keys], 1)
            values = torch.cat([old_values, values], 1)
        position = torch.arange(start, start + run)[:, None]
        key = torch.arange(first, start + run)
        allowed = key <= position
        if window:
            allowed &= key > position - window
        queries = q[tokens].transpose(0, 1)
        attended = attend(queries, keys, values, scale, softcap, sinks, allowed)
        out[tokens] = attended.transpose(0, 1).to(q.dtype)
    return out
