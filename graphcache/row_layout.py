"""Where each field of a row lies: what a pool's arena is made from, and how large it will be."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .errors import SchemaError

__all__ = ["Field", "RowLayout"]

ROW_ALIGNMENT_BYTES = 256
FIELD_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Field:
    """One tensor of a pool: a shape for each row, and what a row starts as.

    Args:
        name: unique within the pool.
        shape: for one row; `()` for a scalar.
        dtype: of the elements.
        initial: value of every element when the pool is made.
        reset: `reset_row` puts `initial` back. Needed where a stale value would be read, as in
            fields that accumulate; rings masked by position need none.
        accumulates: all tokens of a slot are folded into it, as in recurrent and conv states: it
            has no row for each. A slot with such a field can't be rewound, only forked or
            checkpointed, and its steps absorb one token a row.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float = 0
    reset: bool = False
    accumulates: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise SchemaError("a field needs a name")
        if any(extent < 1 for extent in self.shape):
            raise SchemaError(f"field {self.name!r} has an empty shape {self.shape}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, alignment not counted."""
        return math.prod(self.shape) * self.dtype.itemsize


class RowLayout:
    """The fields of a row, one behind the other. Those with `reset` come first, so that resetting a
    row is one copy.

    Args:
        fields: what a row holds.

    Attributes:
        fields: by name, in the order in which they lie.
        stride_bytes: from row to row.
        reset_bytes: the front of a row, which a reset copies.
        fingerprint: changes with any field's name, shape, dtype or place.

    Raises:
        SchemaError: for no fields, or a repeated name.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        ordered = sorted(fields, key=lambda field: not field.reset)
        names = [field.name for field in ordered]
        if not ordered:
            raise SchemaError("a pool needs at least one field")
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise SchemaError(f"fields named twice: {', '.join(repeated)}")
        self.fields = {field.name: field for field in ordered}
        self._offsets: dict[str, int] = {}
        self.reset_bytes = 0
        end = 0
        for field in ordered:
            # Scalars of a row share a sector; rows that kernels load as vectors start on 16 bytes.
            alignment = min(FIELD_ALIGNMENT_BYTES, field.dtype.itemsize)
            if field.row_bytes >= FIELD_ALIGNMENT_BYTES:
                alignment = FIELD_ALIGNMENT_BYTES
            self._offsets[field.name] = _align(end, alignment)
            end = self._offsets[field.name] + field.row_bytes
            if field.reset:
                self.reset_bytes = end
        self.stride_bytes = _align(end, ROW_ALIGNMENT_BYTES)
        self.fingerprint = hashlib.sha256(
            repr([(f, self._offsets[f.name]) for f in ordered]).encode()
        ).hexdigest()

    def byte_range(self, name: str) -> tuple[int, int]:
        """First byte of the field within a row, and one past its last."""
        start = self._offsets[name]
        return start, start + self.fields[name].row_bytes

    def field_at(self, byte: int) -> str | None:
        """The field that a row has at an offset, None where it has none."""
        for name in self.fields:
            start, end = self.byte_range(name)
            if start <= byte < end:
                return name
        return None


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
