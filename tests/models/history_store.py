"""State that keeps every K and V row of every slot in Python lists, and attends row by row."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from graphcache.batch import Batch


class HistoryLayer:
    """One layer: appends a token's K and V to its slot's lists, then attends over all of them."""

    def __init__(self) -> None:
        self.k: dict[int, list[Tensor]] = defaultdict(list)
        self.v: dict[int, list[Tensor]] = defaultdict(list)
        self.asked: list[dict[str, Any]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, **how: Any) -> Tensor:
        self.asked.append(how)
        out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
        for row, slot in enumerate(batch.slots.tolist()):
            if slot < 0:
                continue
            assert int(batch.positions[row]) == len(self.k[slot])
            self.k[slot].append(k[row].clone())
            self.v[slot].append(v[row].clone())
            out[row] = self._row(q[row], slot, how["scale"])
        return out

    def _row(self, q: Tensor, slot: int, scale: float) -> Tensor:
        keys, values = torch.stack(self.k[slot]), torch.stack(self.v[slot])
        group = q.shape[0] // keys.shape[1]
        heads = []
        for head, query in enumerate(q):
            weights = torch.softmax(keys[:, head // group] @ query * scale, dim=0)
            heads.append(weights @ values[:, head // group])
        return torch.stack(heads)


class History:
    """Stands where a batch has its `DecodeState`."""

    def __init__(self, layers: int) -> None:
        self.layers = [HistoryLayer() for _ in range(layers)]


def make_batch(
    state: Any, rows: list[tuple[int, int, list[int]]], q_len: int, prefill: bool = False
) -> Batch:
    """A batch of rows (slot, first position, tokens), each padded to `q_len`.

    A slot of -1 with no tokens is a row of padding.
    """
    slots, positions, tokens = [], [], []
    for slot, start, run in rows:
        for column in range(q_len):
            real = column < len(run)
            slots.append(slot if real else -1)
            positions.append(start + column if real else 0)
            tokens.append(run[column] if real else 0)
    return Batch(_ints(slots), _ints(positions), _ints(tokens), q_len, state, prefill)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
