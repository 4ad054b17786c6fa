"""How one token's values lie in memory: row formats, their bytes, and both directions in torch.

A format says which fields a ring or block of such rows has, and encodes and decodes rows on any
device. Kernels that write rows must give the same bits as `encode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .errors import SchemaError
from .pool import Field, StatePool

__all__ = [
    "E4M3_MAX",
    "E4M3_NAN",
    "MIN_AMAX",
    "Fp8TokenRow",
    "Model1Row",
    "PlainRow",
    "Row",
    "RowFormat",
    "Rows",
    "row_of",
]

E4M3_MAX: Final = 448.0
"""Largest finite value of e4m3 (float8_e4m3fn)."""

E4M3_NAN: Final = 0x7F
"""The code a value that is not a number is stored as."""

MIN_AMAX: Final = 1e-4
"""Smallest row maximum that the scale follows: a row of zeros must not divide by zero."""


MODEL1_TILE: Final = 64
"""Values that share a scale in a MODEL1 row."""


class RowFormat(Enum):
    """How an entry is kept."""

    FP8 = "fp8"
    """e4m3 with one float32 inverse scale a token, rotated dims in bf16 (`Fp8TokenRow`)."""
    MODEL1 = "model1"
    """FlashMLA's row: e4m3 with a power of two for each 64 values (`Model1Row`)."""
    BF16 = "bf16"
    """bfloat16 throughout."""
    FP32 = "fp32"
    """float32 throughout: four times the bytes, for comparisons."""


class Rows(NamedTuple):
    """Encoded rows, or where they lie: the parts that a format has, None for the others.

    Attributes:
        values: [..., rows, n], the dims that carry no position, in the format's codes; all dims
            of a plain format.
        rope: [..., rows, rope_dim] bfloat16, the rotated dims of a quantised format.
        scales: [..., rows] float32 (`Fp8TokenRow`) or [..., rows, tiles] uint8 (`Model1Row`).
    """

    values: Tensor
    rope: Tensor | None = None
    scales: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """The parts there are, in this order."""
        return [part for part in self if part is not None]

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """Rows of what `function` makes of each part."""
        values, rope, scales = (part if part is None else function(part) for part in self)
        assert values is not None
        return Rows(values, rope, scales)


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

    def view(self, pool: StatePool, name: str, rows: int) -> Rows:
        """The rows that `fields(name, rows)` laid out in a pool, for all of its rows."""
        return Rows(pool[name])

    def encode(self, values: Tensor) -> Rows:
        """[..., width] of any of the dtypes -> [..., width] in the row's, rounded to nearest even.

        Raises:
            SchemaError: for another width or for float64.
        """
        _check_width(values, self.width)
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise SchemaError(f"values are float32, bfloat16 or float16, got {values.dtype}")
        return Rows(values.to(self.dtype))

    def decode(self, rows: Rows) -> Tensor:
        """[..., width] in the row's dtype -> [..., width] float32, exactly."""
        _check_width(rows.values, self.width)
        return rows.values.float()


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
        rope_dim: the last values, kept in bf16; 0 where all are quantised.

    Raises:
        SchemaError: when the quantised part would be empty.
    """

    width: int
    rope_dim: int

    def __post_init__(self) -> None:
        if not 0 <= self.rope_dim < self.width:
            raise SchemaError(
                f"rope_dim must lie in 0..{self.width - 1} for width={self.width}, "
                f"got {self.rope_dim}"
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
        rope = Field(f"{name}_rope", (rows, max(1, self.rope_dim)), torch.bfloat16)
        return (
            Field(f"{name}_fp8", (rows, self.fp8_dim), torch.uint8),
            *((rope,) if self.rope_dim else ()),
            Field(f"{name}_inv", (rows,), torch.float32, initial=1),
        )

    def view(self, pool: StatePool, name: str, rows: int) -> Rows:
        """The rows that `fields(name, rows)` laid out in a pool, for all of its rows."""
        rope = pool[f"{name}_rope"] if self.rope_dim else None
        return Rows(pool[f"{name}_fp8"], rope, pool[f"{name}_inv"])

    def encode(self, entries: Tensor) -> Rows:
        """[..., width] float32 or bfloat16 -> rows. Allocates; doesn't synchronize.

        Raises:
            SchemaError: for another width or dtype.
        """
        values = _quantised_part(entries, self.width, self.fp8_dim)
        amax = values.abs().amax(-1)
        finite = torch.isfinite(amax)
        inv = (amax.clamp(min=MIN_AMAX) / E4M3_MAX).masked_fill(~finite, torch.nan)
        scaled = (values / inv.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        # A cast may give a NaN either sign.
        codes = codes.masked_fill(~finite.unsqueeze(-1), E4M3_NAN)
        rope = entries[..., self.fp8_dim :].bfloat16() if self.rope_dim else None
        return Rows(codes, rope, inv)

    def decode(self, rows: Rows) -> Tensor:
        """Rows -> [..., width] float32. Allocates; doesn't synchronize."""
        _check_width(rows.values, self.fp8_dim)
        assert rows.scales is not None
        values = _e4m3(rows.values) * rows.scales.unsqueeze(-1)
        if rows.rope is None:
            return values
        _check_width(rows.rope, self.rope_dim)
        return torch.cat([values, rows.rope.float()], dim=-1)


