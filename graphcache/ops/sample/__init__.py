"""Sampling: greedy, or by temperature with top-k and top-p, each slot with its own parameters.

A draw is the Gumbel-max trick with noise from Philox keyed by (seed of the slot, position): a
function of the request alone, so it does not depend on the row, on the bucket, or on the other
requests of the batch, and a replayed graph draws anew because the position has moved. Two nodes:
one over (vocabulary split, row), one over rows. A padding row gives -1 and is otherwise ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SchemaError
from .._library import register
from . import kernel, reference

__all__ = ["sample"]


def _fake(logits: Tensor, slots: Tensor, *_: object) -> Tensor:
    return torch.empty_like(slots)


_op = register(
    "sample(Tensor logits, Tensor slots, Tensor positions, Tensor temperature, Tensor top_k,"
    " Tensor top_p, Tensor seed, int vocab_size) -> Tensor",
    reference=reference.sample,
    kernel=kernel.launch,
    fake=_fake,
)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    vocab_size: int,
) -> Tensor:
    """Draw one token a row from its logits, by its slot's parameters. Two nodes.

    Runs on the current stream without synchronizing, and writes nothing but its output.

    With `temperature` 0 the token is the largest logit's, the lowest id of equals. Otherwise it is
    the argmax of `(logit - largest) / temperature + g(id)` over the ids that the filters keep,
    where `g = -log(-log(u))`, `u = ((w >> 9) + 0.5) * 2**-23`, and w is word 0 of Philox4x32-10
    with key `seed` and counter (id, position, 0, 0). Top-k keeps every logit that is at least the
    k-th largest, equals of it too. Top-p then keeps, of what top-k kept, the logits at or above
    the largest logit t at which the probability of `logit >= t` reaches p.

    Args:
        logits: [R, V] float32, bfloat16 or float16, contiguous within a row. V may exceed
            `vocab_size`: the ids past it are never drawn, nor looked at.
        slots: [R] int32, contiguous; -1 for padding.
        positions: [R] int32, contiguous: of the token that was absorbed; keys the draw.
        temperature: [S1] float32 by slot, any stride, finite; 0 for greedy.
        top_k: [S1] int32 by slot, any stride; 0 for no filter.
        top_p: [S1] float32 by slot, any stride; 1 or more for no filter.
        seed: [S1] int64 by slot, any stride.
        vocab_size: ids that are tokens.

    Returns:
        [R] int32 token ids; -1 for padding, and where the logits are not finite: a NaN or +inf
        among the tokens, or nothing but -inf.

    Raises:
        SchemaError: for other dtypes or shapes, float64 logits among them.
    """
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise SchemaError(
            f"sample: logits must be float32, bfloat16 or float16, got {logits.dtype}"
        )
    if logits.dim() != 2 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise SchemaError(
            f"sample: logits must be [R, V] with contiguous rows, got {list(logits.shape)} "
            f"with strides {logits.stride()}"
        )
    if not 1 <= vocab_size <= logits.shape[1]:
        raise SchemaError(f"sample: vocab_size must be in 1..{logits.shape[1]}, got {vocab_size}")
    for name, tensor in (("slots", slots), ("positions", positions)):
        if (
            tensor.dtype != torch.int32
            or tensor.shape != logits.shape[:1]
            or not tensor.is_contiguous()
        ):
            raise SchemaError(
                f"sample: {name} must be contiguous int32 [{logits.shape[0]}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("seed", seed, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.shape != temperature.shape or tensor.dim() != 1:
            raise SchemaError(
                f"sample: {name} must be {dtype} [S1], got {tensor.dtype} {list(tensor.shape)}"
            )
    token: Tensor = _op(
        logits, slots, positions, temperature, top_k, top_p, seed, vocab_size
    )  # fmt: skip
    return token
