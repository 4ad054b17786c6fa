"""Fills memory that a step must not read, or must not write, so that it shows when it does."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from graphcache import DecodeState, KVLayerSchema
from graphcache.control import control_fields
from graphcache.kept import ByteRange, merged

from .case import Case

__all__ = ["Area", "fill"]

NAN: Final = 0xFF
"""As every byte of it, not a number in each float format, and -1 as an int."""
LARGEST: Final = 0x40
"""Below it, as every byte, a small number in each float format."""


class Area(Enum):
    """Memory that no row which runs may read."""

    SCRATCH = "the scratch row and the scratch block"
    OTHERS = "other slots' rows and blocks"
    RING = "rings of its own outside the window"
    BLOCKS = "blocks of its own past its length"


def fill(state: DecodeState, case: Case, poisoned: Collection[Area], seed: int = 0) -> None:
    """Fill all areas: those poisoned with NaN, the others with small numbers.

    The slots' scalars and tokens, and whole-numbered fields of the model's, stay as they are.
    """
    generator = torch.Generator(device=state.device)
    running = {r.row: r.length for step in range(len(case.batches)) for r in case.running(step)}
    for area in Area:
        # Each area anew, so that what is poisoned leaves the others as they are.
        generator.manual_seed(seed)
        for memory in _memory(state, running, area):
            if area in poisoned:
                memory.fill_(NAN)
            else:
                memory.random_(0, LARGEST, generator=generator)


def _memory(state: DecodeState, running: dict[int, int], area: Area) -> Iterable[Tensor]:
    """Bytes of an area, as views [..., n] uint8."""
    scratch = state.max_requests
    if area is Area.RING:
        for row, length in running.items():
            yield from (state.pool.arena[row, a:b] for a, b in _outside_windows(state, length))
        return
    if area is Area.BLOCKS:
        for row, length in running.items():
            yield from _past_length(state, row, length)
        return
    rows = [scratch] if area is Area.SCRATCH else [r for r in range(scratch) if r not in running]
    for first, last in _fields_of(state):
        if rows:
            # Rows one by one: an index of many would make a copy.
            yield from (state.pool.arena[row, first:last] for row in rows)
    if state.blocks is not None:
        used = {block for row in running for block in state.blocks.blocks_of(row)}
        free = [block for block in range(state.blocks.num_blocks) if block not in used]
        for block in [state.blocks.num_blocks] if area is Area.SCRATCH else free:
            yield state.blocks.pool.arena[block]


def _fields_of(state: DecodeState) -> tuple[ByteRange, ...]:
    """Of a row, what layers keep, and the model's fields that hold floats."""
    known = {field.name for field in control_fields(1)} | {"tokens"}
    return merged(
        state.pool.byte_range(name)
        for name, field in state.pool.fields.items()
        if name.startswith("layer") or (name not in known and field.dtype.is_floating_point)
    )


def _outside_windows(state: DecodeState, length: int) -> Iterable[ByteRange]:
    """Of a row, what no token after `length` reads."""
    for index, layer in enumerate(state.layers):
        fields = [f for f in state.pool.fields if f.startswith(f"layer{index}.")]
        if not fields or length % layer.boundary:
            # Where entries are half complete, what is needed is not told by a minimal checkpoint.
            continue
        kept = merged(piece for rows in layer.kept_rows(length) for piece in rows.byte_ranges())
        for name in fields:
            yield from _without(state.pool.byte_range(name), kept)


def _without(whole: ByteRange, kept: Iterable[ByteRange]) -> Iterable[ByteRange]:
    start, stop = whole
    for first, past in kept:
        if past <= start or first >= stop:
            continue
        if first > start:
            yield start, first
        start = past
    if start < stop:
        yield start, stop


def _past_length(state: DecodeState, row: int, length: int) -> Iterable[Tensor]:
    blocks = state.blocks
    if blocks is None:
        return
    for place, block in enumerate(blocks.blocks_of(row)):
        begins = place * blocks.block_tokens
        if begins >= length:
            yield blocks.pool.arena[block]
        elif begins + blocks.block_tokens > length:
            for index, schema in enumerate(state.schemas):
                if isinstance(schema, KVLayerSchema) and schema.window is None:
                    for name in ("k", "v"):
                        rows = blocks.pool[f"layer{index}.{name}"][block, :, length - begins :]
                        yield rows.view(torch.uint8)
