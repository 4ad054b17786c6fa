"""The operation in torch: what the kernel is checked against, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...rows import Rows
from .._rows import gather, row_of_parts


def entry_attention(
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
    ring, aside, compressed = (as_rows(parts) for parts in (window, own, entries))
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


def as_rows(parts: list[Tensor]) -> Rows | None:
    return Rows(*parts) if parts else None
