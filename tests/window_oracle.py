"""The FP8 window by another road: a table of e4m3's codes, dictionaries of whole histories.

Nothing here comes from the library, and nothing uses torch's float8.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _value_of(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = np.array([_value_of(code) for code in range(256)], dtype=np.float64)
"""Value of each of the 256 codes."""

MAGNITUDES = TABLE[:127]
"""Values of the codes without a sign, ascending, up to 448."""

MIDPOINTS = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
"""Where rounding changes from a code to the next; exact, also in float32."""


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Codes of finite float32 values within +-464, to nearest, ties to the even code."""
    magnitude = np.abs(values.astype(np.float64))
    lower = np.searchsorted(MIDPOINTS, magnitude, side="left")
    tie = (lower < 126) & (MIDPOINTS[np.minimum(lower, 125)] == magnitude)
    code = np.where(tie & (lower % 2 == 1), lower + 1, lower)
    return (code + 128 * np.signbit(values)).astype(np.uint8)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of finite float32 values rounded to bfloat16, ties to even, as uint16."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Encoded:
    """One token's row."""

    fp8: np.ndarray
    rope: np.ndarray
    inv: np.float32

    def decode(self) -> np.ndarray:
        scaled = TABLE[self.fp8].astype(np.float32) * self.inv
        return np.concatenate([scaled, from_bf16(self.rope)])


def encode(entry: np.ndarray, rope_dim: int) -> Encoded:
    """One finite float32 entry [d] as it must be stored."""
    body, rotated = entry[:-rope_dim].astype(np.float32), entry[-rope_dim:]
    inv = np.maximum(np.abs(body).max(), np.float32(1e-4)) / np.float32(448)
    scaled = np.clip(body / inv, np.float32(-448), np.float32(448))
    return Encoded(to_e4m3(scaled), to_bf16(rotated), np.float32(inv))


@dataclass
class Request:
    """What a slot has absorbed, and the marks that the rewind rule goes by."""

    length: int = 0
    high: int = 0
    floor: int = 0
    history: dict[int, Encoded] = field(default_factory=dict)
    promised: int | None = None
    """Rewinds to this length or further must be granted."""

    def copy(self) -> Request:
        return Request(self.length, self.high, self.floor, dict(self.history), self.promised)


class Memory:
    """Every byte of the window's fields, as the rules say they must be."""

    def __init__(self, slots: int, rows: int, width: int, rope_dim: int) -> None:
        self.rows, self.rope_dim = rows, rope_dim
        self.fp8 = np.zeros((slots, rows, width - rope_dim), np.uint8)
        self.rope = np.zeros((slots, rows, rope_dim), np.uint16)
        self.inv = np.ones((slots, rows), np.float32)
        self.pos = np.full((slots, rows), -1, np.int32)

    def write(self, slot: int, position: int, encoded: Encoded) -> None:
        row = position % self.rows
        self.fp8[slot, row] = encoded.fp8
        self.rope[slot, row] = encoded.rope
        self.inv[slot, row] = encoded.inv
        self.pos[slot, row] = position

    def write_run(self, slot: int, first: int, run: list[Encoded]) -> None:
        """Of a run longer than the ring only the last `rows` positions land."""
        for column in range(max(0, len(run) - self.rows), len(run)):
            self.write(slot, first + column, run[column])

    def copy_slot(self, source: int, target: int) -> None:
        for part in (self.fp8, self.rope, self.inv, self.pos):
            part[target] = part[source]
