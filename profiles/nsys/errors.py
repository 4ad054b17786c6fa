"""Errors of profiling with Nsight Systems; all derive from `graphcache.GraphCacheError`."""

from __future__ import annotations

from graphcache.errors import GraphCacheError

__all__ = [
    "EmptyProfile",
    "NotAnExport",
    "NsysError",
    "NsysMissing",
    "SpansMismatch",
    "TornExport",
]


class NsysError(GraphCacheError, RuntimeError):
    """Nsight Systems ended with an error, or can't do what was asked."""


class NsysMissing(NsysError):
    """Nsight Systems, or a library that it needs, is not on this machine."""


class NotAnExport(GraphCacheError, ValueError):
    """A file that is not an SQLite export of Nsight Systems."""


class TornExport(NotAnExport):
    """An SQLite export that ends too early or has a damaged page."""


class EmptyProfile(GraphCacheError, ValueError):
    """An export in which no graph was replayed."""


class SpansMismatch(GraphCacheError, ValueError):
    """Saved spans of other captures than those replayed in the profile."""
