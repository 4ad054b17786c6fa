"""What operations on entries share: how a kernel reads and writes rows of every format.

A layer's rows are `Rows` of [N, R, ...]: row r of slot or block n. The strides of the first two
axes are free, the last is contiguous, so that packed formats and arenas are read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SchemaError
from ..rows import Fp8TokenRow, Model1Row, PlainRow, Row, Rows
from ._triton import jit, tl

__all__ = [
    "PLAIN",
    "TILE",
    "TOKEN",
    "as_rows",
    "check_rows",
    "format_of",
    "gather",
    "normalise",
    "normed",
    "rotate",
    "rotated",
    "row_of_parts",
    "row_strides",
    "scatter",
    "store_row",
]

PLAIN = 0
"""Values as they are."""
TOKEN = 1
"""e4m3 with a float32 inverse scale a row."""
TILE = 2
"""e4m3 with a power of two for each 64 values, as its biased exponent."""


def format_of(rows: Rows) -> int:
    """Which of the three the rows are kept in."""
    if rows.scales is None:
        return PLAIN
    return TOKEN if rows.scales.dtype == torch.float32 else TILE


def row_of_parts(rows: Rows) -> Row:
    """The row format that these parts are of."""
    if rows.scales is None:
        return PlainRow(rows.values.shape[-1], rows.values.dtype)
    rope_dim = 0 if rows.rope is None else rows.rope.shape[-1]
    width = rows.values.shape[-1] + rope_dim
    if rows.scales.dtype == torch.float32:
        return Fp8TokenRow(width, rope_dim)
    return Model1Row(width, rope_dim)


def as_rows(parts: list[Tensor]) -> Rows:
    """Rows from their parts: values; values, scales; or values, rope, scales."""
    if len(parts) == 2:
        return Rows(parts[0], None, parts[1])
    return Rows(*parts)


def row_strides(rows: Rows) -> tuple[int, ...]:
    """Strides of values, rope and scales over the first two axes, in elements; 0 where absent."""
    strides: list[int] = []
    for part in rows:
        strides.extend((0, 0) if part is None else (part.stride(0), part.stride(1)))
    return tuple(strides)


def check_rows(operation: str, name: str, rows: Rows, width: int) -> None:
    """Refuse parts that are not rows of `width` dims; shapes and strides only."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise SchemaError(f"{operation}: {name} {message}")

    values = rows.values
    if rows.scales is None:
        require(
            values.dtype in (torch.float32, torch.bfloat16, torch.float16) and rows.rope is None,
            f"without scales are float32, bfloat16 or float16 values alone, got {values.dtype}",
        )
    else:
        require(values.dtype == torch.uint8, f"with scales are uint8 codes, got {values.dtype}")
        require(
            rows.rope is None or rows.rope.dtype == torch.bfloat16,
            "keep rotated dims in bfloat16",
        )
        require(
            rows.scales.dtype in (torch.float32, torch.uint8),
            f"have scales of float32 or uint8, got {rows.scales.dtype}",
        )
    rope_dim = 0 if rows.rope is None else rows.rope.shape[-1]
    require(
        values.dim() == 3 and values.shape[-1] + rope_dim == width,
        f"are [N, R, ...] of width {width}, got {list(values.shape)} and {rope_dim} rotated dims",
    )
    for part in rows.parts():
        require(
            part.shape[:2] == values.shape[:2]
            and (part.dim() == 2 or (part.dim() == 3 and part.stride(2) == 1)),
            f"are [N, R, ...] with a contiguous last axis, got {list(part.shape)} "
            f"with strides {list(part.stride())}",
        )


