"""Rows that ladders pad: arithmetic, the same on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from capture import Ladder
from capture.ladder import Bucket

from ..results import Padding

__all__ = ["LADDERS", "padded_share", "padding_of_ladders"]

CEILING = 256


def _powers(ceiling: int) -> list[int]:
    return [bucket.rows for bucket in Ladder.powers_of_two(ceiling).buckets]


def _vllm(ceiling: int) -> list[int]:
    """1, 2, 4, then every eighth size to 256, every sixteenth beyond."""
    sizes = [1, 2, 4, *range(8, min(ceiling, 256) + 1, 8), *range(272, ceiling + 1, 16)]
    return [size for size in sizes if size <= ceiling]


def _sglang(ceiling: int) -> list[int]:
    """1, 2, 4, 8, 12, then every eighth size to 256, every sixteenth to 496, every 32nd beyond.

    Its default without speculative decoding, for which it has a denser list.
    """
    eighths, sixteenths = range(16, 257, 8), range(272, 512, 16)
    sizes = [1, 2, 4, 8, 12, *eighths, *sixteenths, *range(512, ceiling + 1, 32)]
    return [size for size in sizes if size <= ceiling]


LADDERS: Mapping[str, Callable[[int], list[int]]] = {
    "powers of two": _powers,
    "vLLM's": _vllm,
    "SGLang's": _sglang,
}
"""Sizes by ceiling."""


def padded_share(ladder: Ladder) -> float:
    """The share of a step's rows that is padding, with batches of all sizes alike."""
    shares = []
    for rows in range(1, ladder.ceiling + 1):
        bucket = ladder.bucket_for(rows, ladder.q_len)
        assert isinstance(bucket, Bucket)
        shares.append(1 - rows / bucket.rows)
    return sum(shares) / len(shares)


def padding_of_ladders(ceiling: int = CEILING) -> Iterator[Padding]:
    """A line for each ladder."""
    for name, sizes in LADDERS.items():
        ladder = Ladder(sizes(ceiling), ceiling=ceiling)
        yield Padding(name, len(ladder.buckets), ceiling, padded_share(ladder))
