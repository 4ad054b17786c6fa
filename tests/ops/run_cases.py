"""Runs of tokens by slot, as operations on recurrent state take them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["draw", "random_runs", "slots_of"]


def random_runs(rng: np.random.Generator, slots: int, q_len: int) -> list[tuple[int, int]]:
    """Rows (slot, tokens) of distinct slots in any order, some of them all padding."""
    taken = rng.permutation(slots)[: int(rng.integers(1, slots + 1))]
    runs = [(int(slot), int(rng.integers(1, q_len + 1))) for slot in taken]
    for _ in range(int(rng.integers(0, 3))):
        runs.insert(int(rng.integers(0, len(runs) + 1)), (-1, 0))
    return runs


def slots_of(runs: list[tuple[int, int]], q_len: int, device: str) -> Tensor:
    """[T] int32: each run's slot for its tokens, then padding."""
    rows = [[slot] * count + [-1] * (q_len - count) for slot, count in runs]
    return torch.tensor(rows, dtype=torch.int32, device=device).flatten()


def draw(rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Normal numbers, rounded to dtype."""
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype).to(device)
