"""The last node of a step: take the tokens that were sampled, and decide who has finished.

A row emits its accepted tokens up to the first that ends its request, by a stop token, the
context's end, its budget, or logits that were not finite. Padding rows change nothing and emit -1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ..finish import FinishReason
from ._library import register
from ._triton import jit_for_any, tl, triton

__all__ = ["advance"]

STOP_TOKENS = 8
MIN_BLOCK = 16

_STOP = int(FinishReason.STOP)
_LENGTH = int(FinishReason.LENGTH)
_CONTEXT = int(FinishReason.CONTEXT)
_NOT_FINITE = int(FinishReason.NOT_FINITE)


def _reference(
    sampled: Tensor,
    accepted: Tensor | None,
    requested: Tensor,
    slots: Tensor,
    q_len: int,
    length: Tensor,
    high: Tensor,
    done: Tensor,
    tokens: Tensor,
    limit: Tensor,
    stop: Tensor,
    vocab_size: int,
    derived: Tensor | None,
    modulus: Tensor | None,
) -> tuple[Tensor, Tensor]:
    emitted = torch.full_like(requested, -1)
    reasons = requested.new_zeros(requested.shape[0] // q_len)
    asked = requested.reshape(-1, q_len)[:, 0].long()
    column = torch.arange(q_len)
    run = (slots.reshape(-1, q_len) >= 0).cumprod(1).sum(1)

    live = ((asked >= 0) & (run > 0)).nonzero().squeeze(1)
    slot, run = asked[live], run[live]
    old = length[slot].long()
    taken = run if accepted is None else torch.minimum(accepted[live].long().clamp(min=0), run)

    token = sampled.reshape(-1, q_len)[live].long()
    total = old[:, None] + column + 2
    reason = torch.zeros_like(token)
    reason = torch.where(total >= limit[slot][:, None], _LENGTH, reason)
    reason = torch.where(total >= tokens.shape[1], _CONTEXT, reason)
    stopped = (token[:, :, None] == stop[slot][:, None, :]).any(2)
    reason = torch.where(stopped, _STOP, reason)
    invalid = (token < 0) | (token >= vocab_size)
    reason = torch.where(invalid, _NOT_FINITE, reason)
    reason = torch.where(column < taken[:, None], reason, 0)

    ended_before = (reason != 0).long().cumsum(1) - (reason != 0).long() > 0
    emits = (column < taken[:, None]) & ~ended_before & ~invalid
    new = old + emits.sum(1)
    first = torch.where(ended_before, 0, reason).sum(1)

    target = old[:, None] + 1 + column
    line, place = (emits & (target < tokens.shape[1])).nonzero(as_tuple=True)
    tokens[slot[line], target[line, place]] = token[line, place].int()
    length[slot] = new.int()
    high[slot] = torch.maximum(high[slot], (old + run).int())
    done[slot] = torch.where(first != 0, first.int(), done[slot])
    if derived is not None and modulus is not None:
        derived[slot] = new[:, None].int() % modulus

    emitted.view(-1, q_len)[live] = torch.where(emits, token, -1).int()
    present = (asked >= 0).nonzero().squeeze(1)
    reasons[present] = done[asked[present]]
    return emitted, reasons


@jit_for_any("q_len")
def _advance_kernel(  # type: ignore[no-untyped-def]
    sampled_ptr,
    accepted_ptr,
    requested_ptr,
    slots_ptr,
    length_ptr,
    high_ptr,
    done_ptr,
    tokens_ptr,
    limit_ptr,
    stop_ptr,
    derived_ptr,
    modulus_ptr,
    emitted_ptr,
    reasons_ptr,
    q_len,
    context,
    vocab_size,
    length_stride,
    high_stride,
    done_stride,
    tokens_stride,
    limit_stride,
    stop_stride,
    derived_stride,
    derived_count,
    HAS_ACCEPTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    DERIVED_BLOCK: tl.constexpr,
    REASON_STOP: tl.constexpr,
    REASON_LENGTH: tl.constexpr,
    REASON_CONTEXT: tl.constexpr,
    REASON_NOT_FINITE: tl.constexpr,
):
    """One program a row, all its columns at once: no load waits for an earlier column."""
    row = tl.program_id(0)
    base = row.to(tl.int64) * q_len
    column = tl.arange(0, BLOCK)
    inside = column < q_len
    asked = tl.load(requested_ptr + base)
    slots = tl.load(slots_ptr + base + column, mask=inside, other=-1)
    token = tl.load(sampled_ptr + base + column, mask=inside, other=-1)
    run = tl.min(tl.where(slots >= 0, BLOCK, column), axis=0)
    taken = run
    if HAS_ACCEPTED:
        taken = tl.minimum(tl.maximum(tl.load(accepted_ptr + row), 0), run)

    present = asked >= 0
    live = present & (run > 0)
    slot = tl.where(present, asked, 0).to(tl.int64)
    length = tl.load(length_ptr + slot * length_stride, mask=live, other=0)
    high = tl.load(high_ptr + slot * high_stride, mask=live, other=0)
    done = tl.load(done_ptr + slot * done_stride, mask=present, other=0)
    limit = tl.load(limit_ptr + slot * limit_stride, mask=live, other=0)
    stops = tl.load(stop_ptr + slot * stop_stride + tl.arange(0, STOPS), mask=live, other=-1)

    candidate = live & (column < taken)
    invalid = (token < 0) | (token >= vocab_size)
    stopped = tl.max((token[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    total = length + column + 2
    reason = tl.where(total >= limit, REASON_LENGTH, 0)
    reason = tl.where(total >= context, REASON_CONTEXT, reason)
    reason = tl.where(stopped, REASON_STOP, reason)
    reason = tl.where(invalid, REASON_NOT_FINITE, reason)
    reason = tl.where(candidate, reason, 0)
    first = tl.min(tl.where(reason != 0, column, BLOCK), axis=0)
    emits = candidate & (column <= first) & (invalid == 0)
    ended = tl.sum(tl.where(column == first, reason, 0), axis=0)
    done = tl.where(ended != 0, ended, done)
    new = length + tl.sum(emits.to(tl.int32), axis=0)

    target = length + 1 + column
    tl.store(
        tokens_ptr + slot * tokens_stride + target,
        token.to(tl.int32),
        mask=emits & (target < context),
    )
    tl.store(length_ptr + slot * length_stride, new, mask=live)
    tl.store(high_ptr + slot * high_stride, tl.maximum(high, length + run), mask=live)
    tl.store(done_ptr + slot * done_stride, done, mask=live)
    if DERIVED_BLOCK > 0:
        field = tl.arange(0, DERIVED_BLOCK)
        modulus = tl.load(modulus_ptr + field, mask=field < derived_count, other=1)
        tl.store(
            derived_ptr + slot * derived_stride + field,
            new % modulus,
            mask=live & (field < derived_count),
        )
    tl.store(emitted_ptr + base + column, tl.where(emits, token, -1).to(tl.int32), mask=inside)
    tl.store(reasons_ptr + row, done)


def _launch(
    sampled: Tensor,
    accepted: Tensor | None,
    requested: Tensor,
    slots: Tensor,
    q_len: int,
    length: Tensor,
    high: Tensor,
    done: Tensor,
    tokens: Tensor,
    limit: Tensor,
    stop: Tensor,
    vocab_size: int,
    derived: Tensor | None,
    modulus: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows = requested.shape[0] // q_len
    emitted = torch.empty_like(requested)
    reasons = requested.new_empty(rows)
    count = 0 if derived is None else derived.shape[1]
    if rows:
        _advance_kernel[(rows,)](
            sampled,
            sampled if accepted is None else accepted,
            requested,
            slots,
            length,
            high,
            done,
            tokens,
            limit,
            stop,
            length if derived is None else derived,
            length if modulus is None else modulus,
            emitted,
            reasons,
            q_len,
            tokens.shape[1],
            vocab_size,
            length.stride(0),
            high.stride(0),
            done.stride(0),
            tokens.stride(0),
            limit.stride(0),
            stop.stride(0),
            0 if derived is None else derived.stride(0),
            count,
            HAS_ACCEPTED=accepted is not None,
            BLOCK=max(MIN_BLOCK, triton.next_power_of_2(q_len)),
            STOPS=STOP_TOKENS,
            DERIVED_BLOCK=triton.next_power_of_2(count) if count else 0,
            REASON_STOP=_STOP,
            REASON_LENGTH=_LENGTH,
            REASON_CONTEXT=_CONTEXT,
            REASON_NOT_FINITE=_NOT_FINITE,
            num_warps=1,
        )
    return emitted, reasons


def _fake(
    sampled: Tensor,
    accepted: Tensor | None,
    requested: Tensor,
    slots: Tensor,
    q_len: int,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(requested), requested.new_empty(requested.shape[0] // q_len)


_op = register(
    "advance(Tensor sampled, Tensor? accepted, Tensor requested, Tensor slots, int q_len,"
    " Tensor(a!) length, Tensor(b!) high, Tensor(c!) done, Tensor(d!) tokens, Tensor limit,"
    " Tensor stop, int vocab_size, Tensor(e!)? derived, Tensor? modulus) -> (Tensor, Tensor)",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def advance(
    sampled: Tensor,
    accepted: Tensor | None,
    requested: Tensor,
    slots: Tensor,
    q_len: int,
    length: Tensor,
    high: Tensor,
    done: Tensor,
    tokens: Tensor,
    limit: Tensor,
    stop: Tensor,
    vocab_size: int,
    derived: Tensor | None = None,
    modulus: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append sampled tokens to their slots, move lengths, and finish those that end. One node.

    Row r's slot is the one it requested; its run is its n leading columns with a slot. With L the
    slot's length, `high` becomes at least L + n. Then for each accepted column j in turn: a token
    outside the vocabulary finishes the slot (`NOT_FINITE`) and is not emitted; any other is
    written at position L + 1 + j (if the context has it), moves `length` to L + j + 1 and is
    emitted, and finishes the slot if it is a stop token (`STOP`), if the request now fills the
    context (`CONTEXT`), or if it reaches its limit (`LENGTH`), in that order. Nothing follows the
    column that finishes.

    Runs on the current stream without synchronizing; a slot must not be in two rows.

    Args:
        sampled: [T] int32 or int64, contiguous: the token drawn after each column; -1 for none.
        accepted: [rows] int32, contiguous: columns whose tokens are taken, at most the run; None
            for all.
        requested: [T] int32, contiguous: the slots asked for, before finished ones became padding.
        slots: [T] int32, contiguous: as `begin_step` gave them.
        q_len: tokens a row.
        length: [S1] int32 by slot, any stride: tokens absorbed; written.
        high: [S1] int32 by slot, any stride: one past the highest position written; written.
        done: [S1] int32 by slot, any stride: a `FinishReason`; written.
        tokens: [S1, C] int32 by slot, any stride between slots; written.
        limit: [S1] int32 by slot, any stride: most tokens of prompt and answer together.
        stop: [S1, 8] int32 by slot, any stride between slots: stop tokens; -1 where unused.
        vocab_size: ids at or above it are not tokens.
        derived: [S1, n] int32 by slot, any stride between slots: set to `length % modulus`.
        modulus: [n] int32, contiguous, all at least 1; goes with `derived`.

    Returns:
        emitted [T] int32, -1 where nothing was emitted, and reasons [rows] int32, the slot's
        `FinishReason` after the step, also for one that had finished before; 0 for padding.

    Raises:
        SchemaError: for other dtypes or shapes; nothing has been written.
    """
    _check(sampled, accepted, requested, slots, q_len)
    _check_state(length, high, done, tokens, limit, stop)
    _check_derived(length, derived, modulus)
    result: tuple[Any, Any] = _op(
        sampled, accepted, requested, slots, q_len, length, high, done, tokens, limit, stop,
        vocab_size, derived, modulus,
    )  # fmt: skip
    return result


