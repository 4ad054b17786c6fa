"""Rotate the last dims of every head of a batch's queries, normed first if asked: one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._rows import rotate
from ._triton import jit, tl, triton
from .absorb import Rotation

__all__ = ["rotate_heads"]


def _reference(q: Tensor, cos: Tensor, sin: Tensor, norm: bool, eps: float) -> Tensor:
    vectors = q.float()
    if norm:
        vectors = vectors / (vectors.square().mean(-1, keepdim=True) + eps).sqrt()
    width = 2 * cos.shape[1]
    even, odd = vectors[..., -width::2], vectors[..., -width + 1 :: 2]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)
    return torch.cat((vectors[..., :-width], turned), -1).to(q.dtype)


@jit
def _rotate_heads_kernel(  # type: ignore[no-untyped-def]
    q,
    cos,
    sin,
    out,
    eps,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program a token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    at = q + token * token_stride + head * head_stride + lane
    vector = tl.load(at, mask=inside, other=0).to(tl.float32)
    if NORM:
        vector = vector / tl.sqrt_rn(tl.sum(vector * vector, axis=0) / WIDTH + eps)
    line = token * (ROPE_DIM // 2)
    vector = rotate(vector, cos + line, sin + line, WIDTH, ROPE_DIM, BLOCK)
    out_at = out + (token * HEADS + head) * WIDTH + lane
    tl.store(out_at, vector.to(out.dtype.element_ty), mask=inside)


def _launch(q: Tensor, cos: Tensor, sin: Tensor, norm: bool, eps: float) -> Tensor:
    tokens, heads, width = q.shape
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    if tokens:
        kernel: Any = _rotate_heads_kernel
        kernel[(tokens, heads)](
            q, cos, sin, out, eps, q.stride(0), q.stride(1), HEADS=heads, WIDTH=width,
            ROPE_DIM=2 * cos.shape[1], BLOCK=triton.next_power_of_2(width), NORM=norm,
            num_warps=max(1, min(4, width // 128)),
        )  # fmt: skip
    return out


def _fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


_op = register(
    "rotate_heads(Tensor q, Tensor cos, Tensor sin, bool norm, float eps) -> Tensor",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def rotate_heads(q: Tensor, rotation: Rotation, *, norm: bool = False, eps: float = 1e-6) -> Tensor:
    """Rotate the last dims of each head in neighbouring pairs, after an RMS norm without weight.

    One node on the current stream; no synchronization; can be captured.

    Args:
        q: [T, H, D] float32, bfloat16 or float16, contiguous last axis.
        rotation: of each token, cos and sin [T, r / 2] float32 with r <= D.
        norm: divide by sqrt(mean(q^2) + eps) first.
        eps: of the norm.

    Returns:
        [T, H, D] in q's dtype, contiguous; computed in float32.

    Raises:
        SchemaError: for other shapes or dtypes.
    """
    if q.dim() != 3 or q.stride(2) != 1 or not q.is_floating_point() or q.dtype.itemsize > 4:
        raise SchemaError(
            "rotate_heads: q must be [T, H, D] float32, bfloat16 or float16 with a contiguous "
            f"last axis, got {list(q.shape)} {q.dtype}"
        )
    for part in rotation:
        if (
            part.dtype != torch.float32
            or part.dim() != 2
            or part.shape[0] != q.shape[0]
            or 2 * part.shape[1] > q.shape[2]
            or not part.is_contiguous()
        ):
            raise SchemaError(
                f"rotate_heads: cos and sin must be [{q.shape[0]}, r / 2] float32, contiguous, "
                f"with r <= {q.shape[2]}, got {list(part.shape)} {part.dtype}"
            )
    result: Tensor = _op(q, *rotation, norm, eps)
    return result
