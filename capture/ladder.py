"""Which batch sizes are captured, and which of them serves a given number of slots.

Pure functions of numbers, so that every dispatch can be tested without a GPU: an answer is a
bucket's key or a refusal with its reason, never a silent fall to something slower.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .errors import LadderError

__all__ = ["Bucket", "Ladder", "Refusal", "RefusalReason"]


@dataclass(frozen=True, order=True)
class Bucket:
    """The key of a captured step: rows, one slot each, of `q_len` tokens."""

    rows: int
    q_len: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step: rows x q_len."""
        return self.rows * self.q_len

    def __str__(self) -> str:
        return f"{self.rows}" if self.q_len == 1 else f"{self.rows} x {self.q_len}"


class RefusalReason(Enum):
    """Why no bucket serves a batch."""

    EMPTY = "the batch is empty"
    OVER_CEILING = "the batch is larger than the ladder's ceiling"
    NO_SUCH_WIDTH = "no bucket has this many tokens a row"


@dataclass(frozen=True)
class Refusal:
    """No bucket serves `rows` rows of `q_len` tokens."""

    reason: RefusalReason
    rows: int
    q_len: int
    ceiling: int

    def __str__(self) -> str:
        return (
            f"{self.reason.value}: asked for {self.rows} rows of {self.q_len} tokens, "
            f"the ceiling is {self.ceiling}"
        )


class Ladder:
    """The buckets to capture, in ascending order; the largest batch served is always one.

    Args:
        sizes: rows of the buckets, any order.
        ceiling: the largest batch to serve; None for the largest size.
        q_len: tokens a row, the same in all.

    Raises:
        LadderError: for no sizes, a size or q_len below 1, or a size above the ceiling.
    """

    def __init__(self, sizes: Iterable[int], *, ceiling: int | None = None, q_len: int = 1) -> None:
        rows = sorted({_size(size) for size in sizes})
        top = rows[-1] if ceiling is None and rows else ceiling
        if top is None:
            raise LadderError("a ladder needs at least one size")
        if _size(top) < (rows[-1] if rows else 1):
            raise LadderError(f"size {rows[-1]} lies above the ceiling {top}")
        if rows[-1:] != [top]:
            rows.append(top)
        self.q_len = _size(q_len, "q_len")
        self.buckets = tuple(Bucket(size, self.q_len) for size in rows)
        self._rows = rows

    @classmethod
    def powers_of_two(cls, ceiling: int) -> Ladder:
        """1, 2, 4, ... and the ceiling."""
        return cls((1 << i for i in range(_size(ceiling).bit_length())), ceiling=ceiling)

    @classmethod
    def every(cls, ceiling: int) -> Ladder:
        """Every size up to the ceiling: no padding, and a capture for each."""
        return cls(range(1, _size(ceiling) + 1))

    @property
    def ceiling(self) -> int:
        """The largest batch served."""
        return self._rows[-1]

    def bucket_for(self, rows: int, q_len: int = 1) -> Bucket | Refusal:
        """The smallest bucket that holds `rows` rows of `q_len` tokens, or why there is none."""
        if rows < 1:
            return Refusal(RefusalReason.EMPTY, rows, q_len, self.ceiling)
        if q_len != self.q_len:
            return Refusal(RefusalReason.NO_SUCH_WIDTH, rows, q_len, self.ceiling)
        if rows > self.ceiling:
            return Refusal(RefusalReason.OVER_CEILING, rows, q_len, self.ceiling)
        return self.buckets[bisect_left(self._rows, rows)]

    def __repr__(self) -> str:
        return f"Ladder({self._rows})"


def _size(value: object, what: str = "a size") -> int:
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LadderError(f"{what} is an int, got {value!r}") from None
    if size < 1:
        raise LadderError(f"{what} is at least 1, got {size}")
    return size