def _check(
    sampled: Tensor, accepted: Tensor | None, requested: Tensor, slots: Tensor, q_len: int
) -> None:
    if sampled.dtype not in (torch.int32, torch.int64):
        raise SchemaError(f"advance: sampled must be int32 or int64, got {sampled.dtype}")
    if q_len < 1 or requested.dim() != 1 or requested.shape[0] % q_len:
        raise SchemaError(
            f"advance: requested must be [rows * q_len] with q_len={q_len}, "
            f"got {list(requested.shape)}"
        )
    for name, tensor in (("requested", requested), ("slots", slots)):
        if tensor.dtype != torch.int32:
            raise SchemaError(f"advance: {name} must be int32, got {tensor.dtype}")
    for name, tensor in (("sampled", sampled), ("requested", requested), ("slots", slots)):
        if tensor.shape != requested.shape or not tensor.is_contiguous():
            raise SchemaError(
                f"advance: {name} must be contiguous {list(requested.shape)}, "
                f"got {list(tensor.shape)}"
            )
    rows = requested.shape[0] // q_len
    if accepted is not None and (
        accepted.dtype != torch.int32 or accepted.shape != (rows,) or not accepted.is_contiguous()
    ):
        raise SchemaError(
            f"advance: accepted must be contiguous int32 [{rows}], "
            f"got {accepted.dtype} {list(accepted.shape)}"
        )


