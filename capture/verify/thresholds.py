"""Lengths at which a step begins to do something else."""

from __future__ import annotations

from graphcache import DecodeState, LayerCacheSchema

__all__ = ["thresholds"]

SPLIT_TOKENS = 128
"""Attention over blocks shares a context among programs in multiples of this many keys."""
MOST_SPLITS = 8
MOST_BLOCKS = 3


def thresholds(state: DecodeState) -> list[int]:
    """Lengths before, at and after every threshold of a state, ascending.

    Thresholds are an empty slot, where windows fill and rings wrap, where blocks and compressed
    entries end, where attention begins to share a context, and the context's end.
    """
    places = {0, state.max_context}
    for ring in state.rings:
        places |= {ring.rows, 2 * ring.rows}
    for schema in state.schemas:
        if isinstance(schema, LayerCacheSchema):
            places |= {schema.swa_window_size, schema.compression, 2 * schema.compression}
        elif schema.window is not None:
            places |= {schema.window, 2 * schema.window}
    if state.blocks is not None:
        size = state.blocks.block_tokens
        places |= {size * count for count in range(1, MOST_BLOCKS + 1)}
    places |= {SPLIT_TOKENS * count for count in range(1, MOST_SPLITS + 1)}
    near = {place + offset for place in places for offset in (-2, -1, 0, 1)}
    # A step needs room for a token.
    return sorted(length for length in near if 0 <= length <= state.max_context - 2)
