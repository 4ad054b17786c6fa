"""Small host values to the device, without waiting for what the device is doing.

The source of an asynchronous copy must stay as it is until the copy has run, which may be many
steps later. So sources are pinned buffers taken in turn, each with the event of its last copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["Uploads"]

BUFFERS = 8
ALIGNMENT_BYTES = 16


class Uploads:
    """Copies host arrays into device tensors in the order of the current stream.

    Args:
        device: where the targets are. On a CPU a copy is done when the call returns.
        buffer_bytes: the largest copy made in one piece; larger ones are cut.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._on_cuda = device.type == "cuda"
        self._buffer_bytes = -(-buffer_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._turn = 0
        if self._on_cuda:
            self._buffers = [
                torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=True)
                for _ in range(BUFFERS)
            ]
            self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS

    def copy(self, target: Tensor, values: np.ndarray) -> None:
        """Copy `values` into `target` on the current stream.

        Returns before the copy has run, except when all buffers wait for theirs.

        Args:
            target: contiguous, of the size and dtype of `values`.
            values: any host array; may be changed when the call returns.
        """
        source = torch.from_numpy(np.ascontiguousarray(values)).view(torch.uint8).flatten()
        flat = target.view(-1).view(torch.uint8)
        if not self._on_cuda:
            flat.copy_(source)
            return
        for start in range(0, source.numel(), self._buffer_bytes):
            piece = slice(start, start + self._buffer_bytes)
            self._copy_piece(flat[piece], source[piece])

    def _copy_piece(self, target: Tensor, source: Tensor) -> None:
        turn = self._turn
        self._turn = (turn + 1) % BUFFERS
        event = self._copied[turn]
        if event is None:
            event = self._copied[turn] = torch.cuda.Event()
        else:
            event.synchronize()
        staged = self._buffers[turn][: source.numel()]
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        event.record()
