"""Windows and entries full of known rows for `entry_attention`, and what must come out of it.

Rows are what `tests.entry_oracle`'s formats make of random vectors, and so is the expectation: the
oracle's attention in float64 over the rows that a token sees, rotated back. Whatever no token may
see is NaN: rows of the ring behind and ahead of its window, entries not yet complete, blocks of
other slots, scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphcache.ops.absorb import Rotation
from graphcache.pool import StatePool
from graphcache.rows import Row, RowFormat, Rows, row_of
from tests import entry_oracle as oracle

NAN_BYTE = 255

ORACLE_ROWS = {
    RowFormat.FP32: lambda rope_dim: oracle.Fp32(),
    RowFormat.BF16: lambda rope_dim: oracle.Bf16(),
    RowFormat.FP8: oracle.Fp8Token,
    RowFormat.MODEL1: oracle.Model1,
}


@dataclass(frozen=True)
class Case:
    """A batch over one layer's state. `compression` 0 for a window only, `top_k` 0 for all entries.

    Attributes:
        runs: (slot, position of its first token, tokens); slot -1 for a row of padding.
        chunk: a prefill chunk: the runs' own rows are not in the ring yet.
    """

    runs: tuple[tuple[int, int, int], ...]
    q_len: int = 1
    window: int = 5
    ring: int = 8
    compression: int = 2
    held: int = 3
    top_k: int = 0
    heads: int = 3
    dim: int = 24
    rope_dim: int = 8
    row_format: RowFormat = RowFormat.FP32
    dtype: torch.dtype = torch.float32
    slots: int = 5
    width: int = 8
    chunk: bool = False
    seed: int = 0

    @property
    def row(self) -> Row:
        return row_of(self.row_format, self.dim, self.rope_dim)


@dataclass
class Batch:
    """Arguments of `entry_attention`, and what it must return: [T, H, d] float64."""

    q: Tensor
    ring: Rows
    slots: Tensor
    positions: Tensor
    q_len: int
    options: dict[str, Any]
    expected: np.ndarray

    def to(self, device: str) -> Batch:
        options = {name: _moved(part, device) for name, part in self.options.items()}
        tensors = (_moved(p, device) for p in (self.q, self.ring, self.slots, self.positions))
        return Batch(*tensors, self.q_len, options, self.expected)

    def row(self, index: int) -> Batch:
        """One row of the batch by itself."""
        of = slice(index * self.q_len, (index + 1) * self.q_len)
        options = dict(self.options)
        options["rotation"] = Rotation(*(part[of].contiguous() for part in options["rotation"]))
        if options.get("selected") is not None:
            options["selected"] = options["selected"][of].contiguous()
        if options.get("own") is not None:
            options["own"] = options["own"].map(lambda part: part[:, of].contiguous())
        return Batch(
            self.q[of], self.ring, self.slots[of].contiguous(), self.positions[of].contiguous(),
            self.q_len, options, self.expected[of],
        )  # fmt: skip


def _moved(part: Any, device: str) -> Any:
    if isinstance(part, Rotation):
        return Rotation(*(each.to(device) for each in part))
    if isinstance(part, Rows):
        return part.map(lambda each: each.to(device))
    return part.to(device) if isinstance(part, Tensor) else part


def _nan_rows(row: Row, places: int, rows: int) -> Rows:
    pool = StatePool(row.fields("x", rows), places, torch.device("cpu"))
    pool.arena.fill_(NAN_BYTE)
    return row.view(pool, "x", rows)


def _put(rows: Rows, place: int, row: int, encoded: Rows, index: int) -> None:
    for target, source in zip(rows.parts(), encoded.parts(), strict=True):
        target[place, row] = source[index]


def make(case: Case) -> Batch:
    """The state, a batch over it and the oracle's answer."""
    rng = np.random.default_rng(case.seed)
    row, kept = case.row, ORACLE_ROWS[case.row_format](case.rope_dim)
    ring = _nan_rows(row, case.slots, case.ring)
    blocks = case.slots * case.width
    entries = _nan_rows(row, blocks, case.held)
    table = torch.from_numpy(rng.permutation(blocks).astype(np.int32)).view(case.slots, -1)
    table = torch.cat([table, torch.full((1, case.width), blocks, dtype=torch.int32)])
    tokens = len(case.runs) * case.q_len
    own = _nan_rows(row, 1, tokens).map(lambda part: part[:1]) if case.chunk else None
    inv_freq = oracle.inverse_frequencies(case.rope_dim)
    q = torch.from_numpy(rng.standard_normal((tokens, case.heads, case.dim))).to(case.dtype)
    sinks = rng.standard_normal(case.heads) * 2
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    positions = torch.zeros(tokens, dtype=torch.int32)
    selected = torch.full((tokens, max(1, case.top_k)), -1, dtype=torch.int32)
    expected = np.zeros((tokens, case.heads, case.dim))
    for index, (slot, start, count) in enumerate(case.runs):
        if slot < 0:
            continue
        last = start + count
        vectors = torch.from_numpy(rng.standard_normal((last, case.dim)).astype(np.float32))
        window = np.stack([kept.roundtrip(vector.numpy().astype(np.float64)) for vector in vectors])
        encoded = row.encode(vectors)
        for x in range(max(0, start + 1 - case.window), start if case.chunk else last):
            _put(ring, slot, x % case.ring, encoded, x)
        made = last // case.compression if case.compression else 0
        compressed = np.zeros((0, case.dim))
        if made:
            drawn = torch.from_numpy(rng.standard_normal((made, case.dim)).astype(np.float32))
            compressed = np.stack([kept.roundtrip(v.numpy().astype(np.float64)) for v in drawn])
            codes = row.encode(drawn)
            for i in range(made):
                _put(entries, int(table[slot, i // case.held]), i % case.held, codes, i)
        for column in range(count):
            token, x = index * case.q_len + column, start + column
            slots[token], positions[token] = slot, x
            if own is not None:
                _put(own, 0, token, encoded, x)
            visible = compressed[: (x + 1) // case.compression] if case.compression else compressed
            if case.top_k:
                chosen = rng.permutation(len(visible))[: case.top_k]
                chosen.sort()
                selected[token, : len(chosen)] = torch.from_numpy(chosen.astype(np.int32))
                visible = visible[chosen]
            seen = np.concatenate([window[max(0, x + 1 - case.window) : x + 1], visible])
            mixed = oracle.attend(q[token].double().numpy(), seen, sinks, case.dim**-0.5)
            expected[token] = oracle.unrotate(mixed, x, inv_freq)
    angle = positions.double().numpy()[:, None] * inv_freq
    options: dict[str, Any] = {
        "window": case.window,
        "scale": case.dim**-0.5,
        "sinks": torch.from_numpy(sinks.astype(np.float32)),
        "rotation": Rotation(*(torch.from_numpy(f(angle).astype(np.float32))
                               for f in (np.cos, np.sin))),
        "own": own,
    }  # fmt: skip
    if case.compression:
        options |= {
            "entries": entries,
            "table": table,
            "compression": case.compression,
            "selected": selected if case.top_k else None,
        }
    return Batch(q, ring, slots, positions, case.q_len, options, expected)
