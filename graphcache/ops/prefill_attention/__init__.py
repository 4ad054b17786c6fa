"""Attention of a chunk of tokens over its own rows and, below them, its slot's cache: one kernel.

The chunk's rows come from the input, rounded to the cache's dtype, so the chunk need not have been
appended: with rings it must not be, since the chunk may be longer than the ring.

Blocks of keys begin at multiples of their size, counted in positions, whether they lie in the
cache or in the chunk. So a token's result has the same bits however its prompt was cut into
chunks.

Padding (slot -1) reads nothing and gives zeros. Within a tile of queries weights are masked by
token, values by what any of its tokens may see: a value that is not finite reaches the earlier
tokens of its tile too.
"""

from __future__ import annotations

from torch import Tensor

from .._kv import (
    check_attention,
    check_rows,
)
from .._library import register
from . import kernel, reference

__all__ = ["prefill_attention"]


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    return q.new_empty(*q.shape[:2], v.shape[2])


_op = register(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots,"
    " Tensor positions, int q_len, float scale, Tensor? table, int window, float softcap,"
    " Tensor? sinks) -> Tensor",
    reference=reference.prefill_attention,
    kernel=kernel.launch,
    fake=_fake,
)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Attend a chunk of each row's slot to itself and to what the slot holds below it. One node.

    Column c of a row is at position `p0 + c`, p0 the position of its first token. It sees positions
    `max(0, p0 + c - window + 1) .. p0 + c`: those from p0 on in k and v, rounded to the cache's
    dtype, those below in the cache, where nothing is written. In a ring the window's rows below p0
    must still be there, so append the chunk after this. Logits, softcap and sinks as in
    `decode_attention`. Runs on the current stream without synchronizing; allocates the output only.

    Args:
        q: [T, H, Dk], rotary applied; T = rows x q_len, row-major. Any strides but the last. H is
            a multiple of Hkv; head h reads K/V head `h // (H // Hkv)`.
        k: [T, Hkv, Dk], rotary applied. Any strides but the last.
        v: [T, Hkv, Dv], likewise.
        k_cache: [N, Hkv, Rw, Dk] float32, bfloat16 or float16. Where its dtype is not q's, or is
            float32, all arithmetic is float32.
        v_cache: [N, Hkv, Rw, Dv], of k_cache's dtype.
        slots: [T] int32, -1 for padding; a row's tokens are one ascending run at its start.
        positions: [T] int32.
        q_len: tokens a row.
        scale: of the logits.
        table: [S1, W] int32, the blocks of each slot; None for a ring.
        window: tokens a query sees, itself included; 0 for all.
        softcap: 0 for none.
        sinks: [H] float, or None.

    Returns:
        [T, H, Dv] of q's dtype, contiguous; zeros at padding.

    Raises:
        SchemaError: for other dtypes, shapes or strides.
    """
    check_attention(
        "prefill_attention",
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
    tokens, heads = slots.shape[0], k_cache.shape[1]
    check_rows("prefill_attention", "k", k, (tokens, heads, k_cache.shape[3]))
    check_rows("prefill_attention", "v", v, (tokens, heads, v_cache.shape[3]))
    out: Tensor = _op(
        q, k, v, k_cache, v_cache, slots, positions, q_len, scale, table, window, softcap, sinks
    )
    return out
