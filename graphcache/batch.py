"""What a model sees of a step: which slots, at which positions, with which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

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
