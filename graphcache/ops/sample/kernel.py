"""The kernels: lines in splits, then a token a line."""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import jit, tl, triton
from .draw import (
    SHARED_KEY_BITS,
    load_logits,
    pack,
    packed_id,
    packed_score,
    rate_of,
    score_of,
)
from .filter import filtered

LARGE_VOCABULARY = 65536
SMALL_BLOCK, LARGE_BLOCK = 2048, 4096
"""Ids in a split of the vocabulary, up to a large one and above."""
DRAWS = 512
"""Ids whose noise is computed together."""
GROUP = 128
"""Ids whose maximum is kept, for rows with filters."""
TILE = 16
"""Groups searched together."""


@jit
def _split_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    best_ptr,
    peak_ptr,
    mass_ptr,
    maxima_ptr,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    seed_stride,
    width,
    vocab_size,
    splits,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """One program for each split of the vocabulary and row.

    A greedy row leaves the split's best, and NaN for its peak, by which the next kernel knows it
    without waiting for its parameters. A row without filters leaves its best draw, relative to
    its peak. A row with filters leaves its peak, its mass, and the maximum of each group of ids.
    """
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    line_ptr = logits_ptr + row * logits_stride
    ids = split * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(line_ptr, ids, width, vocab_size)
    at = row * splits + split
    if slot >= 0:
        temperature = tl.load(temperature_ptr + slot * temperature_stride)
        if temperature > 0:
            k = tl.load(top_k_ptr + slot * top_k_stride)
            p = tl.load(top_p_ptr + slot * top_p_stride)
            rate = rate_of(temperature)
            peak = tl.max(x, axis=0)
            tl.store(peak_ptr + at, peak)
            shift = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
            if ((k > 0) & (k < vocab_size)) | (p < 1):
                tl.store(mass_ptr + at, tl.sum(tl.exp((x - shift) * rate), axis=0))
                maxima = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1)
                group = at * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                tl.store(maxima_ptr + group, maxima)
            else:
                seed = tl.load(seed_ptr + slot * seed_stride)
                position = tl.load(positions_ptr + row)
                best = tl.full([DRAWS], -0x8000000000000000, tl.int64)
                # Read again by parts: noise for a whole split at once would take so many
                # registers that greedy rows would pay for it.
                for part in range(0, BLOCK, DRAWS):
                    some = split * BLOCK + part + tl.arange(0, DRAWS)
                    y = load_logits(line_ptr, some, width, vocab_size)
                    score = score_of(y, shift, rate, seed, some, position)
                    best = tl.maximum(best, pack(score, some))
                tl.store(best_ptr + at, tl.max(best, axis=0))
        else:
            tl.store(best_ptr + at, tl.max(pack(x, ids), axis=0))
            tl.store(peak_ptr + at, float("nan"))


@jit
def _token_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    best_ptr,
    peak_ptr,
    mass_ptr,
    maxima_ptr,
    list_ptr,
    token_ptr,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    seed_stride,
    width,
    vocab_size,
    splits,
    groups,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """One program a row: the best of its splits, or the draw among what its filters keep."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    split = tl.arange(0, SPLITS)
    at = row * splits + split
    inside = split < splits
    # Fetched before it is known what the row left, so that a greedy row waits only once.
    best = tl.load(best_ptr + at, mask=inside, other=-0x8000000000000000)
    peaks = tl.load(peak_ptr + at, mask=inside, other=float("-inf"))
    token = -1
    if slot >= 0:
        if tl.max((peaks != peaks).to(tl.int32), axis=0) > 0:
            winner = tl.max(best, axis=0)
            if tl.abs(packed_score(winner)) < float("inf"):
                token = packed_id(winner)
        else:
            top = tl.max(peaks, axis=0)
            if tl.abs(top) < float("inf"):
                rate = rate_of(tl.load(temperature_ptr + slot * temperature_stride))
                k = tl.load(top_k_ptr + slot * top_k_stride)
                p = tl.load(top_p_ptr + slot * top_p_stride)
                if ((k > 0) & (k < vocab_size)) | (p < 1):
                    mass = tl.load(mass_ptr + at, mask=inside, other=0.0)
                    total = tl.sum(mass * tl.exp((peaks - top) * rate), axis=0)
                    seed = tl.load(seed_ptr + slot * seed_stride)
                    position = tl.load(positions_ptr + row)
                    token = filtered(
                        logits_ptr + row * logits_stride, maxima_ptr + row * groups,
                        list_ptr + row * groups, width, vocab_size, groups, top, total, rate, k,
                        p, seed, position, TILE, GROUP, GROUPS, SHIFT,
                    )  # fmt: skip
                else:
                    score = packed_score(best) + (peaks - top) * rate
                    score = tl.where(inside, score, float("-inf"))
                    token = packed_id(tl.max(pack(score, packed_id(best)), axis=0))
    tl.store(token_ptr + row, token)


def launch(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    vocab_size: int,
) -> Tensor:
    rows = logits.shape[0]
    token = torch.empty_like(slots)
    if not rows:
        return token
    block = _block(vocab_size)
    splits = -(-vocab_size // block)
    groups = splits * (block // GROUP)
    best = logits.new_empty((rows, splits), dtype=torch.int64)
    peak = logits.new_empty((rows, splits), dtype=torch.float32)
    mass = logits.new_empty((rows, splits), dtype=torch.float32)
    maxima = logits.new_empty((rows, groups), dtype=torch.float32)
    listed = logits.new_empty((rows, groups), dtype=torch.int32)
    given = (logits, slots, positions, temperature, top_k, top_p, seed)
    sizes = (
        # The stride of a single row may be anything, and loads are laid out by what divides it.
        logits.stride(0) if rows > 1 else logits.shape[1],
        *(parameter.stride(0) for parameter in (temperature, top_k, top_p, seed)),
        logits.shape[1],
        vocab_size,
        splits,
    )
    _split_kernel[(splits, rows)](
        *given,
        best,
        peak,
        mass,
        maxima,
        *sizes,
        BLOCK=block,
        GROUP=GROUP,
        DRAWS=min(block, DRAWS),
        num_warps=4,
    )
    _token_kernel[(rows,)](
        *given,
        best,
        peak,
        mass,
        maxima,
        listed,
        token,
        *sizes,
        groups,
        SPLITS=triton.next_power_of_2(splits),
        TILE=TILE,
        GROUP=GROUP,
        GROUPS=triton.next_power_of_2(groups),
        SHIFT=SHARED_KEY_BITS[logits.dtype],
        num_warps=8,
    )
    return token


def _block(vocab_size: int) -> int:
    """Ids in a split: a function of the vocabulary only, so results do not depend on the batch."""
    if vocab_size > LARGE_VOCABULARY:
        return LARGE_BLOCK
    return max(GROUP, min(SMALL_BLOCK, int(triton.next_power_of_2(vocab_size))))
