"""Fork slots inside a step: copy whole rows of the arena, and the blocks that are not shared.

Who is forked to whom is on the device, as pairs of `slot_in` and `slot_out`, so that a replay forks
other slots than the capture had. A pair with -1 in it does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._triton import jit, tl, triton

__all__ = ["fork_slots"]

ROW_ALIGNMENT_BYTES = 16
WORD_BYTES = 4
CHUNK_WORDS = 4096
"""Words that a program moves at a time, 16 bytes a thread and load."""
MOST_ROW_PROGRAMS = 256
"""For one row: two for each multiprocessor of an H200. Longer rows take more turns."""
MOST_SPLITS = 16
"""Programs that share one block."""
MOST_COLUMNS = 1024
"""Columns of the table that a program looks at; nearly all of them are shared."""


def _reference(
    arena: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    keep_from: int,
    keep_to: int,
    blocks: Tensor | None,
    table: Tensor | None,
    length: Tensor | None,
    block_tokens: int,
) -> None:
    pairs = (slot_in >= 0) & (slot_out >= 0)
    source, target = slot_in[pairs].long(), slot_out[pairs].long()
    if blocks is not None and table is not None and length is not None:
        held = -(-length[source] // block_tokens)
        copied = torch.arange(table.shape[1]) < held.unsqueeze(1)
        copied &= table[source] != table[target]
        blocks[table[target][copied].long()] = blocks[table[source][copied].long()]
    kept = arena[target, keep_from:keep_to]
    arena[target] = arena[source]
    arena[target, keep_from:keep_to] = kept


@jit
def _fork_slots_kernel(  # type: ignore[no-untyped-def]
    arena,
    slot_in,
    slot_out,
    blocks,
    table,
    length,
    table_stride,
    length_stride,
    ROW_WORDS: tl.constexpr,
    KEEP_FROM: tl.constexpr,
    KEEP_TO: tl.constexpr,
    ROW_PROGRAMS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a pair and part: the first parts move the row, the others look for blocks."""
    part = tl.program_id(0)
    pair = tl.program_id(1)
    source = tl.load(slot_in + pair).to(tl.int64)
    target = tl.load(slot_out + pair).to(tl.int64)
    if (source >= 0) & (target >= 0):
        if part < ROW_PROGRAMS:
            _copy_row(
                arena + source * ROW_WORDS,
                arena + target * ROW_WORDS,
                part,
                ROW_WORDS,
                KEEP_FROM,
                KEEP_TO,
                ROW_PROGRAMS,
                CHUNK,
            )
        else:
            tokens = tl.load(length + source * length_stride)
            _copy_blocks(
                blocks,
                table + source * table_stride,
                table + target * table_stride,
                (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS,
                (part - ROW_PROGRAMS) // SPLITS,
                (part - ROW_PROGRAMS) % SPLITS,
                BLOCK_WORDS,
                WIDTH,
                COLUMNS,
                SPLITS,
                CHUNK,
            )


@jit
def _copy_row(  # type: ignore[no-untyped-def]
    source,
    target,
    part,
    WORDS: tl.constexpr,
    KEEP_FROM: tl.constexpr,
    KEEP_TO: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    for turn in range((WORDS + PROGRAMS * CHUNK - 1) // (PROGRAMS * CHUNK)):
        start = (turn * PROGRAMS + part) * CHUNK
        word = start + tl.arange(0, CHUNK)
        inside = word < WORDS
        moved = tl.load(source + word, mask=inside, other=0)
        # Writing back what is there leaves the store's mask in whole vectors.
        if (start < KEEP_TO) & (start + CHUNK > KEEP_FROM):
            kept = (word >= KEEP_FROM) & (word < KEEP_TO)
            moved = tl.where(kept, tl.load(target + word, mask=kept, other=0), moved)
        tl.store(target + word, moved, mask=inside)


@jit
def _copy_blocks(  # type: ignore[no-untyped-def]
    blocks,
    theirs,
    own,
    held,
    group,
    split,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """This split's share of the blocks that differ in one group of columns."""
    column = group * COLUMNS + tl.arange(0, COLUMNS)
    there = (column < held) & (column < WIDTH)
    shared = tl.load(theirs + column, mask=there, other=0) == tl.load(
        own + column, mask=there, other=0
    )
    at = tl.min(tl.where(shared, WIDTH, column), axis=0)
    while at < WIDTH:
        source = blocks + tl.load(theirs + at).to(tl.int64) * WORDS
        target = blocks + tl.load(own + at).to(tl.int64) * WORDS
        for turn in range((WORDS + SPLITS * CHUNK - 1) // (SPLITS * CHUNK)):
            word = (turn * SPLITS + split) * CHUNK + tl.arange(0, CHUNK)
            moved = tl.load(source + word, mask=word < WORDS, other=0)
            tl.store(target + word, moved, mask=word < WORDS)
        at = tl.min(tl.where(shared | (column <= at), WIDTH, column), axis=0)


def _launch(
    arena: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    keep_from: int,
    keep_to: int,
    blocks: Tensor | None,
    table: Tensor | None,
    length: Tensor | None,
    block_tokens: int,
) -> None:
    pairs = slot_in.shape[0]
    if not pairs:
        return
    row_words = arena.shape[1] // WORD_BYTES
    row_programs = min(MOST_ROW_PROGRAMS, triton.cdiv(row_words, CHUNK_WORDS))
    block_words, width, columns, splits, groups = 1, 1, 1, 1, 0
    if blocks is not None and table is not None:
        block_words, width = blocks.shape[1] // WORD_BYTES, table.shape[1]
        columns = min(MOST_COLUMNS, triton.next_power_of_2(width))
        splits = min(MOST_SPLITS, triton.cdiv(block_words, CHUNK_WORDS))
        groups = triton.cdiv(width, columns)
    words = arena.view(torch.int32)
    kernel: Any = _fork_slots_kernel
    kernel[(row_programs + groups * splits, pairs)](
        words,
        slot_in,
        slot_out,
        words if blocks is None else blocks.view(torch.int32),
        slot_in if table is None else table,
        slot_in if length is None else length,
        0 if table is None else table.stride(0),
        0 if length is None else length.stride(0),
        ROW_WORDS=row_words,
        KEEP_FROM=keep_from // WORD_BYTES,
        KEEP_TO=keep_to // WORD_BYTES,
        ROW_PROGRAMS=row_programs,
        BLOCK_WORDS=block_words,
        BLOCK_TOKENS=max(1, block_tokens),
        WIDTH=width,
        COLUMNS=columns,
        SPLITS=splits,
        CHUNK=CHUNK_WORDS,
        num_warps=4,
    )


def _fake(
    arena: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    keep_from: int,
    keep_to: int,
    blocks: Tensor | None,
    table: Tensor | None,
    length: Tensor | None,
    block_tokens: int,
) -> None:
    return None


_op = register(
    "fork_slots(Tensor(a!) arena, Tensor slot_in, Tensor slot_out, int keep_from, int keep_to,"
    " Tensor(b!)? blocks, Tensor? table, Tensor? length, int block_tokens) -> ()",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def fork_slots(
    arena: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    *,
    kept: tuple[int, int] = (0, 0),
    blocks: Tensor | None = None,
    table: Tensor | None = None,
    length: Tensor | None = None,
    block_tokens: int = 0,
) -> None:
    """Make each `slot_out[i]` what `slot_in[i]` is. One node, no allocation.

    Copies the slot's row of the arena, but for the bytes `kept`. With blocks, it also copies those
    of the first `ceil(length[slot_in] / block_tokens)` that have another number in the two slots'
    rows of the table; equal numbers are shared blocks, and the table is left as it is. A pair with
    -1 in it does nothing. Runs on the current stream without synchronizing.

    It is not checked, since it is known on the device only: that a slot is `slot_out` of one pair
    at most and is not `slot_in` of another, that `slot_out` has a block wherever `slot_in` has
    tokens, and that nobody else uses the blocks of `slot_out` that `slot_in` does not share.

    Args:
        arena: [S1, stride] uint8, contiguous; written. `stride` is a multiple of 16.
        slot_in: [N] int32, contiguous: rows to copy, -1 for none.
        slot_out: [N] int32, contiguous: rows to copy onto, -1 for none.
        kept: first byte of a row that is not copied, and one past the last; multiples of 4.
        blocks: [B, block_bytes] uint8, like the arena; written. None for rows only.
        table: [S1, width] int32 block numbers, any stride between slots; with blocks.
        length: [S1] int32, any stride: tokens absorbed, by slot; with blocks.
        block_tokens: tokens in a block; with blocks.

    Raises:
        SchemaError: for other dtypes, shapes or strides; nothing is written then.
    """
    _check_bytes("arena", arena)
    for name, slots in (("slot_in", slot_in), ("slot_out", slot_out)):
        _require(
            slots.dtype == torch.int32 and slots.shape == slot_in.shape and slots.dim() == 1,
            f"slot_in and slot_out must be [N] int32, got {list(slots.shape)} {slots.dtype}",
        )
        _require(slots.is_contiguous(), f"{name} must be contiguous")
    keep_from, keep_to = kept
    _require(
        0 <= keep_from <= keep_to <= arena.shape[1]
        and not (keep_from % WORD_BYTES or keep_to % WORD_BYTES),
        f"kept must be a range of 0..{arena.shape[1]} in multiples of {WORD_BYTES}, got {kept}",
    )
    _check_blocks(arena, blocks, table, length, block_tokens)
    _op(arena, slot_in, slot_out, keep_from, keep_to, blocks, table, length, block_tokens)


def _check_blocks(
    arena: Tensor,
    blocks: Tensor | None,
    table: Tensor | None,
    length: Tensor | None,
    block_tokens: int,
) -> None:
    if blocks is None or table is None or length is None:
        _require(
            blocks is None and table is None and length is None,
            "blocks, table and length come together",
        )
        return
    _check_bytes("blocks", blocks)
    slots = arena.shape[0]
    _require(
        table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == slots,
        f"table must be [{slots}, width] int32, got {list(table.shape)} {table.dtype}",
    )
    _require(table.stride(1) == 1, "rows of the table must be contiguous")
    _require(
        length.dtype == torch.int32 and length.shape == (slots,),
        f"length must be [{slots}] int32, got {list(length.shape)} {length.dtype}",
    )
    _require(block_tokens >= 1, f"block_tokens must be at least 1, got {block_tokens}")


def _check_bytes(name: str, memory: Tensor) -> None:
    _require(
        memory.dtype == torch.uint8 and memory.dim() == 2 and memory.is_contiguous(),
        f"{name} must be rows of bytes, [rows, n] uint8 and contiguous, "
        f"got {list(memory.shape)} {memory.dtype}",
    )
    _require(
        not (memory.shape[1] % ROW_ALIGNMENT_BYTES or memory.storage_offset() % WORD_BYTES),
        f"rows of {name} must be a multiple of {ROW_ALIGNMENT_BYTES} bytes, got {memory.shape[1]}",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"fork_slots: {message}")
