"""What is given for a batch, and where it goes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...rows import Rows


class Rotation(NamedTuple):
    """Of the last 2·n dims of a token's vectors, in neighbouring pairs: cos, sin [T, n] float32."""

    cos: Tensor
    sin: Tensor


class WindowParts(NamedTuple):
    """Where window rows go: rows [S1, R, ...] and the position that each holds, [S1, R] int32."""

    rows: Rows
    positions: Tensor


class TailParts(NamedTuple):
    """A tail's rings, each [S1, R, D] of one dtype; the previous stream's only with overlap."""

    values: Tensor
    gates: Tensor
    previous_values: Tensor | None = None
    previous_gates: Tensor | None = None


class Compressor(NamedTuple):
    """What a compressor is given for a batch, and where it keeps it. ov is 1 with overlap, else 0.

    Attributes:
        values: [T, (1+ov)·D], projected; with overlap the previous stream's dims come first.
        gates: [T, (1+ov)·D], likewise, before the bias.
        bias: [m, (1+ov)·D], added to the gates by position in the block.
        norm: [D], weight of the entry's norm.
        tail: the rings.
        entries: [blocks, entries of a block, ...]: where entries are stored.
    """

    values: Tensor
    gates: Tensor
    bias: Tensor
    norm: Tensor
    tail: TailParts
    entries: Rows


def flat(parts: Compressor | None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if parts is None:
        return [], [], []
    rings = [ring for ring in parts.tail if ring is not None]
    return list(parts[:4]), rings, parts.entries.parts()
