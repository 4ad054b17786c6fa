"""The operation in torch: what the kernel is checked against, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...rows import Rows
from .._rows import (
    as_rows,
    normed,
    rotated,
    row_of_parts,
    scatter,
)
from .parts import Compressor, TailParts


def absorb_window(
    entries: Tensor,
    norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    window: Rows,
    tags: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    if tags is None:
        tokens = (slots >= 0).nonzero().squeeze(1)
        place, row = torch.zeros_like(tokens), tokens
    else:
        tokens = written(slots, q_len, tags.shape[1])
        place, row = slots[tokens].long(), positions[tokens].long() % tags.shape[1]
        tags[place, row] = positions[tokens]
    vectors = entries[tokens].float()
    if norm is not None:
        vectors = normed(vectors, norm, eps)
    if cos is not None and sin is not None:
        vectors = rotated(vectors, cos[tokens], sin[tokens])
    scatter(window, place, row, row_of_parts(window).encode(vectors))


def absorb(
    entries: Tensor,
    norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    window: list[Tensor],
    tags: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    inputs: list[Tensor],
    tail: list[Tensor],
    stored: list[Tensor],
    index_inputs: list[Tensor],
    index_tail: list[Tensor],
    index_stored: list[Tensor],
    block_cos: Tensor | None,
    block_sin: Tensor | None,
    table: Tensor | None,
    emit: bool,
    write: bool,
) -> None:
    compressors = [
        Compressor(given[0], given[1], given[2], given[3], TailParts(*rings), as_rows(rows))
        for given, rings, rows in (
            (inputs, tail, stored),
            (index_inputs, index_tail, index_stored),
        )
        if given
    ]
    if emit and block_cos is not None and block_sin is not None and table is not None:
        # Before anything is written: rings hold what was there before the batch.
        for parts in compressors:
            emit_entries(parts, block_cos, block_sin, eps, table, slots, positions, q_len)
    absorb_window(
        entries, norm, cos, sin, eps, as_rows(window), tags, slots, positions, q_len
    )  # fmt: skip
    if write:
        for parts in compressors:
            append_tail(parts, slots, positions, q_len)


def written(slots: Tensor, q_len: int, ring_rows: int) -> Tensor:
    """Tokens whose rows land in a ring: of each run the last `ring_rows`."""
    written = slots >= 0
    if q_len > ring_rows:
        written.view(-1, q_len)[:, :-ring_rows] &= slots.view(-1, q_len)[:, ring_rows:] < 0
    return written.nonzero().squeeze(1)


def emit_entries(
    parts: Compressor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    values, gates = _tail_rows(parts, positions)
    tail, m, width = parts.tail, parts.bias.shape[0], parts.norm.shape[0]
    ring_rows = tail.values.shape[1]
    block_entries = parts.entries.values.shape[1]
    streams = [(tail.values, tail.gates, 0, slice(-width, None))]
    if tail.previous_values is not None and tail.previous_gates is not None:
        streams.insert(0, (tail.previous_values, tail.previous_gates, m, slice(0, width)))
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0 or (position + 1) % m:
            continue
        run_start = position - token % q_len
        read_values, read_gates = [], []
        for ring_values, ring_gates, back, columns in streams:
            for x in range(max(0, position - m + 1 - back), position - back + 1):
                if x >= run_start:
                    own = token - (position - x)
                    read_values.append(values[own, columns])
                    read_gates.append(gates[own, columns])
                else:
                    read_values.append(ring_values[slot, x % ring_rows])
                    read_gates.append(ring_gates[slot, x % ring_rows])
        weight = torch.stack(read_gates).float().softmax(0)
        pooled = (weight * torch.stack(read_values).float()).sum(0)
        entry = rotated(normed(pooled, parts.norm, eps), cos[token], sin[token])
        index = position // m
        block = table[slot, index // block_entries].long()
        row = torch.tensor(index % block_entries)
        scatter(parts.entries, block, row, row_of_parts(parts.entries).encode(entry))


def _tail_rows(parts: Compressor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gates of a batch as its tail rows hold them: biased, and in the tail's dtype."""
    dtype = parts.tail.values.dtype
    bias = parts.bias.float()[positions.long() % parts.bias.shape[0]]
    return parts.values.to(dtype), (parts.gates.float() + bias).to(dtype)


def append_tail(parts: Compressor, slots: Tensor, positions: Tensor, q_len: int) -> None:
    values, gates = _tail_rows(parts, positions)
    tail, width = parts.tail, parts.norm.shape[0]
    tokens = written(slots, q_len, tail.values.shape[1])
    place, row = slots[tokens].long(), positions[tokens].long() % tail.values.shape[1]
    tail.values[place, row] = values[tokens, -width:]
    tail.gates[place, row] = gates[tokens, -width:]
    if tail.previous_values is not None and tail.previous_gates is not None:
        tail.previous_values[place, row] = values[tokens, :width]
        tail.previous_gates[place, row] = gates[tokens, :width]
