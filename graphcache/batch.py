"""What a model sees of a step: which slots, at which positions, with which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from .errors import SchemaError
from .ops.slot_rows import read_slots, write_slots
from .pool import Field

if TYPE_CHECKING:
    from .decode_state import DecodeState

__all__ = ["PAD_SLOT", "Batch"]

PAD_SLOT: Final = -1
"""The slot of a padding row. No index operation ever sees it raw."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens: T = rows x q_len of them, row-major.

    The tokens of a row are one run of one slot, ascending from `len[slot]`; a run shorter than
    `q_len` ends in padding.

    Attributes:
        slots: [T] int32 on the device; -1 for padding and for slots that have finished.
        positions: [T] int32; 0 at padding.
        tokens: [T] int32 token ids; 0 at padding.
        q_len: tokens a row, fixed for the batch.
        state: what the slots own.
        prefill: the tokens come in a chunk: attention takes their own K and V from its input.
    """

    slots: Tensor
    positions: Tensor
    tokens: Tensor
    q_len: int
    state: DecodeState
    prefill: bool = False

    @property
    def rows(self) -> int:
        """Rows of the batch: one slot each."""
        return self.slots.shape[0] // self.q_len

    def read(self, name: str) -> Tensor:
        """What each row's slot has in a field, packed. One node; usable in steps.

        Args:
            name: of a field that the model declares.

        Returns:
            [rows, *shape] in the field's dtype; zeros at padding.

        Raises:
            SchemaError: for a field that the model doesn't declare.
        """
        self._field(name)
        return read_slots(self.state.pool[name], self._row_slots())

    def write(self, name: str, values: Tensor) -> None:
        """Put into each row's slot what it is to have in a field. One node; usable in steps.

        Padding writes nothing, so that neither padding nor a slot that has finished changes.

        Args:
            name: of a field that the model declares.
            values: [rows, *shape], cast to the field's dtype.

        Raises:
            SchemaError: for a field that the model doesn't declare, values of another shape, or a
                step of several tokens a row that would accumulate some that are not taken. Nothing
                is written then.
        """
        field = self._written_field(name)
        values = values.to(field.dtype).contiguous()
        write_slots(self.state.pool[name], self._row_slots(), values)

    def in_place(self, name: str) -> Tensor:
        """A field of every slot, for operations that read and write it by slot. No node.

        They are given `slots` and `q_len`, and must write nothing at padding.

        Args:
            name: of a field that the model declares.

        Returns:
            [S1, *shape], a view of the state; the last row is scratch.

        Raises:
            SchemaError: for a field that the model doesn't declare, or a step of several tokens a
                row that would accumulate some that are not taken.
        """
        self._written_field(name)
        return self.state.pool[name]

    def _row_slots(self) -> Tensor:
        # A row's padding comes last: its first token has its slot.
        return self.slots if self.q_len == 1 else self.slots[:: self.q_len].contiguous()

    def _written_field(self, name: str) -> Field:
        field = self._field(name)
        if field.accumulates and self.q_len > 1 and not self.prefill:
            raise SchemaError(
                f"field {name!r} accumulates, so a step may absorb one token a row, not "
                f"{self.q_len}: those that are not taken could not be undone"
            )
        return field

    def _field(self, name: str) -> Field:
        field = self.state.fields.get(name)
        if field is None:
            known = ", ".join(sorted(self.state.fields)) or "none"
            raise SchemaError(f"the model declares no field {name!r}; it declares {known}")
        return field
