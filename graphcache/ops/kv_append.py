"""Write a step's rows of K and V into a layer's cache, a ring by slot or blocks: one kernel.

Padding (slot -1) writes nothing. Of a run longer than a ring only the last `Rw` positions are
written, so no row is written twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._kv import check_cache, check_rows
from ._library import register
from ._triton import jit_for_any, tl, triton

__all__ = ["kv_append"]

TILE_ELEMENTS = 2048
"""Most elements of K, and of V, that one program moves; a program takes at least one head."""


def _reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    table: Tensor | None,
) -> None:
    rows = k_cache.shape[2]
    written = slots >= 0
    if table is None and q_len > rows:
        later = written.view(-1, q_len)[:, rows:].clone()
        written.view(-1, q_len)[:, :-rows] &= ~later
    tokens = written.nonzero().squeeze(1)
    place, position = slots[tokens].long(), positions[tokens].long()
    if table is not None:
        place = table[place, position // rows].long()
    row = position % rows
    k_cache[place, :, row] = k[tokens].to(k_cache.dtype)
    v_cache[place, :, row] = v[tokens].to(v_cache.dtype)


@jit_for_any("q_len")
def _kv_append_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    k_cache,
    v_cache,
    slots,
    positions,
    table,
    q_len,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_cache_stride,
    v_cache_stride,
    table_stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    OUTRUNS: tl.constexpr,
):
    """One program a token and group of heads."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    # Not predicated on the slot: all loads of a program are in flight together.
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None].to(tl.int64)
    k_lane = tl.arange(0, K_BLOCK)[None, :]
    v_lane = tl.arange(0, V_BLOCK)[None, :]
    k_inside = (head < HEADS) & (k_lane < K_DIM)
    v_inside = (head < HEADS) & (v_lane < V_DIM)
    k_at = token.to(tl.int64) * k_token_stride + head * k_head_stride + k_lane
    v_at = token.to(tl.int64) * v_token_stride + head * v_head_stride + v_lane
    k_rows = tl.load(k + k_at, mask=k_inside, other=0)
    v_rows = tl.load(v + v_at, mask=v_inside, other=0)

    write = slot >= 0
    if OUTRUNS:
        goes_on = write & (token % q_len + ROWS < q_len)
        write = write & (tl.load(slots + token + ROWS, mask=goes_on, other=-1) < 0)
    place = slot.to(tl.int64)
    if HAS_TABLE:
        entry = table + place * table_stride + position // ROWS
        place = tl.load(entry, mask=write, other=0).to(tl.int64)
    row = head * ROWS + position % ROWS
    k_to = k_cache + place * k_cache_stride + row * K_DIM + k_lane
    v_to = v_cache + place * v_cache_stride + row * V_DIM + v_lane
    tl.store(k_to, k_rows.to(k_cache.dtype.element_ty), mask=k_inside & write)
    tl.store(v_to, v_rows.to(v_cache.dtype.element_ty), mask=v_inside & write)


def _launch(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    table: Tensor | None,
) -> None:
    tokens, heads, k_dim = k.shape
    if not tokens:
        return
    rows, v_dim = k_cache.shape[2], v.shape[2]
    k_block, v_block = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    head_block = max(1, TILE_ELEMENTS // max(k_block, v_block))
    head_block = min(head_block, triton.next_power_of_2(heads))
    kernel: Any = _kv_append_kernel
    kernel[(tokens, triton.cdiv(heads, head_block))](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        positions,
        slots if table is None else table,
        q_len,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        0 if table is None else table.stride(0),
        HEADS=heads,
        ROWS=rows,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=k_block,
        V_BLOCK=v_block,
        HEAD_BLOCK=head_block,
        HAS_TABLE=table is not None,
        OUTRUNS=table is None and q_len > rows,
        num_warps=max(1, min(4, head_block * max(k_block, v_block) // 512)),
    )


def _fake(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    table: Tensor | None,
) -> None:
    return None


_op = register(
    "kv_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots,"
    " Tensor positions, int q_len, Tensor? table) -> ()",
    reference=_reference,
    kernel=_launch,
    fake=_fake,
)


def kv_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    q_len: int,
    table: Tensor | None = None,
) -> None:
    """Write each token's K and V to its position in the cache. One node, no allocation.

    Position p of slot s is row `p % Rw` of `cache[s]` (a ring), or with a table row `p % Rw` of
    `cache[table[s, p // Rw]]` (blocks). Tokens at padding write nothing, whatever k and v hold
    there; of a run longer than a ring only the last Rw positions are written. Runs on the current
    stream without synchronizing.

    Args:
        k: [T, Hkv, Dk], rotary applied; T = rows x q_len, row-major. Any strides but the last;
            cast to the cache's dtype.
        v: [T, Hkv, Dv], likewise.
        k_cache: [N, Hkv, Rw, Dk] float32, bfloat16 or float16; written. The stride of the first
            axis is free, the rest is contiguous. N is slots and scratch, or blocks and scratch.
        v_cache: [N, Hkv, Rw, Dv], likewise.
        slots: [T] int32, -1 for padding; a row's tokens are one ascending run at its start.
        positions: [T] int32.
        q_len: tokens a row.
        table: [S1, W] int32, the blocks of each slot; None for a ring. Every position written must
            have its block there: it is not checked.

    Raises:
        SchemaError: for other dtypes, shapes or strides; nothing is written then.
    """
    check_cache("kv_append", k_cache, v_cache, slots, positions, q_len, table)
    tokens, heads = slots.shape[0], k_cache.shape[1]
    check_rows("kv_append", "k", k, (tokens, heads, k_cache.shape[3]))
    check_rows("kv_append", "v", v, (tokens, heads, v_cache.shape[3]))
    _op(k, v, k_cache, v_cache, slots, positions, q_len, table)
