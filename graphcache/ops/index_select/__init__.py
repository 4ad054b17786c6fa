"""Which compressed entries a token attends to: the top of an indexer's scores, by two kernels.

The first scores a token's visible entries. Many programs share one token's entries, each tile of
them a matrix product with the token's query heads, so one request fills the device. Scores are left
as integers in the same order, and the largest of each group of them beside.

The second finds the k-th largest, one program a token, without a pass over all scores where there
are many. A lane holds the largest of the scores that fall to it, and the k-th largest of the lanes,
to 16 bits, is a lower bound of what is sought: about 1.4 k entries reach it if there are 2 k lanes.
Only they are listed and searched, two bits of the score a step. Then those above the k-th
largest are taken, and of its equals the first ones, in the order of their indices.

Scores depend on the token, its slot's entries and the schema only, and the selection on the scores
only: a token's result is the same in every batch and at every row.

Both leave padding (slot -1), and tokens that see no more than k entries, without a look at them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SchemaError
from .._library import register
from . import kernel, reference

__all__ = ["index_select"]


def _fake(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    compression: int,
    top_k: int,
) -> Tensor:
    return slots.new_empty((slots.shape[0], top_k))


_op = register(
    "index_select(Tensor q, Tensor weights, Tensor key_values, Tensor? key_scales, Tensor table,"
    " Tensor slots, Tensor positions, int compression, int top_k) -> Tensor",
    reference=reference.index_select,
    kernel=kernel.launch,
    fake=_fake,
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SchemaError(f"index_select: {message}")


def _check_keys(key_values: Tensor, key_scales: Tensor | None, dim: int) -> None:
    _require(
        key_values.dim() == 3
        and key_values.shape[2] == dim
        and key_values.shape[1] > 0
        and key_values.stride(2) == 1,
        f"key_values must be [N, E, Di={dim}] with a contiguous last axis, "
        f"got {list(key_values.shape)} with strides {list(key_values.stride())}",
    )
    if key_scales is None:
        _require(
            key_values.dtype in (torch.float32, torch.bfloat16),
            f"key_values without scales must be float32 or bfloat16, got {key_values.dtype}",
        )
        return
    _require(
        key_values.dtype == torch.uint8,
        f"key_values with scales must be uint8 (e4m3fn codes), got {key_values.dtype}",
    )
    _require(
        key_scales.dtype == torch.float32 and key_scales.shape == key_values.shape[:2],
        f"key_scales must be float32 {list(key_values.shape[:2])}, "
        f"got {key_scales.dtype} {list(key_scales.shape)}",
    )


def index_select(
    q: Tensor,
    weights: Tensor,
    key_values: Tensor,
    key_scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    compression: int,
    top_k: int,
) -> Tensor:
    """Select the compressed entries that each token attends to. Two nodes.

    A token at position p sees the first `n = (p + 1) // compression` entries of its slot, the one
    that it completes itself included: call this after that entry was written. With

        score[s] = sum over heads h of weights[t, h] * relu(q[t, h] . key[s])        s < n

    (DeepSeek-V4 report, arXiv 2606.19348, the lightning indexer) the `min(top_k, n)` entries of the
    largest scores are selected; of equal scores the lower index. A NaN ranks below every number,
    -inf too. Products and sums are float32; bfloat16 factors, to which e4m3 codes convert exactly,
    go through tensor cores.

    Runs on the current stream without synchronizing; allocates the output, and scratch of
    `8.5 * width * E + 16` bytes a token. Where no slot has room for more than `top_k` entries there
    is neither scratch nor scoring, and one node. An entry at or past n is never read, nor a column
    of the table past `(n - 1) // E`. Where every score differs by more than rounding, kernels and
    reference select the same.

    Args:
        q: [T, Hi, Di] bfloat16 or float32, rotated. Any strides but the last.
        weights: [T, Hi] float32, every scaling folded in; may be negative. Contiguous rows.
        key_values: [N, E, Di], the entries in blocks: uint8 (e4m3fn codes) with `key_scales`, or
            bfloat16 or float32 without. Any strides but the last.
        key_scales: [N, E] float32, positive or NaN; a key is `e4m3 * scale`. Any strides.
        table: [S1, width] int32: entry s of slot b is row `s % E` of block `table[b, s // E]`.
            Every visible entry must have its block there: it is not checked.
        slots: [T] int32, contiguous; -1 for padding.
        positions: [T] int32, contiguous.
        compression: tokens an entry stands for, m.
        top_k: most entries selected, K.

    Returns:
        [T, K] int32: the selected entries' indices, ascending, then -1; nothing but -1 at padding.

    Raises:
        SchemaError: for other dtypes, shapes or strides.
    """
    _require(
        q.dim() == 3 and q.dtype in (torch.bfloat16, torch.float32) and q.stride(2) == 1,
        "q must be [T, Hi, Di] bfloat16 or float32 with a contiguous last axis, "
        f"got {q.dtype} {list(q.shape)} with strides {list(q.stride())}",
    )
    tokens, heads, dim = q.shape
    _require(
        weights.dtype == torch.float32
        and weights.shape == (tokens, heads)
        and (weights.stride(1) == 1 or heads == 1),
        f"weights must be float32 {[tokens, heads]} with contiguous rows, "
        f"got {weights.dtype} {list(weights.shape)} with strides {list(weights.stride())}",
    )
    _check_keys(key_values, key_scales, dim)
    _require(
        table.dtype == torch.int32
        and table.dim() == 2
        and table.shape[1] > 0
        and (table.stride(1) == 1 or table.shape[1] == 1),
        "table must be [S1, width] int32 with contiguous rows, "
        f"got {table.dtype} {list(table.shape)} with strides {list(table.stride())}",
    )
    for name, index in (("slots", slots), ("positions", positions)):
        _require(
            index.dtype == torch.int32 and index.shape == (tokens,) and index.is_contiguous(),
            f"{name} must be contiguous int32 [{tokens}], got {index.dtype} {list(index.shape)}",
        )
    _require(
        compression >= 1 and top_k >= 1,
        f"compression and top_k are at least 1, got {compression} and {top_k}",
    )
    out: Tensor = _op(
        q, weights, key_values, key_scales, table, slots, positions, compression, top_k
    )
    return out