def _check_state(
    length: Tensor, high: Tensor, done: Tensor, tokens: Tensor, limit: Tensor, stop: Tensor
) -> None:
    slots = length.shape[0]
    for name, tensor, shape in (
        ("length", length, (slots,)),
        ("high", high, (slots,)),
        ("done", done, (slots,)),
        ("limit", limit, (slots,)),
        ("tokens", tokens, (slots, tokens.shape[-1])),
        ("stop", stop, (slots, STOP_TOKENS)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape:
            raise SchemaError(
                f"advance: {name} must be int32 {list(shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.dim() == 2 and tensor.stride(1) != 1:
            raise SchemaError(f"advance: the rows of {name} must be contiguous")


def _check_derived(length: Tensor, derived: Tensor | None, modulus: Tensor | None) -> None:
    if derived is None and modulus is None:
        return
    if derived is None or modulus is None:
        raise SchemaError("advance: derived and modulus go together")
    if derived.dtype != torch.int32 or modulus.dtype != torch.int32:
        raise SchemaError("advance: derived and modulus must be int32")
    if derived.shape != (length.shape[0], modulus.shape[0]) or modulus.dim() != 1:
        raise SchemaError(
            f"advance: derived must be [S1, n] and modulus [n], got {list(derived.shape)} "
            f"and {list(modulus.shape)}"
        )
    if (derived.shape[1] > 1 and derived.stride(1) != 1) or not modulus.is_contiguous():
        raise SchemaError("advance: modulus and the rows of derived must be contiguous")
