"""Top-k and top-p: the least logit that stays, by search in tiles of a line."""

from __future__ import annotations

from .._triton import jit, tl
from .draw import (
    load_logits,
    order,
    pack,
    packed_id,
    score_of,
)


@jit
def _tile(  # type: ignore[no-untyped-def]
    line_ptr, list_ptr, start, count, width, vocab_size, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """Ids and logits of the listed groups from `start`; -inf past the list's end."""
    entry = start + tl.arange(0, TILE)
    group = tl.load(list_ptr + entry, mask=entry < count, other=0x7FFFFFF // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return ids, load_logits(line_ptr, ids, width, vocab_size)


@jit
def _reach(  # type: ignore[no-untyped-def]
    line_ptr,
    list_ptr,
    count,
    width,
    vocab_size,
    key,
    top,
    rate,
    COUNTING: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """How many of the listed logits are at or above `key`, or how much they weigh."""
    total = tl.zeros([TILE, GROUP], tl.float32)
    start = 0
    # Not a range: Triton 3.6 interprets none with a run-time bound under numpy 2.4.
    while start < count:
        _, x = _tile(line_ptr, list_ptr, start, count, width, vocab_size, TILE, GROUP)
        above = (order(x) >> SHIFT) >= key
        if COUNTING:
            total += tl.where(above, 1.0, 0.0)
        else:
            total += tl.where(above, tl.exp((x - top) * rate), 0.0)
        start += TILE
    return tl.sum(tl.sum(total, axis=1), axis=0)


@jit
def _search(  # type: ignore[no-untyped-def]
    line_ptr,
    list_ptr,
    count,
    width,
    vocab_size,
    low,
    high,
    target,
    top,
    rate,
    COUNTING: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The largest key in [low, high) that reaches the target; that `low` does is taken as given."""
    # As many steps as there are bits in a key, whatever is reached: all threads of a program leave
    # the loop together. The barrier keeps a step's sums apart from the next one's.
    for _ in range(33 - SHIFT):
        key = (low + high) >> 1
        reached = _reach(
            line_ptr, list_ptr, count, width, vocab_size, key, top, rate, COUNTING, TILE, GROUP,
            SHIFT,
        )  # fmt: skip
        low = tl.where(reached >= target, key, low)
        high = tl.where(reached >= target, high, key)
        tl.debug_barrier()
    return low


@jit
def filtered(  # type: ignore[no-untyped-def]
    line_ptr,
    maxima_ptr,
    list_ptr,
    width,
    vocab_size,
    groups,
    top,
    total,
    rate,
    k,
    p,
    seed,
    position,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Draw among the logits at or above the threshold that the filters set.

    The maxima of the groups are themselves logits, so a key at which they alone reach the target
    lies no higher than the threshold, and a group whose maximum is below that key holds nothing
    that is kept. The groups that remain, few unless the distribution is flat, are listed, and
    only they are searched for the threshold itself.
    """
    k_on = (k > 0) & (k < vocab_size)
    target = tl.where(k_on, k.to(tl.float32), p * total)
    high = (order(top) >> SHIFT).to(tl.int64) + 1
    low = (order(tl.full([], float("-inf"), tl.float32)) >> SHIFT).to(tl.int64)

    group = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + group, mask=group < groups, other=float("-inf"))
    value = tl.where(k_on, 1.0, tl.exp((maxima - top) * rate))
    maxima_key = order(maxima) >> SHIFT
    ceiling = high
    for _ in range(33 - SHIFT):
        key = (low + ceiling) >> 1
        reached = tl.sum(tl.where(maxima_key >= key, value, 0.0), axis=0)
        low = tl.where(reached >= target, key, low)
        ceiling = tl.where(reached >= target, ceiling, key)
        tl.debug_barrier()

    listed = (group < groups) & (maxima_key >= low)
    place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + place, group, mask=listed)
    count = tl.sum(listed.to(tl.int32), axis=0)
    # Every thread of the program reads what the others have listed.
    tl.debug_barrier()

    if k_on:
        low = _search(
            line_ptr, list_ptr, count, width, vocab_size, low, high, target, top, rate, True,
            TILE, GROUP, SHIFT,
        )  # fmt: skip
        if p < 1:
            total = _reach(
                line_ptr, list_ptr, count, width, vocab_size, low, top, rate, False, TILE, GROUP,
                SHIFT,
            )  # fmt: skip
    if p < 1:
        low = _search(
            line_ptr, list_ptr, count, width, vocab_size, low, high, p * total, top, rate, False,
            TILE, GROUP, SHIFT,
        )  # fmt: skip

    best = tl.full([TILE, GROUP], -0x8000000000000000, tl.int64)
    start = 0
    while start < count:
        ids, x = _tile(line_ptr, list_ptr, start, count, width, vocab_size, TILE, GROUP)
        score = score_of(x, top, rate, seed, ids, position)
        score = tl.where((order(x) >> SHIFT) >= low, score, float("-inf"))
        best = tl.maximum(best, pack(score, ids))
        start += TILE
    return packed_id(tl.max(tl.max(best, axis=1), axis=0))
