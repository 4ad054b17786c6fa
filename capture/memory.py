"""Device memory: what is in use, and what a model's weights take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .pointers import tensors_of_model
from .watch import storage_key

__all__ = ["DeviceMemory", "bytes_of", "weight_bytes"]


class DeviceMemory:
    """Memory of a GPU as its driver tells it: that of all processes, in pieces of some MiB.

    On a CPU nothing is known: 0 is in use, and what is free is None.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def used(self) -> int:
        """Bytes in use, torch's reserve included. Doesn't wait."""
        if self._device is None:
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def free(self) -> int | None:
        """Bytes that can still be taken."""
        return None if self._device is None else int(torch.cuda.mem_get_info(self._device)[0])

    def release(self) -> None:
        """Give back what torch keeps in reserve. Waits for the device."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the memory behind tensors on a device; what they share is counted once."""
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == device.type
    }
    return sum(storages.values())


def weight_bytes(
    model: Any, device: torch.device, held: Iterable[Tensor], own: Iterable[Tensor]
) -> int:
    """Bytes of a model's weights: of the tensors it names, or else of those its steps touch.

    Args:
        model: a runtime's.
        device: whose memory is asked for.
        held: what its steps touch.
        own: what of that is state, inputs or outputs.
    """
    named = tensors_of_model(model)
    if named:
        return bytes_of(named.values(), device)
    ours = {storage_key(tensor) for tensor in own}
    return bytes_of((tensor for tensor in held if storage_key(tensor) not in ours), device)
