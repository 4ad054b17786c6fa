"""The static inputs of all buckets, and the one copy that fills them.

A captured step reads which slots it serves from a tensor whose address never changes; every bucket
reads the front of the same one. All else a step needs it derives from its slots on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from graphcache import PAD_SLOT

from .backend import Backend
from .ladder import Bucket

__all__ = ["SOURCES", "StepBatch"]

SOURCES = 3
"""Buffers to copy from, taken in turn by step number: with two steps unread, the one before them
has completed, and with it the copy that fed it."""


class StepBatch:
    """Who takes part in a step.

    Args:
        rows: the most rows of a bucket.
        device: of the steps.
        backend: makes the copies.

    Attributes:
        requested: [rows] int32 on the device: the rows' slots, -1 for padding.
    """

    def __init__(self, rows: int, device: torch.device, backend: Backend) -> None:
        self.requested = torch.full((rows,), PAD_SLOT, dtype=torch.int32, device=device)
        self._padding = array("i", [PAD_SLOT] * rows)
        self._sources = [backend.host_buffer(self.requested) for _ in range(SOURCES)]

    def view(self, bucket: Bucket) -> Tensor:
        """What the bucket's step reads: [bucket.rows] int32."""
        return self.requested[: bucket.rows]

    def send(self, slots: Sequence[int], bucket: Bucket, step: int) -> None:
        """Fill the bucket's inputs for `step`: one asynchronous copy."""
        source = self._sources[step % SOURCES]
        view, rows, count = source.view, bucket.rows, len(slots)
        view[:count] = array("i", slots)
        if count < rows:
            view[count:rows] = self._padding[count:rows]
        source.send(rows)
