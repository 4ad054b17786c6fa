"""Whether replays take memory: each must give back, or never take, all that it uses."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from .case import Case
from .report import Finding
from .stage import Stage

__all__ = ["allocations"]

REPLAYS = 4


def allocations(stage: Stage) -> Finding | None:
    """Count allocations over replays of an unchanged batch, in every bucket.

    On a GPU its allocator may be asked for nothing. A tape's operations allocate in passing: there,
    and for tensors of the host, replays may not leave ever more tensors alive.
    """
    for bucket in stage.ladder.buckets:
        requests = stage.crowd(bucket.rows, REPLAYS + 1)
        case = Case(requests, (tuple(range(len(requests))),) * (REPLAYS + 1))
        scene = stage.scene(case)
        # The first sends the batch, and makes what is made once.
        stage.step(scene, 0).tokens()
        with _Counted(stage.runtime.device) as counted:
            for step in range(1, REPLAYS + 1):
                stage.step(scene, step).tokens()
        if counted.allocations or len(counted.left) >= REPLAYS:
            said = (
                f"{REPLAYS} replays asked the GPU's allocator {counted.allocations} times"
                if counted.allocations
                else f"{REPLAYS} replays left {len(counted.left)} tensors alive, the last of shape "
                f"{list(counted.left[-1].shape)}, {counted.left[-1].dtype}"
            )
            return Finding("allocates-in-replay", "replays", said, case.in_words(stage.ladder))
    return None


class _Counted:
    """A context that counts what is allocated in it.

    Args:
        device: whose allocator is asked.

    Attributes:
        allocations: how often a GPU's allocator was asked for memory.
        left: the tensors made meanwhile that Python still holds at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.allocations = 0
        self.left: list[Tensor] = []

    def __enter__(self) -> _Counted:
        # While the collector rests, whatever is made stays in its youngest generation.
        self._collecting = gc.isenabled()
        gc.disable()
        self._known = {id(tensor): tensor for tensor in _young()}
        self.allocations = -_asked(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.allocations += _asked(self._device)
        self.left = [tensor for tensor in _young() if id(tensor) not in self._known]
        if self._collecting:
            gc.enable()


def _young() -> list[Tensor]:
    return [each for each in gc.get_objects(generation=0) if type(each) is Tensor]


def _asked(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))
