"""What both Triton kernels are made of: a token's list, and pieces of rows."""

from __future__ import annotations

from .._triton import jit, tl


@jit
def list_of(  # type: ignore[no-untyped-def]
    position,
    WINDOW: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN: tl.constexpr,
):
    """A token's list: window rows, entries, tiles of the window, all tiles, and tiles a split.

    A tile is of window rows or of entries, never of both.
    """
    in_window = tl.minimum(position + 1, WINDOW)
    window_tiles = tl.cdiv(in_window, BLOCK_N)
    entries = 0
    if M > 0:
        entries = (position + 1) // M
        if TOP_K > 0:
            entries = tl.minimum(entries, TOP_K)
    tiles = window_tiles + tl.cdiv(entries, BLOCK_N)
    return in_window, entries, window_tiles, tiles, tl.maximum(tl.cdiv(tiles, SPLITS), MIN)


@jit
def rotate_back(  # type: ignore[no-untyped-def]
    acc,
    cos,
    sin,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[HEADS, BLOCK] with the last ROPE_DIM of WIDTH dims rotated by minus the angle."""
    pair = tl.arange(0, BLOCK // 2) - (WIDTH - ROPE_DIM) // 2
    turned = (pair >= 0) & (pair < ROPE_DIM // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=turned, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(acc, [HEADS, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [HEADS, BLOCK])


@jit
def load_piece(  # type: ignore[no-untyped-def]
    at, inside, OFFSET: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr
):
    """Dims OFFSET .. OFFSET + SIZE of the rows at `at`; 0 where not inside and from END on.

    Zeros, since a row that was never written may hold NaN, and a weight of 0 does not mask that.
    """
    lane = OFFSET + tl.arange(0, SIZE)
    if OFFSET + SIZE <= END:
        return tl.load(at[:, None] + lane[None, :], mask=inside[:, None], other=0)
    else:
        there = inside[:, None] & (lane < END)[None, :]
        return tl.load(at[:, None] + lane[None, :], mask=there, other=0)


@jit
def store_piece(  # type: ignore[no-untyped-def]
    target, piece, real, OFFSET: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr
):
    """Dims OFFSET .. OFFSET + SIZE of each head's row, up to END."""
    lane = OFFSET + tl.arange(0, SIZE)
    inside = real[:, None] & (lane < END)[None, :]
    tl.store(target[:, None] + lane[None, :], piece.to(target.dtype.element_ty), mask=inside)


@jit
def decode(  # type: ignore[no-untyped-def]
    codes, scale, FORMAT: tl.constexpr, dtype: tl.constexpr
):
    """A piece of rows in `dtype`; codes with a scale a token stay without it but in float32."""
    if FORMAT == 0:
        return codes.to(dtype)
    else:
        decoded = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
        if FORMAT == 2 or dtype == tl.float32:
            decoded = decoded * scale.to(dtype)[:, None]
        return decoded


@jit
def by_row(value, BLOCK_N: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_N] of [BLOCK_N * SPREAD], where neighbours are equal."""
    return tl.max(tl.reshape(value, [BLOCK_N, SPREAD]), axis=1)
