"""K/V caches in poisoned memory, and attention over them in plain float64 loops.

A `Store` keeps what each slot wrote twice: in the caches, views of arenas whose other bytes are all
NaN, and by position in `history`, which the oracle reads. Stores too large for the oracle keep no
history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from graphcache.pool import Field, StatePool

NAN_BYTE = 255
"""Memory full of it reads as NaN in fp32, fp16 and bf16."""


@dataclass(frozen=True)
class Layout:
    """One layer's cache: a ring of `rows` by slot, or `width` blocks of `rows` positions a slot."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    rows: int
    width: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    slots: int = 5

    @property
    def context(self) -> int:
        """Most positions a slot can take; a ring of a window goes on for ever."""
        return self.rows * self.width if self.width else self.rows

    @property
    def scale(self) -> float:
        return self.k_dim**-0.5


def random_layout(rng: np.random.Generator, **fixed: object) -> Layout:
    """A small layout of any kind: GQA and MQA, Dk != Dv, ring or blocks, window, softcap, sinks."""
    kv_heads = int(rng.integers(1, 4))
    window = int(rng.integers(1, 40)) if rng.random() < 0.6 else 0
    blocks = rng.random() < 0.5
    if blocks:
        rows, width = int(rng.choice([1, 3, 4, 16, 64])), int(rng.integers(3, 9))
    else:
        rows, width = (window + 3 if window else int(rng.integers(40, 90))), 0
    layout = Layout(
        heads=kv_heads * int(rng.integers(1, 6)),
        kv_heads=kv_heads,
        k_dim=8 * int(rng.integers(1, 5)),
        v_dim=8 * int(rng.integers(1, 5)),
        rows=rows,
        width=width,
        window=window,
        softcap=float(rng.choice([0.0, 2.0])),
        sinks=bool(rng.random() < 0.5),
    )
    return replace(layout, **fixed)  # type: ignore[arg-type]


