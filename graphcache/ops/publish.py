"""Tell a polling host what a step gave: tokens and reasons into a ring, then the step's number.

The ring and the number lie in pinned host memory, which kernels write directly. A host that has
seen the number has all that was written before it: the kernel puts a system-wide fence between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import SchemaError
from ._library import register
from ._triton import jit_for_any, tl, triton

__all__ = ["publish"]

MIN_BLOCK = 32


def _reference(
    emitted: Tensor,
    reasons: Tensor,
    counter: Tensor,
    ring_tokens: Tensor,
    ring_reasons: Tensor,
    word: Tensor,
) -> None:
    step = int(counter[0]) + 1
    place = step % ring_tokens.shape[0]
    ring_tokens[place, : emitted.shape[0]] = emitted
    ring_reasons[place, : reasons.shape[0]] = reasons
    counter[0] = step
    word[0] = step


@jit_for_any("tokens", "rows", "token_stride", "reason_stride")
def _publish_kernel(  # type: ignore[no-untyped-def]
    emitted,
    reasons,
    counter,
    ring_tokens,
    ring_reasons,
    word,
    tokens,
    rows,
    token_stride,
    reason_stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FENCE: tl.constexpr,
):
    step = tl.load(counter) + 1
    place = step % DEPTH
    offsets = tl.arange(0, BLOCK)
    is_token = offsets < tokens
    token = tl.load(emitted + offsets, mask=is_token)
    tl.store(ring_tokens + place * token_stride + offsets, token, mask=is_token)
    is_row = offsets < rows
    reason = tl.load(reasons + offsets, mask=is_row)
    tl.store(ring_reasons + place * reason_stride + offsets, reason, mask=is_row)
    # Every thread has read the counter and written its part of the ring before either goes on.
    tl.debug_barrier()
    tl.store(counter, step)
    if FENCE:
        # A fence in each thread that stores the number: it covers what the barrier has gathered.
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.s64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [word.to(tl.int64), step],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(word, step)


def _launch(
    emitted: Tensor,
    reasons: Tensor,
    counter: Tensor,
    ring_tokens: Tensor,
    ring_reasons: Tensor,
    word: Tensor,
) -> None:
    tokens, rows = emitted.shape[0], reasons.shape[0]
    _publish_kernel[(1,)](
        emitted,
        reasons,
        counter,
        ring_tokens,
        ring_reasons,
        word,
        tokens,
        rows,
        ring_tokens.stride(0),
        ring_reasons.stride(0),
        DEPTH=ring_tokens.shape[0],
        BLOCK=max(MIN_BLOCK, triton.next_power_of_2(tokens)),
        # The interpreter runs on one thread and has no inline assembly.
        FENCE=emitted.is_cuda,
        num_warps=1 if tokens <= 128 else 4,
    )


def _fake(
    emitted: Tensor,
    reasons: Tensor,
    counter: Tensor,
    ring_tokens: Tensor,
    ring_reasons: Tensor,
    word: Tensor,
) -> None:
    return None


_op: Any = register(
    "publish(Tensor emitted, Tensor reasons, Tensor(a!) counter, Tensor(b!) ring_tokens,"
    " Tensor(c!) ring_reasons, Tensor(d!) word) -> ()",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def publish(
    emitted: Tensor,
    reasons: Tensor,
    counter: Tensor,
    ring_tokens: Tensor,
    ring_reasons: Tensor,
    word: Tensor,
) -> None:
    """Count the step, write what it gave into the ring's place for it, then its number. One node.

    Runs on the current stream without synchronizing. The place is `step % depth`.

    Args:
        emitted: [T] int32 on the device.
        reasons: [rows] int32 on the device.
        counter: [1] int64 on the device: the newest step; written.
        ring_tokens: [depth, >= T] int32, pinned (on a CPU, any memory); written.
        ring_reasons: [depth, >= rows] int32, likewise.
        word: [1] int64, likewise: the newest step whose entries are complete.

    Raises:
        SchemaError: for other dtypes or shapes.
    """
    for name, tensor, dtype in (
        ("emitted", emitted, torch.int32),
        ("reasons", reasons, torch.int32),
        ("counter", counter, torch.int64),
        ("ring_tokens", ring_tokens, torch.int32),
        ("ring_reasons", ring_reasons, torch.int32),
        ("word", word, torch.int64),
    ):
        if tensor.dtype != dtype:
            raise SchemaError(f"publish: {name} must be {dtype}, got {tensor.dtype}")
    if (
        ring_tokens.shape[1] < emitted.shape[0]
        or ring_reasons.shape[1] < reasons.shape[0]
        or ring_tokens.shape[0] != ring_reasons.shape[0]
    ):
        raise SchemaError(
            f"publish: a ring of {list(ring_tokens.shape)} tokens and {list(ring_reasons.shape)} "
            f"reasons has no room for {emitted.shape[0]} and {reasons.shape[0]}"
        )
    _op(emitted, reasons, counter, ring_tokens, ring_reasons, word)
