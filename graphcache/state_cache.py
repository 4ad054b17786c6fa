"""One entry layer's window and tail for every slot: tensors at fixed addresses, by slot.

Rows are keyed by position: position p of a slot lies in row `p % rows`. A slot is never wiped
when it changes hands. What a token may read follows from its position alone: the positions
`max(0, p - window + 1)..p`, every one of which the present request wrote before p is read. Rows of
an earlier request can't be among them, so they can't be seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InvalidSlot, SchemaError
from .kept import KeptRows
from .ops.absorb import TailParts, WindowParts, absorb
from .pool import Field, StatePool
from .rings import TailRing, WindowRing
from .rows import RowFormat
from .schema import LayerCacheSchema

__all__ = ["StateCachePool"]

_TAILS = ("tail_ka", "tail_za", "tail_kb", "tail_zb")


class StateCachePool:
    """The sliding window and the tail of one layer, for `max_requests` slots and one scratch slot.

    Made alone it owns its storage, a `StatePool` of its fields; given a `pool` laid out with
    `StateCachePool.fields` it is a set of views. S1 = max_requests + 1; the last slot is scratch
    and belongs to nobody.

    Args:
        schema: of the layer.
        max_requests: slots.
        device: of the storage, when it is made here; a given `pool` decides its own.
        pool: shared storage with a row for each slot.
        prefix: of the fields' names in `pool`.
        heads: [S1, n] int32, any stride, to use for `swa_head` and `tail_len` instead of fields of
            their own, such as columns of scalars kept for all layers; n is 1, with a tail 2.

    Attributes:
        swa_fp8: [S1, rows, entry_head_dim - rope_dim] uint8: e4m3 codes; None in other formats.
        swa_rope: [S1, rows, rope_dim] bfloat16: the rotated part; likewise.
        swa_inv: [S1, rows] float32: inverse scale of each token; value = e4m3 * inv; likewise.
        swa: the window's rows in any format, `Rows` of [S1, rows, ...].
        swa_pos: [S1, rows] int32: position that each row holds; -1 from admission until written.
        swa_head: [S1] int32: next row to write, `length % rows`.
        tail_ka, tail_za: [S1, tail rows, entry_head_dim] in the schema's `tail_dtype`: tokens that
            await compression and their gates, the `current` stream; None without compression.
        tail_kb, tail_zb: likewise, the `previous` stream; None without overlap.
        index_tail_ka, index_tail_za, index_tail_kb, index_tail_zb: likewise, of the indexer's
            keys, [S1, tail rows, indexer.head_dim]; None without an indexer.
        tail_len: [S1] int32: tokens of the open block, `length % compression`; None without.
        schema, max_requests, device: as given.
        window: tokens a read sees (W).
        rows: rows of the window's ring (R), `schema.swa_rows`.
        pool: the storage.

    Raises:
        SchemaError: when `pool` or `heads` doesn't fit.
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        max_requests: int,
        device: torch.device | str = "cuda",
        *,
        pool: StatePool | None = None,
        prefix: str = "",
        heads: Tensor | None = None,
    ) -> None:
        fields = self.fields(schema, prefix, heads=heads is None)
        if pool is None:
            pool = StatePool(fields, max_requests, device)
        _check_pool(pool, fields, max_requests)

        self.schema = schema
        self.max_requests = max_requests
        self.device = pool.device
        self.window = schema.swa_window_size
        self.rows = schema.swa_rows
        self.pool = pool
        self.swa = schema.row.view(pool, f"{prefix}swa", self.rows)
        self.swa_fp8: Tensor | None = None
        self.swa_rope: Tensor | None = None
        self.swa_inv: Tensor | None = None
        if schema.row_format is RowFormat.FP8:
            self.swa_fp8, self.swa_rope, self.swa_inv = self.swa
        self.swa_pos = pool[f"{prefix}swa_pos"]
        if heads is None:
            names = _head_names(schema)
            columns = [pool[f"{prefix}{name}"] for name in names]
        else:
            _check_heads(heads, self.swa_pos, len(_head_names(schema)))
            columns = list(heads.unbind(1))
        self.swa_head = columns[0]
        self.tail_len = columns[1] if schema.compression else None
        self.tail_ka, self.tail_za, self.tail_kb, self.tail_zb = _rings(pool, prefix)
        (
            self.index_tail_ka,
            self.index_tail_za,
            self.index_tail_kb,
            self.index_tail_zb,
        ) = _rings(pool, f"{prefix}index_")

        # Position relative to the reader's, oldest first. Made here: a read must not allocate it.
        self._reach = torch.arange(
            1 - self.window, 1, dtype=torch.int32, device=self.swa_pos.device
        )

    @classmethod
    def fields(
        cls, schema: LayerCacheSchema, prefix: str = "", *, heads: bool = True
    ) -> tuple[Field, ...]:
        """What a shared pool must hold for this layer.

        Args:
            schema: of the layer.
            prefix: put before each name.
            heads: include `swa_head` and `tail_len`; False where tensors are given for them.
        """
        tags = Field(f"{prefix}swa_pos", (schema.swa_rows,), torch.int32, initial=-1, reset=True)
        window = schema.row.fields(f"{prefix}swa", schema.swa_rows)
        names = _head_names(schema) if heads else ()
        return (
            *window,
            *_ring_fields(schema, prefix),
            tags,
            *(Field(f"{prefix}{name}", (), torch.int32, reset=True) for name in names),
        )

    @staticmethod
    def moduli(schema: LayerCacheSchema) -> tuple[int, ...]:
        """What `swa_head` and `tail_len` are the length modulo, in this order."""
        return (schema.swa_rows, schema.compression) if schema.compression else (schema.swa_rows,)

    @property
    def tail(self) -> TailParts | None:
        """The tail's rings; None without compression."""
        if self.tail_ka is None or self.tail_za is None:
            return None
        return TailParts(self.tail_ka, self.tail_za, self.tail_kb, self.tail_zb)

    @property
    def index_tail(self) -> TailParts | None:
        """The rings of the indexer's tail; None without one."""
        if self.index_tail_ka is None or self.index_tail_za is None:
            return None
        return TailParts(
            self.index_tail_ka, self.index_tail_za, self.index_tail_kb, self.index_tail_zb
        )

    @property
    def window_parts(self) -> WindowParts:
        """The window's rows and the position that each holds."""
        return WindowParts(self.swa, self.swa_pos)

    def kept_rows(self, length: int) -> list[KeptRows]:
        """The rows that a slot of `length` tokens needs to go on; all others may be anything.

        That is the window before the next token, what the open block has so far, and with overlap
        the previous stream of the block before it.
        """
        window = WindowRing(self.rows, self.window).needed(length)
        kept = [KeptRows(ring, window) for ring in (*self.swa.parts(), self.swa_pos)]
        rows, m = self.schema.tail_buffer_size, self.schema.compression
        for tail in (self.tail, self.index_tail):
            if tail is None:
                continue
            current = TailRing(rows, m, 0).needed(length)
            kept += [KeptRows(ring, current) for ring in (tail.values, tail.gates)]
            if tail.previous_values is not None and tail.previous_gates is not None:
                previous = TailRing(rows, m, 1).needed(length)
                rings = (tail.previous_values, tail.previous_gates)
                kept += [KeptRows(ring, previous) for ring in rings]
        return kept

    def reset_slot(self, slot: int) -> None:
        """Make a slot ready for a new request: tags -1, head and tail length 0.

        Its rows keep their bytes. Small fills on the current stream; doesn't synchronize.

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
        if self.tail_len is not None:
            self.tail_len[slot].fill_(0)

    def memory_bytes(self) -> int:
        """Bytes of the tensors, the scratch slot included, the pool's alignment not."""
        row = sum(field.row_bytes for field in self.fields(self.schema))
        return (self.max_requests + 1) * row

    def append(self, entries: Tensor, slots: Tensor, positions: Tensor, q_len: int = 1) -> None:
        """Quantise and write entries into the window; one kernel, see `ops.absorb`.

        For callers who keep a window only: tails and `swa_head` are left alone.

        Args:
            entries: [T, entry_head_dim] float32 or bfloat16.
            slots: [T] int32, -1 for padding, which writes nothing.
            positions: [T] int32.
            q_len: tokens a row of the batch.
        """
        absorb(entries, self.window_parts, slots, positions, q_len)

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
        stored = self.swa.map(lambda part: part[slot, row])
        # Selected, not multiplied: rows that were never written may hold NaN.
        entries = torch.where(valid.unsqueeze(2), self.schema.row.decode(stored), 0.0)
        return entries, valid

    def set_length(self, slots: Tensor, lengths: Tensor) -> None:
        """Set `swa_head` and `tail_len` from lengths, for callers who keep those themselves.

        Torch operations on the current stream; doesn't synchronize; can be captured.

        Args:
            slots: [n] int32, each once; -1 for padding, for which scratch is set to 0.
            lengths: [n] int32, tokens absorbed.
        """
        real = slots >= 0
        slot = torch.where(real, slots, self.max_requests).long()
        self.swa_head[slot] = torch.where(real, lengths % self.rows, 0).int()
        if self.tail_len is not None:
            self.tail_len[slot] = torch.where(real, lengths % self.schema.compression, 0).int()


