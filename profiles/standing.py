"""Slots in mid-request without a model having run: so contexts of any length can be measured."""

from __future__ import annotations

from collections.abc import Iterable

from graphcache import DecodeState

__all__ = ["standing_slots"]


def standing_slots(state: DecodeState, lengths: Iterable[int]) -> list[int]:
    """Admit a slot for each length, as if it had absorbed that many tokens; returns the handles.

    Blocks for the whole context are reserved, rows hold whatever they held, and tokens are 0 or 1:
    right for times, not for results. Takes as long for a long slot as for a short one. Device work
    goes to the current stream.

    Args:
        state: with as many free slots.
        lengths: tokens, 1 .. max_context - 1.
    """
    handles = []
    for length in lengths:
        handle = state.open()
        # Without a budget of its own a request reserves what the context holds.
        state.append_tokens(handle, [1, 1])
        state.absorbed(handle, range(length))
        state.complete_prefill(handle)
        handles.append(handle)
    return handles
