"""Attention of tokens over their slots' windows and compressed entries, rotated back.

K and V are one entry, shared by all heads. A token at position p of a slot with window W sees

    window rows of positions max(0, p - W + 1) .. p, then
    compressed entries: the n = (p + 1) // m complete ones, or those of them selected

as one list of rows; logits in float32, a sink's exp in the denominator, and the output's last dims
rotated by -p (arXiv 2606.19348, §2.3).

The list is split so that one request fills the device. Where a split ends follows from the position
and the schema alone, and splits are added in their order, so a token's bits are the same in every
batch. Padding (slot -1) reads nothing and gives zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import SchemaError
from ...rows import Rows
from .._library import register
from .._rows import check_rows, format_of
from ..absorb import Rotation
from . import kernel, reference

__all__ = ["entry_attention"]


def _fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


_op = register(
    "entry_attention(Tensor q, Tensor[] window, Tensor slots, Tensor positions, int q_len, "
    "int window_size, float scale, Tensor sinks, Tensor cos, Tensor sin, Tensor[] own, "
    "Tensor[] entries, Tensor? table, int compression, Tensor? selected) -> Tensor",
    reference=reference.entry_attention,
    kernel=kernel.launch,
    fake=_fake,
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"entry_attention: {message}")


def entry_attention(
    q: Tensor,
    ring: Rows,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    *,
    window: int,
    scale: float,
    sinks: Tensor,
    rotation: Rotation,
    own: Rows | None = None,
    entries: Rows | None = None,
    table: Tensor | None = None,
    compression: int = 0,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend to each token's window and compressed entries, and rotate the result back.

    One kernel or, where the list of rows is split, two; on the current stream, without
    synchronizing; can be captured. With a float32 query all products are float32. With bfloat16
    the products of quantised dims are float16, in which codes are exact, the others bfloat16;
    all sums are float32. There a quantised value beyond 65504 becomes infinite.

    Args:
        q: [T, H, d] bfloat16 or float32, rotated; contiguous last axis.
        ring: the window's rows, [S1, R, ...], R >= window.
        slots: [T] int32, -1 for padding.
        positions: [T] int32.
        q_len: tokens a row.
        window: tokens that a token sees uncompressed, itself included (W).
        scale: of the logits.
        sinks: [H] float32, each a logit that takes weight and gives no value.
        rotation: at the tokens' positions.
        own: a prefill chunk's window rows, [1, T, ...], not yet in the ring.
        entries: compressed entries in the ring's format, [blocks, entries of a block, ...].
        table: [S1, width] int32 block ids, with entries.
        compression: tokens of an entry (m), with entries.
        selected: [T, K] int32, entries to attend to, ascending, then -1; None for all.

    Returns:
        [T, H, d] in q's dtype; zeros at padding.

    Raises:
        SchemaError: for shapes, dtypes or strides other than these.
    """
    _require(
        q.dtype in (torch.bfloat16, torch.float32) and q.dim() == 3 and q.stride(2) == 1,
        "q must be [T, H, d] bfloat16 or float32 with a contiguous last axis, "
        f"got {list(q.shape)} {q.dtype}",
    )
    tokens, heads, width = q.shape
    for name, given in (("slots", slots), ("positions", positions)):
        _require(
            given.dtype == torch.int32 and given.shape == (tokens,) and given.is_contiguous(),
            f"{name} must be [{tokens}] int32, contiguous, got {list(given.shape)} {given.dtype}",
        )
    _require(
        q_len >= 1 and tokens % q_len == 0,
        f"{tokens} tokens don't make whole rows of q_len={q_len}",
    )
    _require(
        sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous(),
        f"sinks must be [{heads}] float32, contiguous, got {list(sinks.shape)} {sinks.dtype}",
    )
    for part in rotation:
        _require(
            part.dtype == torch.float32
            and part.dim() == 2
            and part.shape[0] == tokens
            and part.is_contiguous(),
            f"cos and sin must be [{tokens}, rope_dim / 2] float32, contiguous, "
            f"got {list(part.shape)} {part.dtype}",
        )
    check_rows("entry_attention", "ring", ring, width)
    _require(
        1 <= window <= ring.values.shape[1],
        f"a ring of {ring.values.shape[1]} rows can't hold a window of {window}",
    )
    if own is not None:
        check_rows("entry_attention", "own", own, width)
        _require(own.values.shape[:2] == (1, tokens), f"own must be [1, {tokens}, ...]")
    if entries is not None:
        check_rows("entry_attention", "entries", entries, width)
        _require(
            compression >= 1
            and table is not None
            and table.dtype == torch.int32
            and table.dim() == 2
            and table.stride(1) == 1,
            "entries need a compression and a table, [S1, width] int32 with contiguous rows",
        )
        _require(format_of(entries) == format_of(ring), "entries and ring share a format")
    _require(
        selected is None
        or (
            entries is not None
            and selected.dtype == torch.int32
            and selected.dim() == 2
            and selected.shape[0] == tokens
            and selected.is_contiguous()
        ),
        f"selected must be [{tokens}, K] int32, contiguous, and goes with entries",
    )
    result: Tensor = _op(
        q, ring.parts(), slots, positions, q_len, window, scale, sinks, *rotation,
        [] if own is None else own.parts(), [] if entries is None else entries.parts(), table,
        compression if entries is not None else 0, selected,
    )  # fmt: skip
    return result
