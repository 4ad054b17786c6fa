"""Reads what Nsight Systems exports, and says to which scope of a step each kernel belongs.

`python -m profiles.nsys EXPORT.sqlite`; see `profiles/README.md`.
"""

from __future__ import annotations

from .attribute import Attribution, attribute
from .errors import EmptyProfile, NotAnExport, NsysError, NsysMissing, SpansMismatch, TornExport
from .export import Export, read_export

__all__ = [
    "Attribution",
    "EmptyProfile",
    "Export",
    "NotAnExport",
    "NsysError",
    "NsysMissing",
    "SpansMismatch",
    "TornExport",
    "attribute",
    "read_export",
]