@jit
def normalise(vector, weight, lane, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMS norm of a float32 vector that is 0 beyond WIDTH: x / sqrt(mean(x^2) + eps) * weight."""
    mean = tl.sum(vector * vector, axis=0) / WIDTH
    gain = tl.load(weight + lane, mask=lane < WIDTH, other=0).to(tl.float32)
    return vector * (1.0 / tl.sqrt_rn(mean + eps)) * gain


@jit
def rotate(  # type: ignore[no-untyped-def]
    vector, cos, sin, WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate the last ROPE_DIM of WIDTH dims, in neighbouring pairs.

    Args:
        vector: [BLOCK] float32.
        cos, sin: pointers to the pairs' [ROPE_DIM / 2] float32.
    """
    pair = tl.arange(0, BLOCK // 2) - (WIDTH - ROPE_DIM) // 2
    turned = (pair >= 0) & (pair < ROPE_DIM // 2)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    even, odd = tl.split(tl.reshape(vector, [BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), [BLOCK])


@jit
def _codes_of(value, finite):  # type: ignore[no-untyped-def]
    """e4m3 codes to nearest even; 0x7F where not finite.

    A cast may keep a NaN's sign, so NaNs are made positive before it. Not after: ptxas 12.8 loses
    every second code when selections between codes follow a conversion of two.
    """
    value = tl.where(finite, value, float("nan"))
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@jit
def _divided(value, scale):  # type: ignore[no-untyped-def]
    """value / scale, near enough that its e4m3 code is the true quotient's.

    Without a division's slow path for every element: the reciprocal, then one exact remainder. An
    exhaustive search (every mantissa of the scale, every boundary between two codes, 4 ulp to each
    side) finds no code that differs from the true division's. Signs are placed so that -0 stays
    -0. No clamp: the quotient is below 448.0001, which rounds to 448.
    """
    reciprocal = tl.div_rn(1.0, scale)
    quotient = value * reciprocal
    return tl.fma(tl.fma(quotient, scale, -value), -reciprocal, quotient)


@jit
def store_row(  # type: ignore[no-untyped-def]
    vector,
    lane,
    values,
    rope,
    scales,
    write,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Encode a float32 vector and store it; the same bits as the row's `encode`.

    Args:
        vector: [BLOCK] float32, 0 beyond WIDTH.
        values, rope, scales: pointers to the row's parts.
        write: scalar; nothing is stored without it.
        ROPE_DIM: dims kept in bfloat16; of no meaning for a plain format.
    """
    if FORMAT == 0:
        tl.store(values + lane, vector.to(values.dtype.element_ty), mask=write & (lane < WIDTH))
    else:
        CODES: tl.constexpr = WIDTH - ROPE_DIM
        if ROPE_DIM > 0:
            kept = write & (lane >= CODES) & (lane < WIDTH)
            tl.store(rope + lane - CODES, vector.to(tl.bfloat16), mask=kept)
        coded = lane < CODES
        # Magnitudes are compared as integers: same order, NaN on top, one instruction a warp.
        bits = tl.where(coded, vector.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        if FORMAT == 1:
            top = tl.max(bits, axis=0)
            amax = tl.maximum(top.to(tl.float32, bitcast=True), 1e-4)
            finite = top < 0x7F800000
            scale = tl.where(finite, tl.div_rn(amax, 448.0), float("nan"))
            tl.store(scales, scale, mask=write)
            code = _codes_of(_divided(vector, scale), finite)
        else:
            tops = tl.max(tl.reshape(bits, [BLOCK // 64, 64]), axis=1)
            least = tl.maximum(tl.div_rn(tops.to(tl.float32, bitcast=True), 448.0), 1e-4)
            ratio = least.to(tl.int32, bitcast=True)
            exponent = (ratio >> 23) + tl.where((ratio & 0x7FFFFF) != 0, 1, 0)
            exponent = tl.where(tops < 0x7F800000, exponent, 0xFF)
            tile = tl.arange(0, BLOCK // 64)
            tl.store(scales + tile, exponent.to(tl.uint8), mask=write & (tile < CODES // 64))
            # A division by a power of two is exact.
            down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            tiled = tl.reshape(vector, [BLOCK // 64, 64]) * down[:, None]
            code = tl.reshape(_codes_of(tiled, (tops < 0x7F800000)[:, None]), [BLOCK])
        tl.store(values + lane, code, mask=write & coded)


def gather(rows: Rows, place: Tensor | int, row: Tensor) -> Rows:
    """Rows `row` of slots or blocks `place`, as copies; for references."""
    return rows.map(lambda part: part[place, row])


def scatter(rows: Rows, place: Tensor, row: Tensor, encoded: Rows) -> None:
    """Write encoded rows to rows `row` of slots or blocks `place`; for references."""
    for target, source in zip(rows.parts(), encoded.parts(), strict=True):
        target[place, row] = source


def normed(vectors: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of [..., D] float32, weighted; for references."""
    mean = vectors.square().mean(-1, keepdim=True)
    return vectors / (mean + eps).sqrt() * weight.float()


def rotated(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., D] with its last dims rotated in neighbouring pairs; for references."""
    width = 2 * cos.shape[-1]
    even, odd = vectors[..., -width::2], vectors[..., -width + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((vectors[..., :-width], turned), -1)
