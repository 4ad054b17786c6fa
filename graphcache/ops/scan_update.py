"""A selective scan over each slot's tokens, its state updated in place by slot: one kernel.

The recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a matrix by head that fades by a
number of the token's own, and takes up the token's outer product. Padding (slot -1) writes nothing
and gives zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._runs import RUN_DTYPES, check_runs
from ._triton import jit, jit_for_any, tl, triton

__all__ = ["scan_update"]

TILE_ELEMENTS = 4096
"""Most elements of a head's state that one program keeps in registers."""


def _reference(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    q_len: int,
) -> Tensor:
    heads, dim = x.shape[1:]
    shared = heads // b.shape[1]
    real = slots.view(-1, q_len) >= 0
    rows = real.shape[0]
    live = real[:, 0]
    slot = slots.view(-1, q_len)[:, 0].clamp(min=0).long()
    shifted = dt.float() + dt_bias.float()
    # Not torch's softplus: at the end of a tensor it rounds otherwise than in its midst.
    step = torch.where(shifted > 20, shifted, torch.log1p(torch.exp(shifted)))
    step = step.view(rows, q_len, heads, 1)
    fade = torch.exp(step * -a_log.float().exp().unsqueeze(1)).unsqueeze(4)
    value = x.float().view(rows, q_len, heads, dim)
    taken = (step * value).unsqueeze(4)
    key = b.float().repeat_interleave(shared, 1).view(rows, q_len, heads, 1, b.shape[2])
    query = c.float().repeat_interleave(shared, 1).view(rows, q_len, heads, 1, b.shape[2])
    # Not the slots': rows of padding must change none.
    held = state[slot]
    told = torch.empty_like(value)
    for column in range(q_len):
        after = held * fade[:, column] + taken[:, column] * key[:, column]
        held = torch.where(real[:, column, None, None, None], after, held)
        told[:, column] = (held * query[:, column]).sum(-1)
    told += d.float().unsqueeze(1) * value
    state[slot[live]] = held[live]
    return told.masked_fill(~real[:, :, None, None], 0).to(x.dtype).view(x.shape)


@jit
def _softplus(v):  # type: ignore[no-untyped-def]
    """log(1 + exp(v)), exact where exp(v) is small: the error of `1 + e` is divided out."""
    e = tl.exp(tl.minimum(v, 20.0))
    w = 1.0 + e
    lost = w == 1.0
    rest = tl.log(w) * tl.div_rn(e, tl.where(lost, 1.0, w - 1.0))
    return tl.where(v > 20.0, v, tl.where(lost, e, rest))


