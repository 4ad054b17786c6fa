"""Named fields for a fixed number of rows, in one allocation that never moves.

A captured graph holds raw addresses, so state lives in an arena that is laid out once. The arena is
row-major: all that one row owns, in every field, is one contiguous range, aligned to 256 bytes.
Copying, checkpointing or moving a row is then one copy of one range, and a field is a strided view
`[rows, *shape]` that kernels index by row. The last row is *scratch*: no allocator ever hands it
out, and an operation may turn a padding index into it.

A pool's rows are slots in `DecodeState` and blocks in `BlockStore`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .errors import SchemaError, UnsupportedPlatform
from .row_layout import Field, RowLayout

__all__ = ["GUARD", "Field", "StatePool"]

GUARD: Final = -23206
"""What guard rows hold, 0xFFFFA55A: read as floats it is not a number, and no index is like it."""


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
        layout: where a row's fields lie.
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
        layout = RowLayout(fields)
        if rows < 1:
            raise SchemaError(f"a pool needs at least one row, got {rows}")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedPlatform(f"no CUDA device for {str(device)!r}; use device='cpu'")

        self.layout = layout
        self.fields = layout.fields
        self.rows = rows
        self.device = torch.device(device)
        self.row_stride_bytes = layout.stride_bytes
        self.fingerprint = layout.fingerprint

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
        self._template = self.arena[rows, : layout.reset_bytes].clone()

    def __getitem__(self, name: str) -> Tensor:
        """The field as `[rows + 1, *shape]`, a strided view of the arena."""
        return self._views[name]

    @property
    def scratch_row(self) -> int:
        """The last row, which belongs to nobody."""
        return self.rows

    def byte_range(self, name: str) -> tuple[int, int]:
        """First byte of the field within a row, and one past its last."""
        return self.layout.byte_range(name)

    def row_view(self, name: str, row_bytes: Tensor) -> Tensor:
        """The field within one row's bytes, as `[*shape]`.

        Args:
            name: of the field.
            row_bytes: [row_stride_bytes] uint8, a row of an arena or a copy of one.
        """
        return self._make_view(row_bytes.unsqueeze(0), self.fields[name])[0]

    def reset_row(self, row: int) -> None:
        """Put every field with a reset rule back to its initial value: one copy, current stream."""
        if self.layout.reset_bytes:
            self.arena[row, : self.layout.reset_bytes].copy_(self._template)

    def copy_row(self, source: int, target: int) -> None:
        """Copy all that `source` owns onto `target`: one copy, current stream."""
        self.arena[target].copy_(self.arena[source])

    def memory_bytes(self) -> int:
        """Bytes of the arena: every row, scratch, guards and alignment included."""
        return self._whole.numel()

    def _make_view(self, arena: Tensor, field: Field) -> Tensor:
        start, end = self.byte_range(field.name)
        view = arena[:, start:end].view(field.dtype)
        return view.view(view.shape[0], *field.shape)


def _zeros(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        # numpy leaves zeroing to the system, page by page as they are touched; torch touches all.
        return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))
    return torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device)