def _head_names(schema: LayerCacheSchema) -> tuple[str, ...]:
    return ("swa_head", "tail_len") if schema.compression else ("swa_head",)


def _ring_fields(schema: LayerCacheSchema, prefix: str) -> list[Field]:
    if not schema.compression:
        return []
    names = _TAILS if schema.overlap else _TAILS[:2]
    widths = {"": schema.entry_head_dim}
    if schema.indexer is not None:
        widths["index_"] = schema.indexer.head_dim
    return [
        Field(f"{prefix}{kind}{name}", (schema.tail_buffer_size, width), schema.tail_dtype)
        for kind, width in widths.items()
        for name in names
    ]


def _rings(pool: StatePool, prefix: str) -> list[Tensor | None]:
    """The rings that a layer has there, None for the others."""
    names = [f"{prefix}{name}" for name in _TAILS]
    return [pool[name] if name in pool.fields else None for name in names]


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


def _check_heads(heads: Tensor, swa_pos: Tensor, count: int) -> None:
    if (
        heads.shape != (swa_pos.shape[0], count)
        or heads.dtype != torch.int32
        or heads.device != swa_pos.device
    ):
        raise SchemaError(
            f"heads must be [{swa_pos.shape[0]}, {count}] int32 on {swa_pos.device}, "
            f"got {tuple(heads.shape)} {heads.dtype} on {heads.device}"
        )
