"""The largest scores of a line, by search for the k-th of them."""

from __future__ import annotations

from typing import Any

from .._triton import jit, tl, triton
from .score import GROUP

LANES, MOST_LANES = 1024, 8192
"""Fewest and most lanes of the lower bound, and candidates that are compared at a time."""
READ = 8192
"""Scores that the lanes take in at a time."""
TILE = 4096
"""Scores that are listed at a time: each takes part in a prefix sum."""


@jit
def _lane_maxima(keys, count, ROWS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """[LANES]: the largest of every LANES-th key from each lane on; the lowest integer of none."""
    most = tl.full([LANES], -0x80000000, tl.int32)
    offset = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, count, ROWS * LANES):
        at = start + offset
        key = tl.load(keys + at, mask=at < count, other=-0x80000000)
        most = tl.maximum(most, tl.max(key, axis=0))
    return most


@jit
def _lower_bound(most, k):  # type: ignore[no-untyped-def]
    """The k-th largest lane rounded down to 16 bits, or the lowest integer."""
    digit = tl.arange(0, 4)
    low = tl.full([], -0x80000000, tl.int32)
    for step in range(8):
        least = low + (digit << (30 - 2 * step))
        reached = tl.sum((most[None, :] >= least[:, None]).to(tl.int32), axis=1)
        chosen = tl.sum((reached >= k).to(tl.int32), axis=0) - 1
        # Fewer lanes than k never reach it.
        low += tl.maximum(chosen, 0) << (30 - 2 * step)
        tl.debug_barrier()
    return low


@jit
def _compact(  # type: ignore[no-untyped-def]
    keys,
    listed,
    places,
    count,
    n,
    low,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
):
    """List where keys reach `low`, ascending; how many there are.

    Looks at `count` keys: the first ones, or where GROUP is more than 1 those of the groups listed.
    With KEEP_KEYS the keys found are moved to the front of all keys, over ones already looked at:
    the i-th found never lies before i.
    """
    found = 0
    for start in range(0, count, TILE):
        lane = start + tl.arange(0, TILE)
        at = lane
        if GROUP > 1:
            at = tl.load(listed + lane // GROUP, mask=lane < count, other=0) * GROUP + lane % GROUP
        inside = (lane < count) & (at < n)
        key = tl.load(keys + at, mask=inside, other=-0x80000000)
        taken = inside & (key >= low)
        flag = taken.to(tl.int32)
        to = found + tl.cumsum(flag, axis=0) - 1
        found += tl.sum(flag, axis=0)
        # Every key of the tile is read before one is moved.
        tl.debug_barrier()
        tl.store(places + to, at, mask=taken)
        if KEEP_KEYS:
            tl.store(keys + to, key, mask=taken)
    return found


@jit
def _kth_largest(keys, count, k, low, span, steps, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest integer in low..low + span that k keys reach; that `low` is one is given."""
    digit = tl.arange(0, 4).to(tl.int64)
    above = tl.zeros([], tl.int64)
    for step in range(0, steps):
        shift = 2 * (steps - 1 - step)
        offset = above + (digit << shift)
        least = (low + offset).to(tl.int32)
        reached = tl.zeros([4, TILE], tl.int32)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)[None, :]
            key = tl.load(keys + at, mask=at < count, other=-0x80000000)
            reached += (key >= least[:, None]).to(tl.int32)
        # Past the span the sum may have left the integers' range.
        enough = (tl.sum(reached, axis=1) >= k) & (offset <= span)
        above += (tl.sum(enough.to(tl.int32), axis=0) - 1).to(tl.int64) << shift
        tl.debug_barrier()
    return (low + above).to(tl.int32)


@jit
def _emit(keys, places, out, count, k, kth, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the places of keys above the k-th largest, and of its first equals, k in all."""
    higher = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < count, other=-0x80000000)
        higher += (key > kth).to(tl.int32)
    equals = k - tl.sum(higher, axis=0)
    tl.debug_barrier()

    higher_before = 0
    equal_before = 0
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < count
        key = tl.load(keys + at, mask=inside, other=-0x80000000)
        place = tl.load(places + at, mask=inside, other=0)
        is_higher = inside & (key > kth)
        is_equal = inside & (key == kth)
        # Both counts in one integer: neither exceeds TILE.
        both = is_higher.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        before = tl.cumsum(both, axis=0) - both
        higher_here = higher_before + (before & 0xFFFF)
        equal_here = equal_before + (before >> 16)
        taken = is_higher | (is_equal & (equal_here < equals))
        tl.store(out + higher_here + tl.minimum(equal_here, equals), place, mask=taken)
        total = tl.sum(both, axis=0)
        higher_before += total & 0xFFFF
        equal_before += total >> 16
        tl.debug_barrier()


@jit
def _reload(note, value):  # type: ignore[no-untyped-def]
    """The value through memory: bounds of loops must be the same number in every thread."""
    tl.store(note, value)
    tl.debug_barrier()
    return tl.load(note)


@jit
def select_kernel(  # type: ignore[no-untyped-def]
    slots,
    positions,
    keys,
    maxima,
    listed,
    places,
    notes,
    out,
    capacity,
    COMPRESSION: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """One program a token: the indices of its k largest scores, ascending."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    n = (tl.load(positions + token) + 1) // COMPRESSION
    out += token * TOP_K
    if (slot < 0) | (n <= TOP_K):
        index = tl.arange(0, K_BLOCK)
        seen = (slot >= 0) & (index < n)
        tl.store(out + index, tl.where(seen, index, -1), mask=index < TOP_K)
        return

    if HAS_SCORES:
        line = token * capacity
        keys += line
        places += line
        maxima += line // GROUP
        listed += line // GROUP
        notes += token * 4
        # Fewer groups than k give no bound.
        direct = n <= GROUP * TOP_K
        if direct:
            most = _lane_maxima(keys, n, ROWS, LANES)
        else:
            most = _lane_maxima(maxima, tl.cdiv(n, GROUP), ROWS, LANES)
        low = _lower_bound(most, TOP_K)
        span = tl.max(most, axis=0).to(tl.int64) - low
        used = (span >> (2 * tl.arange(0, 16)).to(tl.int64)) > 0
        tl.store(notes, tl.sum(used.to(tl.int32), axis=0))
        if direct:
            found = _compact(keys, listed, places, n, n, low, TILE, 1, True)
        else:
            groups = tl.cdiv(n, GROUP)
            groups = _compact(maxima, listed, listed, groups, groups, low, TILE, 1, False)
            looked_at = _reload(notes + 1, groups * GROUP)
            found = _compact(keys, listed, places, looked_at, n, low, TILE, GROUP, True)
        found = _reload(notes + 2, found)
        steps = tl.load(notes)
        kth = _kth_largest(keys, found, TOP_K, low, span, steps, LANES)
        _emit(keys, places, out, found, TOP_K, kth, LANES)


def select_plan(compression: int, top_k: int, has_scores: bool) -> dict[str, Any]:
    """Constants of the second kernel."""
    k_block = triton.next_power_of_2(top_k)
    lanes = min(MOST_LANES, max(LANES, 2 * k_block))
    return {
        "COMPRESSION": compression,
        "TOP_K": top_k,
        "K_BLOCK": k_block,
        "GROUP": GROUP,
        "ROWS": READ // lanes,
        "LANES": lanes,
        "TILE": TILE,
        "HAS_SCORES": has_scores,
        "num_warps": 8,
    }
