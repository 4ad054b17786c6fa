"""Counters in device memory, by which the last split of a line knows that it is the last."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import GraphCacheError
from .._triton import triton

COUNTERS = 16384
"""Counters made at first: one for each token, K/V head and tile of its group."""


class WorkspaceNotReady(GraphCacheError, RuntimeError):
    """A capture needs counters that were not made before it."""


_COUNTERS: dict[tuple[int, int], Tensor] = {}
_OUTGROWN: list[Tensor] = []
"""Counters that graphs may still point to."""


def counters_of(device: torch.device, needed: int) -> Tensor:
    """Zeroed counters of the current stream, made or grown outside captures only."""
    on_gpu = device.type == "cuda"
    key = (-1, 0)
    if on_gpu:
        stream = torch.cuda.current_stream(device)
        key = (stream.device_index, stream.cuda_stream)
    held = _COUNTERS.get(key)
    if held is not None and held.numel() >= needed:
        return held
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise WorkspaceNotReady(
            f"decode_attention needs {needed} counters on this stream and has "
            f"{0 if held is None else held.numel()}: run it once at the largest batch on the "
            "capturing stream before capture"
        )
    if held is not None:
        _OUTGROWN.append(held)
    size = max(COUNTERS, triton.next_power_of_2(needed))
    made = _COUNTERS[key] = torch.zeros(size, dtype=torch.int32, device=device)
    return made