@dataclass
class Step:
    """One call's tokens: rows of one slot each, runs of at most q_len."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    positions: Tensor
    q_len: int


@dataclass
class Store:
    """A layer's caches on a device, the length and history of every slot, and sinks."""

    layout: Layout
    rng: np.random.Generator
    device: str = "cpu"
    keep_history: bool = True
    lengths: list[int] = field(default_factory=list)
    history: list[tuple[list[np.ndarray], list[np.ndarray]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lay = self.layout
        holders = lay.slots * lay.width if lay.width else lay.slots
        cache = [
            Field("before", (5,), torch.uint8),
            Field("k", (lay.kv_heads, lay.rows, lay.k_dim), lay.dtype),
            Field("between", (3,), torch.uint8),
            Field("v", (lay.kv_heads, lay.rows, lay.v_dim), lay.dtype),
        ]
        self.pool = StatePool(cache, holders, self.device)
        self.pool.arena.fill_(NAN_BYTE)
        self.k_cache, self.v_cache = self.pool["k"], self.pool["v"]
        self.table: Tensor | None = None
        if lay.width:
            by_slot = [Field("tag", (), torch.int32), Field("table", (lay.width,), torch.int32)]
            self.by_slot = StatePool(by_slot, lay.slots, self.device)
            self.table = self.by_slot["table"]
            # Reserved as needed, from blocks in no order; the rest stay at scratch, the last.
            self.table.fill_(holders)
            self.blocks: list[list[int]] = [[] for _ in range(lay.slots)]
            self.free_blocks = self.rng.permutation(holders).tolist()
        self.history = [([], []) for _ in range(lay.slots)]
        self.lengths = [0] * lay.slots
        sinks = torch.from_numpy(self.rng.normal(size=lay.heads)).float()
        self.sinks = sinks.to(self.device) if lay.sinks else None

    def random(self, *shape: int) -> Tensor:
        """Normal numbers of the cache's dtype, so that both sides start from the same ones."""
        if not self.keep_history:
            return torch.randn(shape, device=self.device).to(self.layout.dtype)
        numbers = self.rng.normal(size=shape).astype(np.float32)
        return torch.from_numpy(numbers).to(self.device, self.layout.dtype)

    def reserve(self, slot: int, positions: int) -> None:
        """Give the slot blocks up to a length."""
        if self.table is None:
            return
        while len(self.blocks[slot]) * self.layout.rows < positions:
            self.table[slot, len(self.blocks[slot])] = self.free_blocks[-1]
            self.blocks[slot].append(self.free_blocks.pop())

    def place(self, slot: int, position: int) -> tuple[int, int]:
        """Where the position lies in the caches: first index and row."""
        rows = self.layout.rows
        if self.table is None:
            return slot, position % rows
        return self.blocks[slot][position // rows], position % rows

    def remember(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Append rows [n, Hkv, D] to the slot's history only."""
        self.lengths[slot] += k.shape[0]
        if self.keep_history:
            for past, rows in zip(self.history[slot], (k, v), strict=True):
                past.extend(rows.to(self.layout.dtype).double().cpu().numpy())

    def fill(self, slot: int, length: int) -> None:
        """Let the slot absorb tokens up to a length: history, and the rows that last."""
        lay, start = self.layout, self.lengths[slot]
        k = self.random(length - start, lay.kv_heads, lay.k_dim)
        v = self.random(length - start, lay.kv_heads, lay.v_dim)
        self.remember(slot, k, v)
        self.reserve(slot, length)
        kept = range(start if lay.width else max(start, length - lay.rows), length)
        if not kept:
            return
        holder, row = zip(*(self.place(slot, position) for position in kept), strict=True)
        at = (torch.tensor(holder), slice(None), torch.tensor(row))
        self.k_cache[at] = k[kept.start - start :]
        self.v_cache[at] = v[kept.start - start :]

    def step(self, runs: list[tuple[int, int]], q_len: int) -> Step:
        """Inputs for rows of (slot, tokens), from each slot's length on; NaN at padding."""
        lay, tokens = self.layout, len(runs) * q_len
        q = self.random(tokens, lay.heads, lay.k_dim)
        k = self.random(tokens, lay.kv_heads, lay.k_dim)
        v = self.random(tokens, lay.kv_heads, lay.v_dim)
        slots = torch.full((tokens,), -1, dtype=torch.int32)
        positions = torch.zeros(tokens, dtype=torch.int32)
        for row, (slot, count) in enumerate(runs):
            length = self.lengths[slot]
            for column in range(count):
                slots[row * q_len + column] = slot
                positions[row * q_len + column] = length + column
            self.reserve(slot, length + count)
        slots, positions = slots.to(self.device), positions.to(self.device)
        for inputs in (q, k, v):
            inputs[slots < 0] = math.nan
        return Step(q, k, v, slots, positions, q_len)

    def attention(self, step: Step) -> np.ndarray:
        """[T, H, Dv] float64: each token over its slot's history, which must hold its own rows."""
        lay = self.layout
        out = np.zeros((step.q.shape[0], lay.heads, lay.v_dim))
        sinks = None if self.sinks is None else self.sinks.cpu().numpy()
        queries = step.q.double().cpu().numpy()
        for token, (slot, position) in enumerate(
            zip(step.slots.tolist(), step.positions.tolist(), strict=True)
        ):
            if slot < 0:
                continue
            first = max(0, position - lay.window + 1) if lay.window else 0
            keys = np.stack(self.history[slot][0][first : position + 1])
            values = np.stack(self.history[slot][1][first : position + 1])
            for head in range(lay.heads):
                of = head // (lay.heads // lay.kv_heads)
                logits = lay.scale * (keys[:, of] @ queries[token, head])
                if lay.softcap:
                    logits = lay.softcap * np.tanh(logits / lay.softcap)
                weights = np.exp(logits)
                total = weights.sum() + (np.exp(sinks[head]) if sinks is not None else 0.0)
                out[token, head] = weights @ values[:, of] / total
        return out


def random_runs(rng: np.random.Generator, slots: int, q_len: int) -> list[tuple[int, int]]:
    """Every slot but one, in no order, each with a run of 0..q_len tokens; rows of padding too."""
    chosen = rng.permutation(slots)[: max(1, slots - 1)]
    return [(int(slot), int(rng.integers(0, q_len + 1))) for slot in chosen]


def append_by_hand(store: Store, step: Step) -> None:
    """Put a step's rows into history and caches, the last of a run over the earlier ones."""
    for token, (slot, position) in enumerate(
        zip(step.slots.tolist(), step.positions.tolist(), strict=True)
    ):
        if slot < 0:
            continue
        index, row = store.place(slot, position)
        store.k_cache[index, :, row] = step.k[token]
        store.v_cache[index, :, row] = step.v[token]
        store.remember(slot, step.k[token : token + 1], step.v[token : token + 1])


def remember_by_hand(store: Store, step: Step) -> None:
    """Put a step's rows into history only: the caches are as before the append."""
    for token, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            store.remember(slot, step.k[token : token + 1], step.v[token : token + 1])


def product_by_columns(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A matrix product whose rows round alike wherever they lie; the interpreter's do not."""
    out = np.zeros((a.shape[0], b.shape[1]), dtype)
    for column in range(a.shape[1]):
        out += a[:, column : column + 1] * b[column : column + 1]
    return out
