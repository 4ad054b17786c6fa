"""How one token's values lie in memory: row formats, their bytes, and both directions in torch.

A format says which fields a ring or block of such rows has, and encodes and decodes rows on any
device. Kernels that write rows must give the same bits as `encode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .errors import SchemaError
from .pool import Field

__all__ = [
    "E4M3_MAX",
    "E4M3_NAN",
    "MIN_AMAX",
    "Fp8TokenRow",
    "Fp8TokenRows",
    "PlainRow",
]

E4M3_MAX: Final = 448.0
"""Largest finite value of e4m3 (float8_e4m3fn)."""

E4M3_NAN: Final = 0x7F
"""The code a value that is not a number is stored as."""

MIN_AMAX: Final = 1e-4
"""Smallest row maximum that the scale follows: a row of zeros must not divide by zero."""


def _check_width(values: Tensor, width: int) -> None:
    if values.shape[-1] != width:
        raise SchemaError(f"rows of width {width} expected, got shape {tuple(values.shape)}")


@dataclass(frozen=True)
class PlainRow:
    """Values as they are, in one dtype.

    Args:
        width: values of a row.
        dtype: float32, bfloat16 or float16.

    Raises:
        SchemaError: for an empty row or another dtype.
    """

    width: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.width < 1:
            raise SchemaError(f"a row needs at least one value, got width={self.width}")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SchemaError(f"dtype is float32, bfloat16 or float16, got {self.dtype}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize

    def fields(self, name: str, rows: int) -> tuple[Field, ...]:
        """`rows` rows for each row of a pool: the one field `name` [rows, width]."""
        return (Field(name, (rows, self.width), self.dtype),)

    def encode(self, values: Tensor) -> Tensor:
        """[..., width] of any of the dtypes -> [..., width] in the row's, rounded to nearest even.

        Raises:
            SchemaError: for another width or for float64.
        """
        _check_width(values, self.width)
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SchemaError(f"values are float32, bfloat16 or float16, got {values.dtype}")
        return values.to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        """[..., width] in the row's dtype -> [..., width] float32, exactly."""
        _check_width(stored, self.width)
        return stored.float()


class Fp8TokenRows(NamedTuple):
    """Encoded rows: fp8 [..., width - rope_dim] uint8, rope [..., rope_dim] bf16, inv [...] f32."""

    fp8: Tensor
    rope: Tensor
    inv: Tensor


@dataclass(frozen=True)
class Fp8TokenRow:
    """e4m3 values with one float32 inverse scale a token, and a rotated part in bf16.

    With x the first `width - rope_dim` values and amax their largest magnitude, in float32:

        inv = max(amax, 1e-4) / 448         value stored = e4m3(clamp(x / inv, -448, 448))

    both divisions and the cast rounded to nearest even; a value is read as `e4m3 * inv`. A row with
    a NaN or an infinity in that part has inv = NaN and every code 0x7F (NaN): it can't pass for a
    finite row.

    Args:
        width: values of a row, the rotated ones included.
        rope_dim: the last values, kept in bf16.

    Raises:
        SchemaError: when either part would be empty.
    """

    width: int
    rope_dim: int

    def __post_init__(self) -> None:
        if not 0 < self.rope_dim < self.width:
            raise SchemaError(
                f"rope_dim must lie between 0 and width={self.width}, got {self.rope_dim}"
            )

    @property
    def fp8_dim(self) -> int:
        """Values kept in e4m3."""
        return self.width - self.rope_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: its codes, its bf16 part and its inverse scale."""
        return self.fp8_dim + 2 * self.rope_dim + 4

    def fields(self, name: str, rows: int) -> tuple[Field, ...]:
        """`rows` rows for each row of a pool: `name`_fp8, `name`_rope and `name`_inv."""
        return (
            Field(f"{name}_fp8", (rows, self.fp8_dim), torch.uint8),
            Field(f"{name}_rope", (rows, self.rope_dim), torch.bfloat16),
            Field(f"{name}_inv", (rows,), torch.float32, initial=1),
        )

    def encode(self, entries: Tensor) -> Fp8TokenRows:
        """[..., width] float32 or bfloat16 -> rows. Allocates; doesn't synchronize.

        Raises:
            SchemaError: for another width or dtype.
        """
        _check_width(entries, self.width)
        if entries.dtype not in (torch.float32, torch.bfloat16):
            raise SchemaError(f"entries are float32 or bfloat16, got {entries.dtype}")
        values = entries[..., : self.fp8_dim].float()
        amax = values.abs().amax(-1)
        finite = torch.isfinite(amax)
        inv = (amax.clamp(min=MIN_AMAX) / E4M3_MAX).masked_fill(~finite, torch.nan)
        scaled = (values / inv.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        # A cast may give a NaN either sign.
        codes = codes.masked_fill(~finite.unsqueeze(-1), E4M3_NAN)
        return Fp8TokenRows(codes, entries[..., self.fp8_dim :].bfloat16(), inv)

    def decode(self, rows: Fp8TokenRows) -> Tensor:
        """Rows -> [..., width] float32. Allocates; doesn't synchronize."""
        _check_width(rows.fp8, self.fp8_dim)
        _check_width(rows.rope, self.rope_dim)
        values = rows.fp8.view(torch.float8_e4m3fn).float() * rows.inv.unsqueeze(-1)
        return torch.cat([values, rows.rope.float()], dim=-1)
