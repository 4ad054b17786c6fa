"""Quantise entries and write them into a sliding-window ring, with their tags: one kernel.

Padding (slot -1) writes nothing. Position p of a slot lands in row `p % rows`; of a run that is
longer than the ring only the last `rows` positions are written, so no row is written twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ..rows import Fp8TokenRow
from ._library import register
from ._triton import jit_for_any, tl, triton

__all__ = ["window_append"]


def _reference(
    entries: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv: Tensor,
    swa_pos: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    ring_rows = swa_pos.shape[1]
    written = slots >= 0
    if q_len > ring_rows:
        by_row = slots.view(-1, q_len)
        written.view(-1, q_len)[:, :-ring_rows] &= by_row[:, ring_rows:] < 0
    tokens = written.nonzero().squeeze(1)
    slot, position = slots[tokens].long(), positions[tokens].long()
    row = position % ring_rows
    encoded = Fp8TokenRow(entries.shape[1], swa_rope.shape[2]).encode(entries[tokens])
    swa_fp8[slot, row] = encoded.fp8
    swa_rope[slot, row] = encoded.rope
    swa_inv[slot, row] = encoded.inv
    swa_pos[slot, row] = position.int()


@jit_for_any("q_len")
def _window_append_kernel(  # type: ignore[no-untyped-def]
    entries,
    swa_fp8,
    swa_rope,
    swa_inv,
    swa_pos,
    slots,
    positions,
    q_len,
    entry_stride,
    fp8_stride,
    rope_stride,
    inv_stride,
    pos_stride,
    RING_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    FP8_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    OUTRUNS: tl.constexpr,
):
    FP8_DIM: tl.constexpr = WIDTH - ROPE_DIM
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    # Not predicated on the slot: all loads are in flight together.
    entry = entries + token.to(tl.int64) * entry_stride
    lane, rope_lane = tl.arange(0, FP8_BLOCK), tl.arange(0, ROPE_BLOCK)
    value = tl.load(entry + lane, mask=lane < FP8_DIM, other=0).to(tl.float32)
    rotated = tl.load(entry + FP8_DIM + rope_lane, mask=rope_lane < ROPE_DIM, other=0)

    write = slot >= 0
    if OUTRUNS:
        goes_on = write & (token % q_len + RING_ROWS < q_len)
        write = write & (tl.load(slots + token + RING_ROWS, mask=goes_on, other=-1) < 0)
    row = position % RING_ROWS
    slot = slot.to(tl.int64)
    tl.store(swa_pos + slot * pos_stride + row, position, mask=write)
    rope_at = swa_rope + slot * rope_stride + row * ROPE_DIM + rope_lane
    tl.store(rope_at, rotated.to(tl.bfloat16), mask=write & (rope_lane < ROPE_DIM))

    # Magnitudes are compared as integers: same order, NaN on top, and one instruction a warp.
    amax_bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), 1e-4)
    inv = tl.where(amax_bits < 0x7F800000, tl.div_rn(amax, 448.0), float("nan"))
    tl.store(swa_inv + slot * inv_stride + row, inv, mask=write)

    # value / inv without a division's slow path for every element: the reciprocal, then one exact
    # remainder. An exhaustive search (every mantissa of inv, every boundary between two codes, 4
    # ulp to each side) finds no code that differs from the true division's. Signs are placed so
    # that -0 stays -0. No clamp: the quotient is below 448.0001, which rounds to 448.
    scale = tl.div_rn(1.0, inv)
    quotient = value * scale
    quotient = tl.fma(tl.fma(quotient, inv, -value), -scale, quotient)
    code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    fp8_at = swa_fp8 + slot * fp8_stride + row * FP8_DIM + lane
    tl.store(fp8_at, code, mask=write & (lane < FP8_DIM))


def _launch(
    entries: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv: Tensor,
    swa_pos: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    tokens, width = entries.shape
    if not tokens:
        return
    ring_rows = swa_pos.shape[1]
    fp8_dim, rope_dim = swa_fp8.shape[2], swa_rope.shape[2]
    kernel: Any = _window_append_kernel
    kernel[(tokens,)](
        entries,
        swa_fp8,
        swa_rope,
        swa_inv,
        swa_pos,
        slots,
        positions,
        q_len,
        entries.stride(0),
        swa_fp8.stride(0),
        swa_rope.stride(0),
        swa_inv.stride(0),
        swa_pos.stride(0),
        RING_ROWS=ring_rows,
        WIDTH=width,
        ROPE_DIM=rope_dim,
        FP8_BLOCK=triton.next_power_of_2(fp8_dim),
        ROPE_BLOCK=triton.next_power_of_2(rope_dim),
        OUTRUNS=q_len > ring_rows,
        num_warps=max(1, fp8_dim // 512),
    )


def _fake(
    entries: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv: Tensor,
    swa_pos: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    return None


_op = register(
    "window_append(Tensor entries, Tensor(a!) swa_fp8, Tensor(b!) swa_rope, Tensor(c!) swa_inv, "
    "Tensor(d!) swa_pos, Tensor slots, Tensor positions, int q_len) -> ()",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"window_append: {message}")


def _check_state(swa_fp8: Tensor, swa_rope: Tensor, swa_inv: Tensor, swa_pos: Tensor) -> None:
    dtypes = (swa_fp8.dtype, swa_rope.dtype, swa_inv.dtype, swa_pos.dtype)
    _require(
        dtypes == (torch.uint8, torch.bfloat16, torch.float32, torch.int32),
        f"state is uint8, bfloat16, float32 and int32, got {dtypes}",
    )
    dims = (swa_fp8.dim(), swa_rope.dim(), swa_inv.dim(), swa_pos.dim())
    _require(
        dims == (3, 3, 2, 2),
        f"state tensors have 3, 3, 2 and 2 axes (slots, rows, ...), got {dims}",
    )
    for part in (swa_fp8, swa_rope, swa_inv, swa_pos):
        within_slot = (part.shape[2], 1) if part.dim() == 3 else (1,)
        _require(
            part.shape[:2] == swa_pos.shape and part.stride()[1:] == within_slot,
            f"state tensors are {tuple(swa_pos.shape)} slots and rows, contiguous within a slot, "
            f"got shape {tuple(part.shape)} and strides {part.stride()}",
        )


def window_append(
    entries: Tensor,
    swa_fp8: Tensor,
    swa_rope: Tensor,
    swa_inv: Tensor,
    swa_pos: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
) -> None:
    """Quantise entries and write them, their scales and their tags into the window's ring.

    An entry is stored as `Fp8TokenRow` says: the first D - r values in e4m3 with one inverse scale,
    `max(amax, 1e-4) / 448`, the last r in bf16. Kernel and reference give the same bits wherever
    the last r values are not NaN. One kernel, one node; current stream; no synchronization, no
    allocation; can be captured. A token's bits don't depend on the batch around it.

    Args:
        entries: [T, D] float32 or bfloat16, K/V entries, rotated; any row stride.
        swa_fp8: [S1, R, D - r] uint8, written: e4m3 codes.
        swa_rope: [S1, R, r] bfloat16, written.
        swa_inv: [S1, R] float32, written.
        swa_pos: [S1, R] int32, written: the position each row holds.
        slots: [T] int32, -1 for padding, which writes nothing and may hold NaN.
        positions: [T] int32.
        q_len: tokens a row; T is a multiple of it. Of a run longer than R the last R are written.

    State tensors may have any stride between slots (64-bit offsets) and are contiguous within one.

    Raises:
        SchemaError: for shapes, dtypes or strides other than these, before anything is written.
    """
    _check_state(swa_fp8, swa_rope, swa_inv, swa_pos)
    _require(
        entries.dtype in (torch.float32, torch.bfloat16),
        f"entries are float32 or bfloat16, got {entries.dtype}",
    )
    width = swa_fp8.shape[2] + swa_rope.shape[2]
    _require(
        entries.dim() == 2 and entries.shape[1] == width and entries.stride(1) == 1,
        f"entries are [tokens, {width}] with a contiguous last axis, "
        f"got shape {tuple(entries.shape)} and strides {entries.stride()}",
    )
    for name, index in (("slots", slots), ("positions", positions)):
        _require(
            index.dtype == torch.int32
            and index.shape == entries.shape[:1]
            and index.is_contiguous(),
            f"{name} must be [{entries.shape[0]}] int32, contiguous, "
            f"got {tuple(index.shape)} {index.dtype}",
        )
    _require(
        q_len >= 1 and entries.shape[0] % q_len == 0,
        f"{entries.shape[0]} tokens don't make whole rows of q_len={q_len}",
    )
    _op(entries, swa_fp8, swa_rope, swa_inv, swa_pos, slots, positions, q_len)
