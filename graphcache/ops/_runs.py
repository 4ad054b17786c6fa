"""What operations on runs of tokens by slot share: the dtypes they take, how slots must lie."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SchemaError

__all__ = ["RUN_DTYPES", "check_runs"]

RUN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_runs(operation: str, slots: Tensor, tokens: int, q_len: int) -> None:
    """See to it that slots are [tokens] int32, in rows of q_len.

    Raises:
        SchemaError: naming the operation.
    """
    if slots.dtype != torch.int32 or slots.shape != (tokens,) or not slots.is_contiguous():
        raise SchemaError(
            f"{operation}: slots must be [{tokens}] int32 and contiguous, "
            f"got {list(slots.shape)} {slots.dtype}"
        )
    if q_len < 1 or tokens % q_len:
        raise SchemaError(f"{operation}: {tokens} tokens are no rows of q_len={q_len}")
