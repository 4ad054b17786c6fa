"""One ordinary layer's K and V by slot, in a ring or in blocks: what attention calls."""

from __future__ import annotations

from torch import Tensor

from .batch import Batch
from .errors import SchemaError
from .kept import KeptRows
from .ops._kv import check_attention
from .ops.decode_attention import decode_attention
from .ops.kv_append import kv_append
from .ops.prefill_attention import prefill_attention
from .rings import WindowRing
from .schema import KVLayerSchema
from .scopes import scope

__all__ = ["KVLayer"]


class KVLayer:
    """K and V of one layer.

    Args:
        schema: of the layer.
        k: [slots or blocks, kv_heads, rows, k_head_dim], a view of the arena.
        v: [slots or blocks, kv_heads, rows, v_head_dim], likewise.
        table: [max_requests + 1, width] int32 when k and v are blocks; None for rings.
    """

    boundary = 1
    """At lengths that are multiples of it no compressed entry is half complete: at all."""

    def __init__(self, schema: KVLayerSchema, k: Tensor, v: Tensor, table: Tensor | None) -> None:
        self.schema = schema
        self.k = k
        self.v = v
        self.table = table

    def kept_rows(self, length: int) -> list[KeptRows]:
        """What a slot of `length` tokens needs of its row to go on: of K, V in blocks, nothing."""
        if self.schema.window is None:
            return []
        needed = WindowRing(self.k.shape[2], self.schema.window).needed(length)
        heads = (*self.k.unbind(1), *self.v.unbind(1))
        return [KeptRows(ring, needed) for ring in heads]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Absorb the batch's K and V and attend to all that each token may see. Two nodes.

        A step appends first and reads the cache; a prefill chunk, which may be longer than a
        ring, reads its own rows from its input and appends last. Runs on the current stream
        without synchronizing.

        Args:
            q: [T, heads, k_head_dim], rotary applied; `heads` is a multiple of `kv_heads`.
            k: [T, kv_heads, k_head_dim], rotary applied.
            v: [T, kv_heads, v_head_dim].
            batch: whose tokens these are.
            scale: of the logits.
            window: tokens a query sees, itself included; 0 for the schema's.
            softcap: logits become `softcap * tanh(logits / softcap)`; 0 for none.
            sinks: [heads], logits of a sink that takes weight and gives no value.

        Returns:
            [T, heads, v_head_dim] in q's dtype; zeros at padding.

        Raises:
            SchemaError: for a window wider than the ring was laid out for, or shapes that don't
                fit; nothing is written then.
        """
        kept = self.schema.window
        if kept is not None and window > kept:
            raise SchemaError(f"the layer keeps a window of {kept} tokens, asked for {window}")
        window = window or kept or 0
        if batch.prefill:
            attended = prefill_attention(
                q, k, v, self.k, self.v, batch.slots, batch.positions, batch.q_len, scale,
                self.table, window, softcap, sinks,
            )  # fmt: skip
            kv_append(k, v, self.k, self.v, batch.slots, batch.positions, batch.q_len, self.table)
            return attended
        check_attention(
            "attend", q, self.k, self.v, batch.slots, batch.positions, batch.q_len, self.table,
            window, softcap, sinks,
        )  # fmt: skip
        with scope("append"):
            kv_append(k, v, self.k, self.v, batch.slots, batch.positions, batch.q_len, self.table)
        with scope("attend"):
            return decode_attention(
                q, self.k, self.v, batch.slots, batch.positions, batch.q_len, scale,
                self.table, window, softcap, sinks,
            )  # fmt: skip