@dataclass(frozen=True)
class Model1Row:
    """FlashMLA's MODEL1 row of 584 bytes: 448 e4m3, 64 bf16, 7 scales E8M0, 1 byte unused.

    The scale of each 64 values is a power of two, kept as its biased exponent:

        scale = 2 ** ceil(log2(max(amax / 448, 1e-4)))          value stored = e4m3(x / scale)

    A value is read as `e4m3 * scale`, exactly, in bf16 too. Rows lie in blocks as FlashMLA's
    kernels read them: of a block of n rows, n x 576 bytes with codes and rotated values, then
    n x 8 bytes with scales, the whole padded to a multiple of 576. A tile with a NaN or an
    infinity has the scale 0xFF (NaN) and every code 0x7F.

    Args:
        width: 512.
        rope_dim: 64.

    Raises:
        SchemaError: for other dims: the layout is defined for these alone.
    """

    width: int = 512
    rope_dim: int = 64

    def __post_init__(self) -> None:
        if (self.width, self.rope_dim) != (512, 64):
            raise SchemaError(
                "the MODEL1 row is defined for entries of 512 with 64 rotated dims, "
                f"got {self.width} and {self.rope_dim}"
            )

    @property
    def fp8_dim(self) -> int:
        """Values kept in e4m3."""
        return self.width - self.rope_dim

    @property
    def tiles(self) -> int:
        """Scales of a row."""
        return self.fp8_dim // MODEL1_TILE

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a block's padding not counted."""
        return self._data_bytes + self._scale_bytes

    @property
    def _data_bytes(self) -> int:
        return self.fp8_dim + 2 * self.rope_dim

    @property
    def _scale_bytes(self) -> int:
        return self.tiles + 1

    def block_bytes(self, rows: int) -> int:
        """Bytes of a block of `rows` rows, padding included."""
        return -(-rows * self.row_bytes // self._data_bytes) * self._data_bytes

    def fields(self, name: str, rows: int) -> tuple[Field, ...]:
        """`rows` rows for each row of a pool: the one field `name`_packed, a block of bytes."""
        return (Field(f"{name}_packed", (self.block_bytes(rows),), torch.uint8),)

    def view(self, pool: StatePool, name: str, rows: int) -> Rows:
        """The rows that `fields(name, rows)` laid out in a pool, for all of its rows."""
        return self.view_of(pool[f"{name}_packed"], rows)

    def view_of(self, packed: Tensor, rows: int) -> Rows:
        """The rows in blocks [N, block_bytes(rows)] uint8: strided views, nothing is copied."""
        split = rows * self._data_bytes
        data = packed[:, :split].unflatten(1, (rows, self._data_bytes))
        scales = packed[:, split : split + rows * self._scale_bytes]
        return Rows(
            data[..., : self.fp8_dim],
            data[..., self.fp8_dim :].view(torch.bfloat16),
            scales.unflatten(1, (rows, self._scale_bytes))[..., : self.tiles],
        )

    def encode(self, entries: Tensor) -> Rows:
        """[..., 512] float32 or bfloat16 -> rows. Allocates; doesn't synchronize.

        Raises:
            SchemaError: for another width or dtype.
        """
        values = _quantised_part(entries, self.width, self.fp8_dim)
        tiled = values.unflatten(-1, (self.tiles, MODEL1_TILE))
        amax = tiled.abs().amax(-1)
        finite = torch.isfinite(amax)
        bits = (amax / E4M3_MAX).clamp(min=MIN_AMAX).view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
        exponent = exponent.masked_fill(~finite, 0xFF)
        codes = (tiled / _e8m0(exponent).unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = codes.masked_fill(~finite.unsqueeze(-1), E4M3_NAN)
        rope = entries[..., self.fp8_dim :].bfloat16()
        return Rows(codes.flatten(-2), rope, exponent.to(torch.uint8))

    def decode(self, rows: Rows) -> Tensor:
        """Rows -> [..., 512] float32. Allocates; doesn't synchronize."""
        _check_width(rows.values, self.fp8_dim)
        assert rows.scales is not None and rows.rope is not None
        tiled = _e4m3(rows.values).unflatten(-1, (self.tiles, MODEL1_TILE))
        values = tiled * _e8m0(rows.scales.int()).unsqueeze(-1)
        return torch.cat([values.flatten(-2), rows.rope.float()], dim=-1)


Row: TypeAlias = PlainRow | Fp8TokenRow | Model1Row


def row_of(row_format: RowFormat, width: int, rope_dim: int) -> Row:
    """The row of a format, for entries of `width` whose last `rope_dim` dims are rotated.

    Raises:
        SchemaError: when the format has no such row, or is none.
    """
    if not isinstance(row_format, RowFormat):
        names = ", ".join(f"RowFormat.{each.name}" for each in RowFormat)
        raise SchemaError(f"row_format is one of {names}, got {row_format!r}")
    if row_format is RowFormat.FP8:
        return Fp8TokenRow(width, rope_dim)
    if row_format is RowFormat.MODEL1:
        return Model1Row(width, rope_dim)
    return PlainRow(width, torch.bfloat16 if row_format is RowFormat.BF16 else torch.float32)


def _quantised_part(entries: Tensor, width: int, fp8_dim: int) -> Tensor:
    _check_width(entries, width)
    if entries.dtype not in (torch.float32, torch.bfloat16):
        raise SchemaError(f"entries are float32 or bfloat16, got {entries.dtype}")
    return entries[..., :fp8_dim].float()


def _e4m3(codes: Tensor) -> Tensor:
    # A copy first: a dtype's view needs strides that a slice of packed rows may not have.
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def _e8m0(exponent: Tensor) -> Tensor:
    """The float32 of a biased exponent; 0xFF, a NaN, becomes an infinity."""
    return (exponent.int() << 23).view(torch.float32)
