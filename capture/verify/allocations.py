"""Whether replays take memory: each must give back, or never take, all that it uses."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from .case import Case, Request
from .report import Finding
from .stage import Stage

__all__ = ["allocations"]

REPLAYS = 4


def allocations(stage: Stage) -> Finding | None:
    """Count allocations over replays of an unchanged batch, in every bucket.

    On a GPU its allocator may be asked for nothing. A tape's operations allocate in passing: there,
    and for tensors of the host, no replay may leave one more tensor alive.
    """
    for bucket in stage.ladder.buckets:
        count = min(bucket.rows, stage.rows)
        requests = tuple(Request(key=row, row=row, length=0) for row in range(count))
        case = Case(requests, (tuple(range(count)),) * (REPLAYS + 1))
        scene = stage.scene(case)
        # The first sends the batch, and makes what is made once.
        stage.step(scene, 0).tokens()
        known, asked = _tensors(), _asked_of(stage.runtime.device)
        for step in range(1, REPLAYS + 1):
            stage.step(scene, step).tokens()
        asked = _asked_of(stage.runtime.device) - asked
        left = [tensor for key, tensor in _tensors().items() if key not in known]
        if asked or len(left) >= REPLAYS:
            said = f"{REPLAYS} replays of {count} rows made {asked or len(left)} allocations"
            if left:
                said += f", left alive is a tensor of shape {list(left[0].shape)}, {left[0].dtype}"
            return Finding("allocates-in-replay", "replays", said, case.in_words(stage.ladder))
    return None


def _tensors() -> dict[int, Tensor]:
    """All that Python holds, by identity."""
    return {id(each): each for each in gc.get_objects() if type(each) is Tensor}


def _asked_of(device: torch.device) -> int:
    """How often a GPU's allocator has been asked for memory so far."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
