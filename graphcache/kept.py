"""What is kept of a slot's row where most of it is dead: rows of rings, as ranges of bytes.

A ring has rows to spare for steps of many tokens and for rewinds; what a layer needs to go on from
a length is fewer. The ranges are of the row's bytes, so one rule serves every layer and format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ByteRange", "KeptRows", "merged", "pack", "unpack"]

ByteRange = tuple[int, int]
"""First byte within a slot's row, and one past the last."""


@dataclass(frozen=True)
class KeptRows:
    """Rows of one ring of a slot, named by the positions they hold.

    Args:
        ring: [S1, R, ...], a view of an arena of slots; position p lies in row `p % R`.
        positions: at most R of them, ascending by 1.
    """

    ring: Tensor
    positions: range

    def byte_ranges(self) -> list[ByteRange]:
        """The rows' bytes within the slot's; two ranges where the ring wraps.

        What lies between two rows, as in packed formats, counts as theirs.
        """
        rows, count = self.ring.shape[1], len(self.positions)
        first = self.positions.start % rows
        runs = ((first, min(first + count, rows)), (0, first + count - rows))
        return [self._bytes_of(start, stop) for start, stop in runs if start < stop]

    def _bytes_of(self, start: int, stop: int) -> ByteRange:
        ring = self.ring
        inner = zip(ring.shape[2:], ring.stride()[2:], strict=True)
        last = sum((extent - 1) * stride for extent, stride in inner)
        # The arena starts at the storage's first byte, so this is where the field lies in slot 0.
        origin, stride = int(ring.storage_offset()), ring.stride(1)
        return (
            (origin + start * stride) * ring.itemsize,
            (origin + (stop - 1) * stride + last + 1) * ring.itemsize,
        )


def merged(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """The same bytes in ascending ranges that neither touch nor overlap."""
    joined: list[ByteRange] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def pack(row: Tensor, ranges: Sequence[ByteRange]) -> Tensor:
    """The bytes of some ranges of a row, one after another, in memory of their own.

    Args:
        row: [n] uint8.
        ranges: as `merged` gives them.
    """
    return torch.cat([row[start:stop] for start, stop in ranges])


def unpack(packed: Tensor, ranges: Sequence[ByteRange], row: Tensor) -> None:
    """Write what `pack` took back to its places; the row's other bytes stay as they are.

    Args:
        packed: [sum of the ranges] uint8.
        ranges: the same as for `pack`.
        row: [n] uint8 on the device of `packed`; written.
    """
    pieces = packed.split([stop - start for start, stop in ranges])
    torch._foreach_copy_([row[start:stop] for start, stop in ranges], list(pieces))
