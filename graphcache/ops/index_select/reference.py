"""The operation in torch: what the kernel is checked against, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


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
