"""Memory of device and host at even distances, and whether any of it grew."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from capture.memory import DeviceMemory

from .life import Life

__all__ = ["SLACK", "Reading", "Readings", "growth"]

SLACK = {
    "allocated_bytes": 64 << 10,
    "reserved_bytes": 4 << 20,
    "used_bytes": 8 << 20,
    "rss_bytes": 32 << 20,
    "objects": 500,
}
"""Growth that passes. A leak of one object a replay is far beyond it in a million replays; what
torch and the driver take, they take in pieces of 2 MiB."""
WARM_UP = 0.1
"""Of the readings: what is made once is made by then."""
FEWEST = 4


@dataclass(frozen=True)
class Reading:
    """What was in use after some replays, with no step on its way.

    Attributes:
        replays: so far.
        allocated_bytes, reserved_bytes: of torch's allocator; 0 on a CPU. What it kept in reserve
            was given back before.
        used_bytes: of the device, as the driver tells it: that of all processes.
        rss_bytes: of this process in host memory.
        objects: that the collector knows and that were made since the first reading.
    """

    replays: int
    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int
    rss_bytes: int
    objects: int


class Readings(AbstractContextManager["Readings"]):
    """Takes readings. Within its context whatever existed before is left out of collections.

    Args:
        device: the runtime's.

    Attributes:
        taken: readings, in order.
        garbage: objects that bursts of steps left for the collector.
    """

    def __init__(self, device: torch.device) -> None:
        self.taken: list[Reading] = []
        self.garbage = 0
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._memory = DeviceMemory(device)

    def __enter__(self) -> Readings:
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()

    def take(self, life: Life, most: int) -> None:
        """Run a burst of at most so many steps, see what it leaves for the collector, and read."""
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            life.burst(most)
            self.garbage += gc.collect() + len(gc.garbage)
        finally:
            if enabled:
                gc.enable()
        self._memory.release()
        self.taken.append(
            Reading(
                replays=life.replays,
                allocated_bytes=torch.cuda.memory_allocated(self._device) if self._on_gpu else 0,
                reserved_bytes=torch.cuda.memory_reserved(self._device) if self._on_gpu else 0,
                used_bytes=self._memory.used(),
                rss_bytes=_rss_bytes(),
                objects=len(gc.get_objects()),
            )
        )


def growth(readings: Sequence[Reading]) -> dict[str, int] | None:
    """By what, by attribute, the least of the last tenth lies above the most of the first tenth.

    Less than 0 where it shrank; None for too few readings to tell.
    """
    if len(readings) < FEWEST:
        return None
    count = max(1, int(len(readings) * WARM_UP))
    first, last = readings[:count], readings[-count:]
    return {
        name: min(getattr(each, name) for each in last) - max(getattr(each, name) for each in first)
        for name in SLACK
    }


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
