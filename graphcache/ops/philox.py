"""Philox4x32-10: random words that are a function of a key and a counter, and of nothing else.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11). A draw that is keyed by a
request's seed and its position needs no generator state, so replaying a captured step draws anew,
and a request's draws do not depend on its row or on who shares its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(
    key: Tensor, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter. Torch's integers only, on any device.

    Args:
        key: int64 of any shape; its low and high 32 bits are the two words of the key.
        counter: four words in 0..2^32-1, int64 or int, broadcast against each other and the key.

    Returns:
        Four int64 tensors of the common shape with values in 0..2^32-1.
    """
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64) for word in counter)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # A product of two 32-bit words wraps in int64, with the right 64 bits.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32 & _MASK) ^ c1 ^ k0, (p0 >> 32 & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
