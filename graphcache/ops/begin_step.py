"""The first node of a step: which of the requested slots run, at which positions, on which tokens.

The host sends slot ids and nothing else; everything a step needs to know of them is read here, on
the device. A slot that has finished, or has no room left, becomes padding: slot -1, position 0,
token 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._triton import jit_for_any, tl

__all__ = ["begin_step"]

SHORT_BLOCK = 16
LONG_BLOCK = 1024


def _reference(
    requested: Tensor, length: Tensor, done: Tensor, tokens: Tensor, q_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    scratch, context = length.shape[0] - 1, tokens.shape[1]
    asked = requested.reshape(-1, q_len)
    row = torch.where(asked < 0, scratch, asked).long()
    position = length[row] + torch.arange(q_len, dtype=torch.int32)
    fit = (asked >= 0) & (done[row] == 0) & (position < context)
    active = fit.cumprod(1).bool()
    token = tokens[row, position.clamp(max=context - 1).long()]
    return (
        torch.where(active, asked, -1).reshape(-1),
        torch.where(active, position, 0).reshape(-1),
        torch.where(active, token, 0).reshape(-1),
    )


@jit_for_any("q_len")
def _begin_step_kernel(  # type: ignore[no-untyped-def]
    requested_ptr,
    length_ptr,
    done_ptr,
    tokens_ptr,
    slots_ptr,
    positions_ptr,
    out_tokens_ptr,
    q_len,
    context,
    length_stride,
    done_stride,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """One program a row. A run ends at its first column that can't run."""
    base = tl.program_id(0).to(tl.int64) * q_len
    run = q_len
    start = 0
    # Not a range: Triton 3.6 interprets none with a run-time bound under numpy 2.4.
    while start < q_len:
        column = start + tl.arange(0, BLOCK)
        inside = column < q_len
        asked = tl.load(requested_ptr + base + column, mask=inside, other=-1)
        real = asked >= 0
        row = tl.where(real, asked, 0).to(tl.int64)
        length = tl.load(length_ptr + row * length_stride, mask=real, other=0)
        done = tl.load(done_ptr + row * done_stride, mask=real, other=1)
        position = length + column
        fit = real & (done == 0) & (position < context)
        run = tl.minimum(run, tl.min(tl.where(fit, q_len, column), axis=0))
        active = column < run
        token = tl.load(tokens_ptr + row * tokens_stride + position, mask=active, other=0)
        tl.store(slots_ptr + base + column, tl.where(active, asked, -1), mask=inside)
        tl.store(positions_ptr + base + column, tl.where(active, position, 0), mask=inside)
        tl.store(out_tokens_ptr + base + column, token, mask=inside)
        start += BLOCK


def _launch(
    requested: Tensor, length: Tensor, done: Tensor, tokens: Tensor, q_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    slots, positions, out = (torch.empty_like(requested) for _ in range(3))
    short = q_len <= SHORT_BLOCK
    rows = requested.shape[0] // q_len
    if rows:
        _begin_step_kernel[(rows,)](
            requested,
            length,
            done,
            tokens,
            slots,
            positions,
            out,
            q_len,
            tokens.shape[1],
            length.stride(0),
            done.stride(0),
            tokens.stride(0),
            BLOCK=SHORT_BLOCK if short else LONG_BLOCK,
            num_warps=1 if short else 4,
        )
    return slots, positions, out


def _fake(
    requested: Tensor, length: Tensor, done: Tensor, tokens: Tensor, q_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(requested),
        torch.empty_like(requested),
        torch.empty_like(requested),
    )


_op = register(
    "begin_step(Tensor requested, Tensor length, Tensor done, Tensor tokens, int q_len)"
    " -> (Tensor, Tensor, Tensor)",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def begin_step(
    requested: Tensor, length: Tensor, done: Tensor, tokens: Tensor, q_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn requested slots into the step's slots, positions and tokens. One node.

    Column c of a row runs at position `length[slot] + c` iff its slot is not -1 and not done, that
    position is below the context, and every earlier column of the row runs. Writes nothing but its
    outputs; runs on the current stream without synchronizing.

    Args:
        requested: [T] int32, contiguous; T = rows x q_len, row-major; -1 for padding. Every other
            value must be a row of the pool: it is not checked.
        length: [S1] int32 by slot, any stride: tokens absorbed.
        done: [S1] int32 by slot, any stride: 0 while running.
        tokens: [S1, C] int32 by slot, any stride between slots: the request's tokens.
        q_len: tokens a row.

    Returns:
        slots [T], positions [T] and tokens [T], int32; -1, 0 and 0 where nothing runs.

    Raises:
        SchemaError: for other dtypes or shapes.
    """
    for name, tensor in (
        ("requested", requested),
        ("length", length),
        ("done", done),
        ("tokens", tokens),
    ):
        if tensor.dtype != torch.int32:
            raise SchemaError(f"begin_step: {name} must be int32, got {tensor.dtype}")
    if q_len < 1 or requested.dim() != 1 or requested.shape[0] % q_len:
        raise SchemaError(
            f"begin_step: requested must be [rows * q_len] with q_len={q_len}, "
            f"got {list(requested.shape)}"
        )
    if tokens.dim() != 2 or length.shape != tokens.shape[:1] or done.shape != length.shape:
        raise SchemaError(
            "begin_step: length and done must be [S1] and tokens [S1, C], got "
            f"{list(length.shape)}, {list(done.shape)} and {list(tokens.shape)}"
        )
    if tokens.stride(1) != 1 or not requested.is_contiguous():
        raise SchemaError("begin_step: requested and the rows of tokens must be contiguous")
    result: tuple[Any, Any, Any] = _op(requested, length, done, tokens, q_len)
    return result
