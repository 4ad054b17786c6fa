"""What the three operations on K/V share: how a cache is laid out, and what they refuse.

A layer's cache is `k_cache [N, Hkv, Rw, Dk]` and `v_cache [N, Hkv, Rw, Dv]`. Without a table it is
a ring by slot: position p of slot s is row `p % Rw` of `cache[s]`. With `table [S1, W]` it is
blocks: row `p % Rw` of `cache[table[s, p // Rw]]`. Only the stride of the first axis is free; what
lies under it is contiguous.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import SchemaError
from ._triton import jit, tl

__all__ = [
    "attend",
    "check_attention",
    "check_cache",
    "check_rows",
    "gather_rows",
    "load_block",
    "logit_scales",
    "softmax_step",
    "with_sink",
]

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gather_rows(cache: Tensor, table: Tensor | None, slot: int, first: int, last: int) -> Tensor:
    """Positions `first..last` of a slot as [Hkv, last - first + 1, D]; CPU reference only."""
    rows = cache.shape[2]
    if table is None:
        start, stop = first % rows, last % rows
        if start <= stop and last - first < rows:
            return cache[slot, :, start : stop + 1]
        return cache[slot].index_select(1, torch.arange(first, last + 1) % rows)
    blocks = table[slot, first // rows : last // rows + 1].long()
    heads, dim = cache.shape[1], cache.shape[3]
    joined = cache[blocks].transpose(0, 1).reshape(heads, -1, dim)
    return joined[:, first % rows : first % rows + last - first + 1]


def logit_scales(scale: float, softcap: float) -> tuple[float, float]:
    """The factors of `softmax_step`."""
    log2e = math.log2(math.e)
    if softcap:
        return 2 * log2e * scale / softcap, softcap * log2e
    return scale * log2e, 0.0


@jit
def softmax_step(  # type: ignore[no-untyped-def]
    query,
    k,
    v,
    allowed,
    acc,
    total,
    most,
    factor,
    cap,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One block of keys into an online softmax: weighted sum, total weight, largest logit.

    Logits are in powers of two: `scale * q . k`, or `softcap * tanh(scale * q . k / softcap)` with
    tanh(x) = 1 - 2 / (e^2x + 1), which is right at both ends, where e^2x is 0 or inf. A block in
    which a row is allowed nothing leaves that row's bits as they were.
    """
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    logits = tl.dot(query, tl.trans(k), input_precision="ieee") * factor
    if SOFTCAP:
        logits = cap * (1.0 - 2.0 / (tl.exp2(logits) + 1.0))
    logits = tl.where(allowed, logits, float("-inf"))
    top = tl.maximum(most, tl.max(logits, 1))
    # Where every logit so far is -inf, -inf - -inf would be NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, top


@jit
def with_sink(acc, total, most, sinks, head, real, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide by the denominator, the sink's share included."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(most, sink)
        shrink = tl.exp2(most - top)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - top)
    return acc / total[:, None]


