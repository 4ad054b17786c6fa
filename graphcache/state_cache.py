"""One layer's sliding window for every slot: tensors at fixed addresses, written and read by slot.

Rows are keyed by position: position p of a slot lies in row `p % rows`. A slot is never wiped
when it changes hands. What a token may read follows from its position alone: the positions
`max(0, p - window + 1)..p`, every one of which the present request wrote before p is read. Rows of
an earlier request can't be among them, so they can't be seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InvalidSlot, SchemaError, UnsupportedLayer
from .ops.window_append import window_append
from .pool import Field, StatePool
from .rows import Fp8TokenRow, Fp8TokenRows
from .schema import LayerCacheSchema

__all__ = ["StateCachePool"]

_HEAD = "swa_head"


class StateCachePool:
    """The sliding window of one layer, for `max_requests` slots and one scratch slot.

    Made alone it owns its storage, a `StatePool` of its fields; given a `pool` laid out with
    `StateCachePool.fields` it is a set of views. S1 = max_requests + 1; the last slot is scratch
    and belongs to nobody.

    Args:
        schema: of the layer.
        max_requests: slots.
        device: of the storage, when it is made here; a given `pool` decides its own.
        pool: shared storage with a row for each slot.
        prefix: of the fields' names in `pool`.
        swa_head: [S1] int32, any stride, to use as the attribute instead of a field of its own,
            such as a column of scalars kept for all layers.

    Attributes:
        swa_fp8: [S1, rows, entry_head_dim - rope_dim] uint8: e4m3 codes.
        swa_rope: [S1, rows, rope_dim] bfloat16: the rotated part.
        swa_inv: [S1, rows] float32: inverse scale of each token; value = e4m3 * inv.
        swa_pos: [S1, rows] int32: position that each row holds; -1 from admission until written.
        swa_head: [S1] int32: next row to write, `length % rows`.
        tail_ka, tail_za, tail_kb, tail_zb, tail_len: None: a layer of window only has no tail.
        schema, max_requests, device: as given.
        window: tokens a read sees (W).
        rows: rows of the ring (R), `schema.swa_rows`.
        pool: the storage.

    Raises:
        UnsupportedLayer: for a layer with compression (CSA, HCA).
        SchemaError: when `pool` or `swa_head` doesn't fit.
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        max_requests: int,
        device: torch.device | str = "cuda",
        *,
        pool: StatePool | None = None,
        prefix: str = "",
        swa_head: Tensor | None = None,
    ) -> None:
        fields = self.fields(schema, prefix, head=swa_head is None)
        if pool is None:
            pool = StatePool(fields, max_requests, device)
        _check_pool(pool, fields, max_requests)

        self.schema = schema
        self.max_requests = max_requests
        self.device = pool.device
        self.window = schema.swa_window_size
        self.rows = schema.swa_rows
        self.pool = pool
        self.swa_fp8 = pool[f"{prefix}swa_fp8"]
        self.swa_rope = pool[f"{prefix}swa_rope"]
        self.swa_inv = pool[f"{prefix}swa_inv"]
        self.swa_pos = pool[f"{prefix}swa_pos"]
        if swa_head is None:
            swa_head = pool[f"{prefix}{_HEAD}"]
        _check_head(swa_head, self.swa_pos)
        self.swa_head = swa_head
        self.tail_ka: Tensor | None = None
        self.tail_za: Tensor | None = None
        self.tail_kb: Tensor | None = None
        self.tail_zb: Tensor | None = None
        self.tail_len: Tensor | None = None

        self._format = _row_format(schema)
        # Position relative to the reader's, oldest first. Made here: a read must not allocate it.
        self._reach = torch.arange(
            1 - self.window, 1, dtype=torch.int32, device=self.swa_pos.device
        )

    @classmethod
    def fields(
        cls, schema: LayerCacheSchema, prefix: str = "", *, head: bool = True
    ) -> tuple[Field, ...]:
        """What a shared pool must hold for this layer.

        Args:
            schema: of the layer.
            prefix: put before each name.
            head: include `swa_head`; False where a tensor is given for it.

        Raises:
            UnsupportedLayer: for a layer with compression.
        """
        if schema.compression:
            raise UnsupportedLayer(
                f"a {schema.attn_type.name} layer (compression={schema.compression}) needs tails "
                "and compressed entries, which come in a later version; only SWA layers are served"
            )
        tags = Field(f"{prefix}swa_pos", (schema.swa_rows,), torch.int32, initial=-1, reset=True)
        window = _row_format(schema).fields(f"{prefix}swa", schema.swa_rows)
        heads = (Field(f"{prefix}{_HEAD}", (), torch.int32, reset=True),) if head else ()
        return (*window, tags, *heads)

    def reset_slot(self, slot: int) -> None:
        """Make a slot ready for a new request: tags to -1, head to 0. Its rows keep their bytes.

        Two small fills on the current stream; doesn't synchronize.

        Raises:
            InvalidSlot: unless `slot` is an int and 0 <= slot < max_requests.
        """
        if not isinstance(slot, int) or isinstance(slot, bool):
            raise InvalidSlot(f"a slot is an int, got {slot!r} of type {type(slot).__name__}")
        if not 0 <= slot < self.max_requests:
            raise InvalidSlot(
                f"slot {slot} is outside 0..{self.max_requests - 1}; padding and scratch have no "
                "state to reset"
            )
        self.swa_pos[slot].fill_(-1)
        self.swa_head[slot].fill_(0)

    def memory_bytes(self) -> int:
        """Bytes of the tensors, the scratch slot included, the pool's alignment not."""
        tensors = (self.swa_fp8, self.swa_rope, self.swa_inv, self.swa_pos, self.swa_head)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def append(self, entries: Tensor, slots: Tensor, positions: Tensor, q_len: int = 1) -> None:
        """Quantise and write entries; one kernel, see `window_append`. `swa_head` is left alone.

        Args:
            entries: [T, entry_head_dim] float32 or bfloat16.
            slots: [T] int32, -1 for padding, which writes nothing.
            positions: [T] int32.
            q_len: tokens a row of the batch.
        """
        window_append(
            entries,
            self.swa_fp8,
            self.swa_rope,
            self.swa_inv,
            self.swa_pos,
            slots,
            positions,
            q_len,
        )

    def read_window(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What each token's window holds, decoded; to be called after the step's `append`.

        Torch operations of fixed shapes on the current stream; doesn't synchronize; can be
        captured.

        Args:
            slots: [T] int32, -1 for padding.
            positions: [T] int32, each written by its slot.

        Returns:
            entries [T, W, entry_head_dim] float32 and valid [T, W] bool; column w is position
            `positions - (W - 1) + w`. Entries are zero where not valid: before position 0 and for
            padding.
        """
        wanted = positions.unsqueeze(1) + self._reach
        valid = (wanted >= 0) & (slots >= 0).unsqueeze(1)
        # Padding reads the scratch slot; a position before 0 reads row 0.
        slot = torch.where(slots >= 0, slots, self.max_requests).long().unsqueeze(1)
        row = wanted.clamp(min=0).long() % self.rows
        stored = Fp8TokenRows(
            self.swa_fp8[slot, row], self.swa_rope[slot, row], self.swa_inv[slot, row]
        )
        # Selected, not multiplied: rows that were never written may hold NaN.
        entries = torch.where(valid.unsqueeze(2), self._format.decode(stored), 0.0)
        return entries, valid

    def set_length(self, slots: Tensor, lengths: Tensor) -> None:
        """Set `swa_head` to `lengths % rows`, for callers who keep lengths themselves.

        Torch operations on the current stream; doesn't synchronize; can be captured.

        Args:
            slots: [n] int32, each once; -1 for padding, for which scratch is set to 0.
            lengths: [n] int32, tokens absorbed.
        """
        real = slots >= 0
        slot = torch.where(real, slots, self.max_requests).long()
        self.swa_head[slot] = torch.where(real, lengths % self.rows, 0).int()


def _row_format(schema: LayerCacheSchema) -> Fp8TokenRow:
    return Fp8TokenRow(schema.entry_head_dim, schema.rope_dim)


def _check_pool(pool: StatePool, fields: tuple[Field, ...], max_requests: int) -> None:
    if pool.rows != max_requests:
        raise SchemaError(
            f"the pool has {pool.rows} rows, not one for each of {max_requests} slots"
        )
    for field in fields:
        found = pool.fields.get(field.name)
        if found != field:
            raise SchemaError(
                f"the pool needs {field}, and has {found}; lay it out with StateCachePool.fields"
            )


def _check_head(swa_head: Tensor, swa_pos: Tensor) -> None:
    if (
        swa_head.shape != swa_pos.shape[:1]
        or swa_head.dtype != torch.int32
        or swa_head.device != swa_pos.device
    ):
        raise SchemaError(
            f"swa_head must be [{swa_pos.shape[0]}] int32 on {swa_pos.device}, "
            f"got {tuple(swa_head.shape)} {swa_head.dtype} on {swa_head.device}"
        )