@jit_for_any("q_len")
def _scan_update_kernel(  # type: ignore[no-untyped-def]
    x,
    dt,
    b,
    c,
    state,
    a_log,
    d,
    dt_bias,
    slots,
    out,
    q_len,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    state_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """One program a row, head and group of the head's dims."""
    first = tl.program_id(0).to(tl.int64) * q_len
    head = tl.program_id(1)
    slot = tl.load(slots + first).to(tl.int64)
    lane = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    place = tl.arange(0, STATE_BLOCK)
    lane_exists, place_exists = lane < DIM, place < STATE
    at = state + slot * state_stride + (head * DIM + lane[:, None]) * STATE + place[None, :]
    own = lane_exists[:, None] & place_exists[None, :] & (slot >= 0)
    held = tl.load(at, mask=own, other=0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip = tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    group = (head // SHARED) * STATE + place
    for column in range(0, q_len):
        token = first + column
        real = tl.load(slots + token) >= 0
        step = _softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + bias)
        x_at = x + token * x_stride + head * DIM + lane
        value = tl.load(x_at, mask=lane_exists, other=0).to(tl.float32)
        key = tl.load(b + token * b_stride + group, mask=place_exists, other=0).to(tl.float32)
        query = tl.load(c + token * c_stride + group, mask=place_exists, other=0).to(tl.float32)
        after = held * tl.exp(step * rate) + (step * value)[:, None] * key[None, :]
        held = tl.where(real, after, held)
        told = tl.sum(held * query[None, :], axis=1) + skip * value
        told = tl.where(real, told, 0.0)
        out_at = out + (token * HEADS + head) * DIM + lane
        tl.store(out_at, told.to(out.dtype.element_ty), mask=lane_exists)
    tl.store(at, held, mask=own)


def _launch(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    q_len: int,
) -> Tensor:
    out = _fake(x)
    tokens, heads, dim = x.shape
    if not tokens:
        return out
    size = b.shape[2]
    state_block = triton.next_power_of_2(size)
    dim_block = min(triton.next_power_of_2(dim), max(1, TILE_ELEMENTS // state_block))
    kernel: Any = _scan_update_kernel
    kernel[(tokens // q_len, heads, triton.cdiv(dim, dim_block))](
        x, dt, b, c, state, a_log, d, dt_bias, slots, out, q_len, x.stride(0), dt.stride(0),
        b.stride(0), c.stride(0), state.stride(0), HEADS=heads, SHARED=heads // b.shape[1],
        DIM=dim, STATE=size, DIM_BLOCK=dim_block, STATE_BLOCK=state_block,
        num_warps=max(1, min(4, dim_block * state_block // 512)),
    )  # fmt: skip
    return out


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_op = register(
    "scan_update(Tensor x, Tensor dt, Tensor b, Tensor c, Tensor(a!) state, Tensor a_log, Tensor d,"
    " Tensor dt_bias, Tensor slots, int q_len) -> Tensor",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def scan_update(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    q_len: int,
) -> Tensor:
    """Fold each token into its slot's state, in place, and read the state back through `c`.

    For each head, in float32, token after token:

        step  = softplus(dt + dt_bias)
        state = exp(-exp(a_log) * step) * state + outer(step * x, b)
        out   = state @ c + d * x

    A run in pieces of any lengths leaves the same bits as token by token. Padding writes nothing
    and gives zeros. One node on the current stream; no synchronization.

    Args:
        x: [T, H, P] float32, bfloat16 or float16; T = rows x q_len, row-major. The stride of
            tokens is free, the rest is contiguous; so for the next three.
        dt: [T, H] of any of these dtypes.
        b: [T, G, N] likewise; head h has group h // (H / G).
        c: [T, G, N] likewise.
        state: [S1, H, P, N] float32; written. The stride of the first axis is free, the rest is
            contiguous.
        a_log: [H] of any of these dtypes, contiguous.
        d: [H] likewise.
        dt_bias: [H] likewise.
        slots: [T] int32, contiguous; -1 for padding. A row's tokens are one run at its start, and
            no slot is in two rows.
        q_len: tokens a row.

    Returns:
        [T, H, P] in x's dtype, contiguous.

    Raises:
        SchemaError: for other shapes, dtypes or strides; nothing is written then.
    """
    _check(x, dt, b, c, state, slots, q_len, {"a_log": a_log, "d": d, "dt_bias": dt_bias})
    result: Tensor = _op(x, dt, b, c, state, a_log, d, dt_bias, slots, q_len)
    return result


def _check(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    slots: Tensor,
    q_len: int,
    of_heads: dict[str, Tensor],
) -> None:
    if x.dim() != 3 or b.dim() != 3:
        raise SchemaError(
            "scan_update: x must be [T, H, P] and b [T, G, N], "
            f"got {list(x.shape)} and {list(b.shape)}"
        )
    tokens, heads, dim = x.shape
    groups, size = b.shape[1:]
    if not groups or heads % groups:
        raise SchemaError(f"scan_update: {heads} heads are no multiple of {groups} groups")
    by_token = {
        "x": (x, (tokens, heads, dim)),
        "dt": (dt, (tokens, heads)),
        "b": (b, (tokens, groups, size)),
        "c": (c, (tokens, groups, size)),
    }
    for name, (given, shape) in by_token.items():
        if (
            given.shape != shape
            or given.dtype not in RUN_DTYPES
            or (tokens and not given[0].is_contiguous())
        ):
            raise SchemaError(
                f"scan_update: {name} must be {list(shape)} float32, bfloat16 or float16, "
                "contiguous under the first axis, "
                f"got {list(given.shape)} {given.dtype} with strides {list(given.stride())}"
            )
    for name, given in of_heads.items():
        if given.shape != (heads,) or given.dtype not in RUN_DTYPES or not given.is_contiguous():
            raise SchemaError(
                f"scan_update: {name} must be [{heads}] float32, bfloat16 or float16, contiguous, "
                f"got {list(given.shape)} {given.dtype}"
            )
    if (
        state.dim() != 4
        or state.shape[1:] != (heads, dim, size)
        or state.dtype != torch.float32
        or not state[0].is_contiguous()
    ):
        raise SchemaError(
            f"scan_update: state must be [S1, {heads}, {dim}, {size}] float32, contiguous under "
            f"the first axis, got {list(state.shape)} {state.dtype}"
        )
    check_runs("scan_update", slots, tokens, q_len)