@jit
def load_block(  # type: ignore[no-untyped-def]
    k_cache,
    v_cache,
    table_row,
    slot,
    kv_head,
    k_cache_stride,
    v_cache_stride,
    start,
    inside,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """K [BLOCK_N, K_BLOCK] and V [BLOCK_N, V_BLOCK] of positions from `start`; 0 where not inside.

    Zeros, since a row that was never written may hold NaN, and a weight of 0 does not mask that.
    """
    position = start + tl.arange(0, BLOCK_N)
    if HAS_TABLE:
        if ROWS % BLOCK_N == 0:
            place = tl.load(table_row + start // ROWS).to(tl.int64)
        else:
            place = tl.load(table_row + position // ROWS, mask=inside, other=0)
            place = place.to(tl.int64)[:, None]
    else:
        place = slot
    row = position % ROWS
    if ROWS % BLOCK_N == 0:
        row = start % ROWS + tl.arange(0, BLOCK_N)
    row = (kv_head.to(tl.int64) * ROWS + row)[:, None]
    k_lane = tl.arange(0, K_BLOCK)[None, :]
    v_lane = tl.arange(0, V_BLOCK)[None, :]
    k_inside = inside[:, None] & (k_lane < K_DIM)
    v_inside = inside[:, None] & (v_lane < V_DIM)
    k_at = k_cache + place * k_cache_stride + row * K_DIM + k_lane
    v_at = v_cache + place * v_cache_stride + row * V_DIM + v_lane
    return tl.load(k_at, mask=k_inside, other=0), tl.load(v_at, mask=v_inside, other=0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Attention of q [H, n, Dk] over k [Hkv, m, Dk] and v [Hkv, m, Dv]: [H, n, Dv] in fp32.

    `allowed` is [n, m] bool, None for all. CPU reference only.
    """
    heads, queries, dim = q.shape
    grouped = q.float().reshape(k.shape[0], -1, dim)
    logits = (grouped @ k.float().transpose(1, 2) * scale).view(heads, queries, -1)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    most = logits.amax(2, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1)
        most = torch.maximum(most, sink)
    weight = torch.exp(logits - most)
    total = weight.sum(2, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - most)
    values = weight.view(k.shape[0], -1, weight.shape[2]) @ v.float()
    return values.view(heads, queries, -1) / total


def check_cache(
    operation: str,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    table: Tensor | None,
) -> None:
    """Refuse what the layout above does not describe; shapes and strides only, no device access."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise SchemaError(f"{operation}: {message}")

    require(
        k_cache.dtype in CACHE_DTYPES and v_cache.dtype == k_cache.dtype,
        "k_cache and v_cache must share a dtype of float32, bfloat16 or float16, "
        f"got {k_cache.dtype} and {v_cache.dtype}",
    )
    require(
        k_cache.dim() == 4 and v_cache.dim() == 4 and k_cache.shape[:3] == v_cache.shape[:3],
        "k_cache must be [N, Hkv, Rw, Dk] and v_cache [N, Hkv, Rw, Dv], "
        f"got {list(k_cache.shape)} and {list(v_cache.shape)}",
    )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _, _, rows, dim = cache.shape
        require(
            cache.stride()[1:] == (rows * dim, dim, 1),
            f"{name}[i] must be contiguous, got strides {list(cache.stride())} "
            f"for {list(cache.shape)}",
        )
    for name, index in (("slots", slots), ("positions", positions)):
        require(
            index.dtype == torch.int32 and index.dim() == 1 and index.is_contiguous(),
            f"{name} must be [T] int32 and contiguous, got {index.dtype} {list(index.shape)}",
        )
    tokens = slots.shape[0]
    require(
        q_len >= 1 and tokens % q_len == 0 and positions.shape[0] == tokens,
        f"slots and positions must be [rows * q_len] with q_len={q_len}, "
        f"got {tokens} and {positions.shape[0]}",
    )
    require(
        table is None or (table.dtype == torch.int32 and table.dim() == 2 and table.stride(1) == 1),
        "table must be [S1, W] int32 with contiguous rows",
    )


def check_rows(operation: str, name: str, rows: Tensor, shape: tuple[int, int, int]) -> None:
    """Refuse rows by head that are not `shape`, or not float, or strided within a head."""
    if rows.dtype not in CACHE_DTYPES:
        raise SchemaError(
            f"{operation}: {name} must be float32, bfloat16 or float16, got {rows.dtype}"
        )
    if rows.shape != shape or rows.stride(2) != 1:
        raise SchemaError(
            f"{operation}: {name} must be {list(shape)} with a contiguous last axis, "
            f"got {list(rows.shape)} with strides {list(rows.stride())}"
        )


def check_attention(
    operation: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    table: Tensor | None,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """`check_cache`, and what both attentions ask of q, the mask and the sinks."""
    check_cache(operation, k_cache, v_cache, slots, positions, q_len, table)
    if q.dim() != 3 or q.shape[1] % k_cache.shape[1]:
        raise SchemaError(
            f"{operation}: q must be [T, H, Dk] with H a multiple of Hkv={k_cache.shape[1]}, "
            f"got {list(q.shape)}"
        )
    check_rows(operation, "q", q, (slots.shape[0], q.shape[1], k_cache.shape[3]))
    if window < 0 or softcap < 0:
        raise SchemaError(
            f"{operation}: window and softcap are 0 or positive, got {window} and {softcap}"
        )
    if sinks is not None and (
        sinks.dtype not in CACHE_DTYPES or sinks.shape != q.shape[1:2] or sinks.stride(0) != 1
    ):
        raise SchemaError(
            f"{operation}: sinks must be [H={q.shape[1]}] float and contiguous, "
            f"got {sinks.dtype} {list(sinks.shape)}"
        )
