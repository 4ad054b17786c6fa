"""Named fields for a fixed number of rows, in one allocation that never moves.

A captured graph holds raw addresses, so state lives in an arena that is laid out once. The arena is
row-major: all that one row owns, in every field, is one contiguous range, aligned to 256 bytes.
Copying, checkpointing or moving a row is then one copy of one range, and a field is a strided view
`[rows, *shape]` that kernels index by row. The last row is *scratch*: no allocator ever hands it
out, and an operation may turn a padding index into it.

A pool's rows are slots in `DecodeState` and blocks in `BlockStore`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .errors import SchemaError, UnsupportedPlatform

__all__ = ["GUARD", "Field", "StatePool"]

ROW_ALIGNMENT_BYTES = 256
FIELD_ALIGNMENT_BYTES = 16
GUARD: Final = -23206
"""What guard rows hold, 0xFFFFA55A: read as floats it is not a number, and no index is like it."""


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


class StatePool:
    """`rows` rows and one scratch row of the given fields, at fixed addresses.

    Args:
        fields: what a row holds. Fields with `reset` are laid out first, so that resetting a row
            is one copy.
        rows: how many can be handed out; row `rows` is scratch.
        device: where the arena lives.
        guarded: have a guard row before the first row and one after scratch, filled with `GUARD`;
            nobody's, so that whoever writes one has an index wrong.

    Attributes:
        arena: [rows + 1, row_stride_bytes] uint8, the one allocation, without its guards.
        guards: the guard rows by where they lie, [row_stride_bytes / 4] int32; empty without.
        fingerprint: changes with any field's name, shape, dtype or place.

    Raises:
        SchemaError: for no fields, a repeated name, or no rows.
        UnsupportedPlatform: for a CUDA device where there is none.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        rows: int,
        device: torch.device | str = "cuda",
        *,
        guarded: bool = False,
    ) -> None:
        ordered = sorted(fields, key=lambda field: not field.reset)
        names = [field.name for field in ordered]
        if not ordered:
            raise SchemaError("a pool needs at least one field")
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise SchemaError(f"fields named twice: {', '.join(repeated)}")
        if rows < 1:
            raise SchemaError(f"a pool needs at least one row, got {rows}")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedPlatform(f"no CUDA device for {str(device)!r}; use device='cpu'")

        self.fields = {field.name: field for field in ordered}
        self.rows = rows
        self.device = torch.device(device)
        self._offsets: dict[str, int] = {}
        self._reset_bytes = 0
        end = 0
        for field in ordered:
            # Scalars of a row share a sector; rows that kernels load as vectors start on 16 bytes.
            alignment = min(FIELD_ALIGNMENT_BYTES, field.dtype.itemsize)
            if field.row_bytes >= FIELD_ALIGNMENT_BYTES:
                alignment = FIELD_ALIGNMENT_BYTES
            self._offsets[field.name] = _align(end, alignment)
            end = self._offsets[field.name] + field.row_bytes
            if field.reset:
                self._reset_bytes = end
        self.row_stride_bytes = _align(end, ROW_ALIGNMENT_BYTES)
        self.fingerprint = hashlib.sha256(
            repr([(f, self._offsets[f.name]) for f in ordered]).encode()
        ).hexdigest()

        self._whole = _zeros(rows + 1 + 2 * guarded, self.row_stride_bytes, self.device)
        self.arena = self._whole[1:-1] if guarded else self._whole
        self.guards: dict[str, Tensor] = {}
        if guarded:
            ends = self._whole.view(torch.int32)
            self.guards = {"before the first row": ends[0], "after the scratch row": ends[-1]}
            for guard in self.guards.values():
                guard.fill_(GUARD)
        self._views = {
            name: self._make_view(self.arena, field) for name, field in self.fields.items()
        }
        for name, field in self.fields.items():
            if field.initial:
                self._views[name].fill_(field.initial)
        self._template = self.arena[rows, : self._reset_bytes].clone()

    def __getitem__(self, name: str) -> Tensor:
        """The field as `[rows + 1, *shape]`, a strided view of the arena."""
        return self._views[name]

    @property
    def scratch_row(self) -> int:
        """The last row, which belongs to nobody."""
        return self.rows

    def byte_range(self, name: str) -> tuple[int, int]:
        """First byte of the field within a row, and one past its last."""
        start = self._offsets[name]
        return start, start + self.fields[name].row_bytes

    def row_view(self, name: str, row_bytes: Tensor) -> Tensor:
        """The field within one row's bytes, as `[*shape]`.

        Args:
            name: of the field.
            row_bytes: [row_stride_bytes] uint8, a row of an arena or a copy of one.
        """
        return self._make_view(row_bytes.unsqueeze(0), self.fields[name])[0]

    def reset_row(self, row: int) -> None:
        """Put every field with a reset rule back to its initial value: one copy, current stream."""
        if self._reset_bytes:
            self.arena[row, : self._reset_bytes].copy_(self._template)

    def copy_row(self, source: int, target: int) -> None:
        """Copy all that `source` owns onto `target`: one copy, current stream."""
        self.arena[target].copy_(self.arena[source])

    def memory_bytes(self) -> int:
        """Bytes of the arena: every row, scratch, guards and alignment included."""
        return self._whole.numel()

    def field_at(self, byte: int) -> str | None:
        """The field that a row has at an offset, None where it has none."""
        for name in self.fields:
            start, end = self.byte_range(name)
            if start <= byte < end:
                return name
        return None

    def _make_view(self, arena: Tensor, field: Field) -> Tensor:
        offset = self._offsets[field.name]
        view = arena[:, offset : offset + field.row_bytes].view(field.dtype)
        return view.view(view.shape[0], *field.shape)


def _zeros(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # numpy leaves zeroing to the system, page by page as they are touched; torch touches all.
        return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))
    return torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device)


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
