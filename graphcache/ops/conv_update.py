"""A causal depthwise convolution over each slot's tokens, its last inputs kept by slot: one kernel.

With K taps a slot keeps the K - 1 inputs before its next token, zeros before its first. Padding
(slot -1) writes nothing and gives zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._runs import RUN_DTYPES, check_runs
from ._triton import jit_for_any, tl, triton

__all__ = ["conv_update"]

STEP_CHANNELS = 256
"""Channels of a program where rows have one token."""
RUN_CHANNELS, RUN_TOKENS = 64, 16
"""Channels of a program, and tokens that it takes at once, where rows have several."""


def _reference(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, q_len: int
) -> Tensor:
    kept, channels = state.shape[1:]
    real = slots.view(-1, q_len) >= 0
    slot = slots.view(-1, q_len)[:, 0].clamp(min=0).long()
    # [rows, K - 1 + q_len, C]: what each row's slot has seen, oldest first.
    seen = torch.cat((state[slot], x.view(-1, q_len, channels)), 1)
    total = torch.zeros(real.shape[0], q_len, channels)
    if bias is not None:
        total += bias.float()
    for tap in range(kept + 1):
        total += seen[:, tap : tap + q_len].float() * weight[:, tap].float()
    last = real.sum(1, keepdim=True) + torch.arange(kept)
    follows = seen.gather(1, last.unsqueeze(2).expand(-1, -1, channels))
    live = real[:, 0]
    state[slot[live]] = follows[live]
    # Not torch's silu: at the end of a tensor it rounds otherwise than in its midst.
    given = total / (1 + torch.exp(-total))
    return given.masked_fill(~real.unsqueeze(2), 0).to(x.dtype).view(x.shape)


@jit_for_any("q_len")
def _conv_update_kernel(  # type: ignore[no-untyped-def]
    x,
    state,
    weight,
    bias,
    slots,
    out,
    q_len,
    channels,
    x_stride,
    state_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
):
    """One program a row and group of channels."""
    KEPT: tl.constexpr = TAPS - 1
    first = tl.program_id(0).to(tl.int64) * q_len
    slot = tl.load(slots + first).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    own = state + slot * state_stride
    if HAS_BIAS:
        shift = tl.load(bias + channel, mask=exists, other=0).to(tl.float32)
    else:
        shift = tl.zeros([CHANNELS], tl.float32)
    count = 0
    for start in range(0, q_len, TOKENS):
        column = start + tl.arange(0, TOKENS)
        inside = column < q_len
        real = tl.load(slots + first + column, mask=inside, other=-1) >= 0
        count += tl.sum(real.to(tl.int32), axis=0)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32) + shift[None, :]
        for tap in tl.static_range(TAPS):
            # Below 0 it is an input of before this run, which the slot has.
            source = column + (tap - KEPT)
            new = (real & (source >= 0))[:, None] & exists[None, :]
            old = (real & (source < 0))[:, None] & exists[None, :]
            at = (first + source)[:, None] * x_stride + channel[None, :]
            value = tl.load(x + at, mask=new, other=0)
            at = (source + KEPT)[:, None] * channels + channel[None, :]
            value = tl.where(new, value, tl.load(own + at, mask=old, other=0))
            factor = tl.load(weight + channel * TAPS + tap, mask=exists, other=0).to(tl.float32)
            total += value.to(tl.float32) * factor[None, :]
        given = tl.where(real[:, None], total / (1 + tl.exp(-total)), 0)
        at = (first + column)[:, None] * channels + channel[None, :]
        mask = inside[:, None] & exists[None, :]
        tl.store(out + at, given.to(out.dtype.element_ty), mask=mask)
    row = tl.arange(0, KEPT_BLOCK)
    source = row + count - KEPT
    kept = (row < KEPT)[:, None] & exists[None, :] & (slot >= 0)
    new = kept & (source >= 0)[:, None]
    at = (first + source)[:, None] * x_stride + channel[None, :]
    value = tl.load(x + at, mask=new, other=0)
    at = (source + KEPT)[:, None] * channels + channel[None, :]
    value = tl.where(new, value, tl.load(own + at, mask=kept & (source < 0)[:, None], other=0))
    # Rows move up among the threads of the program: all are read before any is written.
    tl.debug_barrier()
    tl.store(own + row[:, None] * channels + channel[None, :], value, mask=kept)


def _launch(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, q_len: int
) -> Tensor:
    out = _fake(x)
    tokens, channels = x.shape
    if not tokens:
        return out
    taps = weight.shape[1]
    at_once, group = (1, STEP_CHANNELS) if q_len == 1 else (RUN_TOKENS, RUN_CHANNELS)
    kernel: Any = _conv_update_kernel
    kernel[(tokens // q_len, triton.cdiv(channels, group))](
        x, state, weight, x if bias is None else bias, slots, out, q_len, channels, x.stride(0),
        state.stride(0), TAPS=taps, HAS_BIAS=bias is not None, TOKENS=at_once, CHANNELS=group,
        KEPT_BLOCK=triton.next_power_of_2(taps - 1), num_warps=2 if q_len == 1 else 4,
    )  # fmt: skip
    return out


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_op = register(
    "conv_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor slots, int q_len)"
    " -> Tensor",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def conv_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    q_len: int,
) -> Tensor:
    """Convolve each token with the inputs before it, then SiLU; keep the last inputs, in place.

        out[t, c] = silu(bias[c] + sum over k of weight[c, k] * input[t - (K - 1) + k, c])

    in float32, where inputs before the run's first come from the slot's state, oldest first. After
    it the state holds the slot's last K - 1 inputs, whatever lengths it came in. Padding writes
    nothing and gives zeros. One node on the current stream; no synchronization.

    Args:
        x: [T, C] float32, bfloat16 or float16; T = rows x q_len, row-major. The stride of tokens
            is free, channels are contiguous.
        state: [S1, K - 1, C] in x's dtype; written. The stride of the first axis is free, the
            rest is contiguous.
        weight: [C, K] of any of these dtypes, contiguous; K at least 2.
        bias: [C] likewise, or None.
        slots: [T] int32, contiguous; -1 for padding. A row's tokens are one run at its start, and
            no slot is in two rows.
        q_len: tokens a row.

    Returns:
        [T, C] in x's dtype, contiguous.

    Raises:
        SchemaError: for other shapes, dtypes or strides; nothing is written then.
    """
    _check(x, state, weight, bias, slots, q_len)
    result: Tensor = _op(x, state, weight, bias, slots, q_len)
    return result


def _check(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, q_len: int
) -> None:
    if x.dim() != 2 or x.dtype not in RUN_DTYPES or x.stride(1) != 1:
        raise SchemaError(
            "conv_update: x must be [T, C] float32, bfloat16 or float16 with contiguous channels, "
            f"got {list(x.shape)} {x.dtype}"
        )
    tokens, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 2:
        raise SchemaError(
            f"conv_update: weight must be [{channels}, K] with K at least 2, "
            f"got {list(weight.shape)}"
        )
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and (given.dtype not in RUN_DTYPES or not given.is_contiguous()):
            raise SchemaError(
                f"conv_update: {name} must be float32, bfloat16 or float16, contiguous, "
                f"got {given.dtype} with strides {list(given.stride())}"
            )
    if bias is not None and bias.shape != (channels,):
        raise SchemaError(f"conv_update: bias must be [{channels}], got {list(bias.shape)}")
    expected = (weight.shape[1] - 1, channels)
    if (
        state.dim() != 3
        or state.shape[1:] != expected
        or state.dtype != x.dtype
        or not state[0].is_contiguous()
    ):
        raise SchemaError(
            f"conv_update: state must be [S1, {expected[0]}, {channels}] {x.dtype}, contiguous "
            f"under the first axis, got {list(state.shape)} {state.dtype}"
        )
    check_runs("conv_update", slots, tokens, q_len)
