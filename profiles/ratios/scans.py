"""R7: recurrent state updated where it lies, beside the same update of gathered rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcache.ops.scan_update import scan_update
from graphcache.ops.slot_rows import read_slots, write_slots
from graphcache.pool import Field, StatePool

from ..results import Ratio
from ..timing import graph_node_us, repeated

__all__ = ["MAMBA2_2_7B", "Recurrence", "ScanShape", "recurrent_ratio"]

ROWS = 64
"""Of fewer, packed rows would stay in the L2 cache, and four of the six passes not be seen."""
PAST_L2_BYTES = 512 << 20
"""State that a graph goes through at least, so that no layer finds its own in the cache."""
UPDATES = 48
"""Fewest updates in a graph."""
GOAL = 0.37
"""Two passes over the state by six are a third."""


@dataclass(frozen=True)
class ScanShape:
    """A layer's state for a slot: `heads` matrices [dim, size], whose b and c come in groups."""

    heads: int
    dim: int
    groups: int
    size: int

    @property
    def state_bytes(self) -> int:
        """Of one slot, float32."""
        return 4 * self.heads * self.dim * self.size


MAMBA2_2_7B = ScanShape(heads=80, dim=64, groups=1, size=128)


class Recurrence:
    """Layers of a state-space model in mid-decode, and two ways to take a step's tokens.

    Args:
        shape: of every layer.
        rows: slots, all of which step, in random order.
        layers: with state of their own; inputs and weights are the same.
        device: where it runs.
        dtype: of inputs and weights.
    """

    def __init__(
        self,
        shape: ScanShape,
        rows: int,
        layers: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        def draw(*of: int) -> Tensor:
            return torch.randn(of, generator=generator).to(device=device, dtype=dtype)

        generator = torch.Generator().manual_seed(0)
        field = (shape.heads, shape.dim, shape.size)
        names = [f"layer{index}.state" for index in range(layers)]
        self.pool = StatePool([Field(name, field, torch.float32) for name in names], rows, device)
        self._states = [self.pool[name] for name in names]
        self._slots = torch.randperm(rows, generator=generator, dtype=torch.int32).to(device)
        self._order = torch.arange(rows, dtype=torch.int32, device=device)
        self._inputs = (
            draw(rows, shape.heads, shape.dim),
            draw(rows, shape.heads),
            draw(rows, shape.groups, shape.size),
            draw(rows, shape.groups, shape.size),
        )
        self._weights = (draw(shape.heads), draw(shape.heads), draw(shape.heads))

    def in_place(self, layer: int) -> Tensor:
        """One node: the state is read once and written once."""
        return scan_update(*self._inputs, self._states[layer], *self._weights, self._slots, 1)

    def gathered(self, layer: int) -> Tensor:
        """Three nodes: rows by slot packed, the same kernel on them, and put back."""
        packed = read_slots(self._states[layer], self._slots)
        out = scan_update(*self._inputs, packed, *self._weights, self._order, 1)
        write_slots(self._states[layer], self._slots, packed)
        return out


def recurrent_ratio() -> Ratio:
    """R7 at Mamba-2 2.7B's shape, captured; takes under 1 GiB of the current device."""
    shape = MAMBA2_2_7B
    layers = max(2, -(-PAST_L2_BYTES // (ROWS * shape.state_bytes)))
    recurrence = Recurrence(shape, ROWS, layers, "cuda")
    subject_us, subject_p99 = _update_us(recurrence.in_place, layers)
    floor_us, floor_p99 = _update_us(recurrence.gathered, layers)
    what = (
        f"scan of {shape.heads} heads of {shape.dim} x {shape.size} in place by slot / "
        "gathered, scanned, scattered"
    )
    return Ratio(
        "R7", what, ROWS, subject_us / floor_us, GOAL,
        subject_us, subject_p99, floor_us, floor_p99,
    )  # fmt: skip


def _update_us(update: Callable[[int], Tensor], layers: int) -> tuple[float, float]:
    """Of one layer, median and p99; a graph goes through all layers in turn."""

    def work(index: int) -> None:
        update(index % layers)

    return graph_node_us(repeated(work, max(UPDATES, layers)))
