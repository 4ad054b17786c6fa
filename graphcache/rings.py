"""What a ring still holds, and what a rewind needs of it: plain arithmetic on positions.

A ring of R rows keeps position p in row `p % R`, so after writing up to `high` it holds the
positions from `high - R` on. Rewinding a slot to `n` tokens is exact when every ring still holds
what the next read at `n` will look at. That depends on `high`, not on how many tokens the slot has
now: rejected drafts and tokens rewound before have overwritten rows too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .errors import RewindTooFar
from .schema import AttentionType, KVLayerSchema, LayerCacheSchema

__all__ = [
    "Ring",
    "TailRing",
    "WindowRing",
    "check_rewind",
    "rewind_is_exact",
    "rings_of",
    "still_holds",
]


@dataclass(frozen=True)
class WindowRing:
    """A sliding window: a read at position p sees `max(0, p - window + 1)..p`.

    Args:
        rows: of the ring.
        window: tokens a read sees, its own included.
    """

    rows: int
    window: int

    def needed(self, length: int) -> range:
        """Positions that must be there for the next token of a slot with `length` tokens."""
        return range(max(0, length - self.window + 1), length)


@dataclass(frozen=True)
class TailRing:
    """Tokens that await compression into blocks.

    Args:
        rows: of the ring.
        compression: tokens of a block (m).
        overlap: 1 when a block also reads the block before it, else 0.
    """

    rows: int
    compression: int
    overlap: int

    def needed(self, length: int) -> range:
        """Positions that must be there to complete the open block of `length` tokens."""
        first_block = length // self.compression - self.overlap
        return range(max(0, first_block * self.compression), length)


Ring: TypeAlias = WindowRing | TailRing


def rings_of(
    schemas: Iterable[LayerCacheSchema | KVLayerSchema], max_context: int
) -> tuple[Ring, ...]:
    """The distinct rings of some layers; layers that keep every token have none.

    Args:
        schemas: of the layers.
        max_context: most tokens of a slot; K/V rings have no more rows than that.
    """
    rings: dict[Ring, None] = {}
    for schema in schemas:
        if isinstance(schema, LayerCacheSchema):
            rings[WindowRing(schema.swa_rows, schema.swa_window_size)] = None
            if schema.attn_type is not AttentionType.SWA:
                tail = TailRing(schema.tail_buffer_size, schema.compression, schema.overlap)
                rings[tail] = None
        elif schema.window is not None:
            rings[WindowRing(schema.ring_rows(max_context), schema.window)] = None
    return tuple(rings)


def still_holds(ring: Ring, length: int, high: int) -> bool:
    """Whether `ring` has kept all that a rewind to `length` needs.

    Args:
        ring: rows and reader.
        length: tokens after the rewind.
        high: one past the highest position written since admission.
    """
    needed = ring.needed(length)
    return not needed or needed.start >= high - ring.rows


def rewind_is_exact(length: int, high: int, floor: int, rings: Iterable[Ring]) -> bool:
    """Whether a slot rewound to `length` tokens goes on as if it had never gone further.

    Args:
        length: tokens after the rewind; must not exceed the slot's present length.
        high: one past the highest position written since admission.
        floor: 0, or the length of the minimal checkpoint the slot came from.
        rings: of every layer.
    """
    return length >= floor and all(still_holds(ring, length, high) for ring in rings)


def check_rewind(length: int, high: int, floor: int, rings: Iterable[Ring]) -> None:
    """Raise unless `rewind_is_exact`; arguments as there.

    Raises:
        RewindTooFar: with what is missing.
    """
    if length < floor:
        raise RewindTooFar(
            f"can't rewind to {length} tokens: nothing before {floor} is kept. "
            "Rewind less far, or admit the prompt again"
        )
    for ring in rings:
        if not still_holds(ring, length, high):
            raise RewindTooFar(
                f"can't rewind to {length} tokens: a ring of {ring.rows} rows, written up to "
                f"position {high - 1}, keeps positions from {high - ring.rows} on, and "
                f"{ring.needed(length).start} is needed. Rewind less far, fork before going on, "
                "or give the layers' schemas a larger `rewind`"
            )
