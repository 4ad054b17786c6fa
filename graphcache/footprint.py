"""How many bytes a state will take, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .block_store import table_width
from .layout import LayerSchema, block_fields, block_tokens_for, slot_fields
from .row_layout import Field, RowLayout

__all__ = ["StateFootprint", "state_footprint"]

TABLE_ENTRY_BYTES = 4


@dataclass(frozen=True)
class StateFootprint:
    """Bytes of a `DecodeState` on its device: exactly what `memory_bytes()` will say.

    Attributes:
        max_requests: slots.
        blocks: blocks that can be handed out; 0 where nothing grows with length.
        row_bytes: of one slot's row.
        block_bytes: of one block.
        table_row_bytes: of one slot's row of the block table.
        spare_rows: rows of each pool that no request gets.
    """

    max_requests: int
    blocks: int
    row_bytes: int
    block_bytes: int
    table_row_bytes: int
    spare_rows: int

    @property
    def arena_bytes(self) -> int:
        """Rows of slots, and spare ones."""
        return (self.max_requests + self.spare_rows) * self.row_bytes

    @property
    def block_store_bytes(self) -> int:
        """Blocks, and tables with their scratch row."""
        if not self.blocks:
            return 0
        tables = (self.max_requests + 1) * self.table_row_bytes
        return (self.blocks + self.spare_rows) * self.block_bytes + tables

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.arena_bytes + self.block_store_bytes

    @property
    def slot_bytes(self) -> int:
        """What one slot more would take, with blocks for a full context of its own."""
        width = self.table_row_bytes // TABLE_ENTRY_BYTES
        return self.row_bytes + width * self.block_bytes + self.table_row_bytes


def state_footprint(
    schemas: Sequence[LayerSchema],
    *,
    max_requests: int,
    max_context: int,
    fields: Iterable[Field] = (),
    block_tokens: int | None = None,
    kv_blocks: int | None = None,
    guarded: bool = False,
) -> StateFootprint:
    """What a `DecodeState` of these arguments takes, see there.

    Raises:
        SchemaError: when the state can't be laid out.
    """
    model_fields = [replace(field, reset=True) for field in fields]
    row = RowLayout(slot_fields(schemas, model_fields, max_context))
    if block_tokens is None:
        block_tokens = block_tokens_for(schemas)
    grows = block_fields(schemas, block_tokens)
    width = table_width(max_context, block_tokens) if grows else 0
    blocks = max_requests * width if kv_blocks is None else kv_blocks
    return StateFootprint(
        max_requests=max_requests,
        blocks=blocks if grows else 0,
        row_bytes=row.stride_bytes,
        block_bytes=RowLayout(grows).stride_bytes if grows else 0,
        table_row_bytes=width * TABLE_ENTRY_BYTES,
        spare_rows=3 if guarded else 1,
    )
