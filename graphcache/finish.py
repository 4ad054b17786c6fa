"""Why a request stopped."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["FinishReason"]


class FinishReason(IntEnum):
    """The value of `done[slot]`; a step treats a slot with any reason but `NONE` as padding."""

    NONE = 0
    """Still running."""
    STOP = 1
    """One of the request's stop tokens was emitted."""
    LENGTH = 2
    """The request's token budget is spent."""
    CONTEXT = 3
    """The context has no room for another token."""
    NOT_FINITE = 4
    """The logits were not finite, so no token was emitted."""
