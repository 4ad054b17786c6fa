"""Every error of the library, under one base. Each message says what was got and what to do."""

from __future__ import annotations

__all__ = [
    "BlocksExhausted",
    "ContextFull",
    "DuplicateSlot",
    "GraphCacheError",
    "InvalidRequest",
    "InvalidSlot",
    "LayoutMismatch",
    "PrefillFailed",
    "RewindTooFar",
    "SchemaError",
    "SlotPrefilling",
    "SlotsExhausted",
    "StaleSlot",
    "UnbalancedScopes",
    "UnsupportedModel",
    "UnsupportedPlatform",
    "WeightsError",
]


class GraphCacheError(Exception):
    """Base of every error raised by `graphcache` and `capture`."""


class SchemaError(GraphCacheError, ValueError):
    """A schema, field or pool was described in a way that can't be laid out."""


class UnbalancedScopes(GraphCacheError, RuntimeError):
    """A step closed a scope that it had not opened, or left one open."""


class UnsupportedModel(GraphCacheError, NotImplementedError):
    """A model with a part that no adapter serves; the message names the part."""


class UnsupportedPlatform(GraphCacheError, RuntimeError):
    """A device or package that an operation needs is not there."""


class WeightsError(GraphCacheError, OSError):
    """A weights file is missing, corrupt, or in a form that would have to be unpickled."""


class InvalidRequest(GraphCacheError, ValueError):
    """A request's prompt or sampling parameters can't be served as given."""


class InvalidSlot(GraphCacheError, ValueError):
    """Something that was never a slot handle: a wrong type, or a row outside the pool."""


class StaleSlot(GraphCacheError, LookupError):
    """A handle whose request was retired."""


class DuplicateSlot(GraphCacheError, ValueError):
    """One slot asked for twice in one step."""


class SlotPrefilling(GraphCacheError, RuntimeError):
    """A slot was asked to step before its prompt was complete."""


class PrefillFailed(GraphCacheError, RuntimeError):
    """A slot whose prefill raised midway: some layers have absorbed what others have not.

    So has one whose eager step raised, where fields accumulate.
    """


class SlotsExhausted(GraphCacheError, RuntimeError):
    """Every slot is taken by a live request."""


class BlocksExhausted(GraphCacheError, RuntimeError):
    """Too few free K/V blocks for the prompt and the answer that were asked for."""


class ContextFull(GraphCacheError, ValueError):
    """More tokens than `max_context` has room for."""


class RewindTooFar(GraphCacheError, ValueError):
    """A rewind to a length whose rows have been overwritten since."""


class LayoutMismatch(GraphCacheError, ValueError):
    """A checkpoint of another layout of state."""
