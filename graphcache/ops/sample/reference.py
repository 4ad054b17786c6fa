"""The operation in torch: what the kernel is checked against, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..philox import philox

REFERENCE_ELEMENTS = 1 << 20
"""Logits that the reference works on at once."""
_MAX_RATE = torch.finfo(torch.float32).max


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    vocab_size: int,
) -> Tensor:
    token = torch.full_like(slots, -1)
    rows = (slots >= 0).nonzero().squeeze(1)
    x = logits[rows, :vocab_size].float()
    finite = ~(x.isnan() | (x == torch.inf)).any(1) & (x > -torch.inf).any(1)
    rows, x = rows[finite], x[finite]
    token[rows] = x.argmax(1).int()

    slot = slots[rows].long()
    drawn = (temperature[slot] > 0).nonzero().squeeze(1)
    for some in drawn.split(max(1, REFERENCE_ELEMENTS // vocab_size)):
        s, line = slot[some, None], x[some]
        shifted = line - line.amax(1, keepdim=True)
        rate = (1 / temperature[s]).clamp(max=_MAX_RATE)
        position = positions[rows[some], None].long()
        word = philox(seed[s], (torch.arange(vocab_size), position, 0, 0))[0]
        uniform = ((word >> 9).float() + 0.5) * 2.0**-23
        score = shifted * rate - (-uniform.log()).log()
        least = _threshold(line, shifted, rate, top_k[s].long(), top_p[s])
        token[rows[some]] = score.masked_fill(line < least, -torch.inf).argmax(1).int()
    return token


def _threshold(line: Tensor, shifted: Tensor, rate: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The least logit of each row that top-k and then top-p keep; -inf for no filter."""
    size = line.shape[1]
    least = torch.full_like(rate, -torch.inf)
    rows = (((k > 0) & (k < size)) | (p < 1)).nonzero()[:, 0]
    rate, k, p = rate[rows], k[rows], p[rows]
    value, order = line[rows].sort(1, descending=True)
    kth = torch.where((k > 0) & (k < size), value.gather(1, (k - 1).clamp(0, size - 1)), -torch.inf)
    weight = (shifted[rows].gather(1, order).double() * rate.double()).exp()
    mass = weight.masked_fill(value < kth, 0).cumsum(1)
    last = (mass >= p.double() * mass[:, -1:]).int().argmax(1, keepdim=True)
    least[rows] = torch.where(p < 1, value.gather(1, last), kth)
    return least
