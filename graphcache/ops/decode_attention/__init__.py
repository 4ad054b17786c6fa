"""Attention of a step's tokens over their slots' caches, as far as each token may see: one kernel.

A context is split so that one request fills the device. Split sizes follow from the position and
the schema alone, and every token is a problem of its own: its result has the same bits in every
batch, at every row, and as any column of a longer run. How many programs share the splits does
depend on the batch; which of them computes a split leaves no trace in it.

The last program to arrive for a token and K/V head adds the partial results, always in the order
of the splits. It is found by a counter, which it puts back to 0 for the next launch. Counters live
as long as the process, one buffer for each device and stream: two launches that share them must
not overlap, so graphs captured on one stream must not be replayed on two at once.

Padding (slot -1) reads nothing and gives zeros.
"""

from __future__ import annotations

from torch import Tensor

from .._kv import (
    check_attention,
)
from .._library import register
from . import kernel, reference
from .counters import WorkspaceNotReady

__all__ = ["WorkspaceNotReady", "decode_attention"]


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    scale: float,
    table: Tensor | None,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    return q.new_empty(*q.shape[:2], v_cache.shape[3])


_op = register(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor slots, Tensor positions,"
    " int q_len, float scale, Tensor? table, int window, float softcap, Tensor? sinks) -> Tensor",
    reference=reference.decode_attention,
    kernel=kernel.launch,
    fake=_fake,
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    scale: float,
    table: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each token to its slot's cache, up to and with its own position. One node.

    Reads what `kv_append` wrote, the step's own rows included: call it after the append. Token t
    sees positions `max(0, p - window + 1) .. p`, p its own. Logits are `scale * q . k` in fp32,
    through `softcap * tanh(x / softcap)` if there is a softcap; a sink adds `exp(sinks[h])` to the
    denominator. Runs on the current stream without synchronizing; allocates the output and, where
    the context can take more than one split, partial results. The first call on a stream also
    makes its counters, which a capture may not: warm up on the capturing stream.

    Args:
        q: [T, H, Dk], rotary applied; T = rows x q_len, row-major. Any strides but the last. H is
            a multiple of Hkv; head h reads K/V head `h // (H // Hkv)`.
        k_cache: [N, Hkv, Rw, Dk] float32, bfloat16 or float16. Where its dtype is not q's, or is
            float32, all arithmetic is float32.
        v_cache: [N, Hkv, Rw, Dv], of k_cache's dtype.
        slots: [T] int32, -1 for padding.
        positions: [T] int32.
        q_len: tokens a row. Each token sees its own prefix only, so nothing else depends on it.
        scale: of the logits.
        table: [S1, W] int32, the blocks of each slot; None for a ring, where position p is row
            `p % Rw` and the window must still be there.
        window: tokens a query sees, itself included; 0 for all.
        softcap: 0 for none.
        sinks: [H] float, or None.

    Returns:
        [T, H, Dv] of q's dtype, contiguous; zeros at padding.

    Raises:
        SchemaError: for other dtypes, shapes or strides.
        WorkspaceNotReady: in a capture, on a stream that never ran a batch as large.
    """
    check_attention(
        "decode_attention",
        q,
        k_cache,
        v_cache,
        slots,
        positions,
        q_len,
        table,
        window,
        softcap,
        sinks,
    )
    out: Tensor = _op(
        q, k_cache, v_cache, slots, positions, q_len, scale, table, window, softcap, sinks
    )
    return out
