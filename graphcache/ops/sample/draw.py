"""A token's score in a draw, and a score and its token in one integer."""

from __future__ import annotations

import torch

from .._triton import jit, tl

# Low bits of an f32 key that logits of a narrower type share: no search need look at them.
SHARED_KEY_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@jit
def order(x):  # type: ignore[no-untyped-def]
    """f32 as int32 keys in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def pack(score, ids):  # type: ignore[no-untyped-def]
    """Score over id in one int64: its maximum is the best score and, of equals, the lowest id."""
    return (order(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@jit
def packed_id(packed):  # type: ignore[no-untyped-def]
    return (0x7FFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)


@jit
def packed_score(packed):  # type: ignore[no-untyped-def]
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def load_logits(line_ptr, ids, width, vocab_size):  # type: ignore[no-untyped-def]
    """Logits as f32: +inf for NaN, one kind of zero, -inf past the vocabulary."""
    # Masked by the width, which divides by 16 more often than the vocabulary: wide loads need it.
    x = tl.load(line_ptr + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    x = tl.where(ids < vocab_size, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@jit
def rate_of(temperature):  # type: ignore[no-untyped-def]
    return tl.minimum(1.0 / temperature, 3.4028234663852886e38)


@jit
def score_of(x, top, rate, seed, ids, position):  # type: ignore[no-untyped-def]
    word, _, _, _ = tl.philox(seed, ids, position, 0, 0)
    uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return (x - top) * rate - tl.log(-tl.log(uniform))
