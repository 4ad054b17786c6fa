"""One layer of the DeepSeek-V4 family by slot: window, tail, compressed entries, selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .batch import Batch
from .block_store import BlockStore
from .errors import SchemaError
from .kept import KeptRows
from .ops.absorb import Compressor, Rotation, TailParts, absorb
from .ops.entry_attention import entry_attention
from .ops.index_select import index_select
from .pool import Field
from .rows import Rows
from .schema import LayerCacheSchema
from .scopes import scope
from .state_cache import StateCachePool

__all__ = ["CompressorInputs", "EntryInputs", "EntryLayer", "IndexInputs"]


@dataclass(frozen=True)
class CompressorInputs:
    """What one compressor is given for a batch; ov is 1 for CSA, 0 for HCA.

    Attributes:
        values: [T, (1+ov)·D], projected; for CSA the previous stream's dims come first, then the
            current one's. float32 for exact tails.
        gates: [T, (1+ov)·D], likewise.
        bias: [m, (1+ov)·D], added to gates by position in the block.
        norm: [D], weight of the entry's RMS norm.
    """

    values: Tensor
    gates: Tensor
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class IndexInputs:
    """What an indexer is given for a batch.

    Attributes:
        query: [T, Hi, Di], rotated.
        weights: [T, Hi] float32, of the heads' scores, every scaling included.
        compressor: of the index keys.
    """

    query: Tensor
    weights: Tensor
    compressor: CompressorInputs


@dataclass(frozen=True)
class EntryInputs:
    """What a layer absorbs of a batch.

    Attributes:
        entries: [T, d], projected: neither normed nor rotated.
        norm: [d], weight of the entries' RMS norm.
        rotation: of queries and entries, at the tokens' positions.
        block_rotation: at `position + 1 - m`, where a block begins that the token completes; for
            layers with compression.
        compressor: of compressed entries; likewise.
        indexer: for layers whose schema has one.
        eps: of every norm.
    """

    entries: Tensor
    norm: Tensor
    rotation: Rotation
    block_rotation: Rotation | None = None
    compressor: CompressorInputs | None = None
    indexer: IndexInputs | None = None
    eps: float = 1e-6


class EntryLayer:
    """State of one layer, and the attention over it.

    Args:
        schema: of the layer.
        cache: its window and tail.
        blocks: with the layer's compressed entries, laid out with `block_fields`; None where no
            layer has blocks.
        prefix: of the layer's fields.

    Attributes:
        entries: compressed entries, `Rows` of [blocks, entries of a block, ...]; None for SWA.
        keys: the indexer's, likewise; None without one.
        table: [S1, width] int32 block ids.
    """

    def __init__(
        self,
        schema: LayerCacheSchema,
        cache: StateCachePool,
        blocks: BlockStore | None,
        prefix: str,
    ) -> None:
        self.schema = schema
        self.cache = cache
        self.entries: Rows | None = None
        self.keys: Rows | None = None
        self.table: Tensor | None = None
        # An indexer that can't have more entries than it selects need not be asked.
        self.selects = False
        if schema.compression:
            assert blocks is not None
            count = blocks.block_tokens // schema.compression
            self.table = blocks.table
            self.entries = schema.row.view(blocks.pool, f"{prefix}entries", count)
            if schema.indexer is not None:
                self.keys = schema.indexer.row.view(blocks.pool, f"{prefix}keys", count)
                self.selects = blocks.table.shape[1] * count > schema.indexer.top_k

    @staticmethod
    def block_fields(schema: LayerCacheSchema, prefix: str, block_tokens: int) -> tuple[Field, ...]:
        """What a block of `block_tokens` tokens holds of this layer.

        Raises:
            SchemaError: when compressed entries would straddle blocks.
        """
        if not schema.compression:
            return ()
        if block_tokens % schema.compression:
            raise SchemaError(
                f"block_tokens={block_tokens} must be a multiple of every layer's compression, "
                f"here {schema.compression}"
            )
        count = block_tokens // schema.compression
        fields = schema.row.fields(f"{prefix}entries", count)
        if schema.indexer is not None:
            fields += schema.indexer.row.fields(f"{prefix}keys", count)
        return fields

    @property
    def boundary(self) -> int:
        """At lengths that are multiples of it no compressed entry is half complete."""
        return self.schema.compression or 1

    def kept_rows(self, length: int) -> list[KeptRows]:
        """What a slot of `length` tokens needs of its row to go on; see `StateCachePool`."""
        return self.cache.kept_rows(length)

    def attend(
        self, query: Tensor, inputs: EntryInputs, batch: Batch, *, scale: float, sinks: Tensor
    ) -> Tensor:
        """Absorb the batch and attend to all that each token may see.

        A step writes first and reads the rings after. A prefill chunk, which may be longer than a
        ring, reads its own rows from its input and writes last. Runs on the current stream without
        synchronizing; a step takes one node to absorb, up to two to select and two to attend.

        Args:
            query: [T, H, d], rotated.
            inputs: what the layer absorbs of the batch.
            batch: whose tokens these are.
            scale: of the logits.
            sinks: [H] float32, logits of a sink that takes weight and gives no value.

        Returns:
            [T, H, d] in the query's dtype, rotated back by the token's position; zeros at padding.

        Raises:
            SchemaError: for inputs that don't fit the schema, or a step of more tokens a slot than
                it was laid out for; before anything is written.
        """
        self._check(query, inputs, batch)
        own = None
        with scope("absorb"):
            if batch.prefill:
                own = self._absorb_chunk(inputs, batch)
            else:
                self._absorb(inputs, batch)
        selected = None
        if self.selects:
            with scope("select"):
                selected = self._select(inputs, batch)
        with scope("attend"):
            attended = entry_attention(
                query,
                self.cache.swa,
                batch.slots,
                batch.positions,
                batch.q_len,
                window=self.schema.swa_window_size,
                scale=scale,
                sinks=sinks,
                rotation=inputs.rotation,
                own=own,
                entries=self.entries,
                table=self.table,
                compression=self.schema.compression,
                selected=selected,
            )
        if batch.prefill:
            self._absorb(inputs, batch, emit=False)
        return attended

    # --- private ---------------------------------------------------------------------------------

    def _absorb(self, inputs: EntryInputs, batch: Batch, *, emit: bool = True) -> None:
        absorb(
            inputs.entries,
            self.cache.window_parts,
            batch.slots,
            batch.positions,
            batch.q_len,
            emit=emit,
            **self._arguments(inputs),
        )

    def _absorb_chunk(self, inputs: EntryInputs, batch: Batch) -> Rows:
        """Emit what the chunk completes, and give its window rows as a ring would hold them."""
        own = self._rows_aside(inputs.entries)
        absorb(
            inputs.entries,
            own,
            batch.slots,
            batch.positions,
            batch.q_len,
            write=False,
            **self._arguments(inputs),
        )
        return own

    def _rows_aside(self, entries: Tensor) -> Rows:
        tokens = entries.shape[0]
        # Zeros: what padding leaves unwritten must be finite.
        return self.cache.swa.map(lambda part: part.new_zeros((1, tokens, *part.shape[2:])))

    def _arguments(self, inputs: EntryInputs) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "norm": inputs.norm,
            "rotation": inputs.rotation,
            "eps": inputs.eps,
        }
        if inputs.compressor is not None:
            arguments["compressor"] = _with_state(inputs.compressor, self.cache.tail, self.entries)
            arguments["block_rotation"] = inputs.block_rotation
            arguments["table"] = self.table
        if inputs.indexer is not None:
            arguments["index"] = _with_state(
                inputs.indexer.compressor, self.cache.index_tail, self.keys
            )
        return arguments

    def _select(self, inputs: EntryInputs, batch: Batch) -> Tensor:
        assert inputs.indexer is not None and self.keys is not None and self.table is not None
        assert self.schema.indexer is not None
        return index_select(
            inputs.indexer.query,
            inputs.indexer.weights,
            self.keys.values,
            self.keys.scales,
            self.table,
            batch.slots,
            batch.positions,
            self.schema.compression,
            self.schema.indexer.top_k,
        )

    def _check(self, query: Tensor, inputs: EntryInputs, batch: Batch) -> None:
        schema = self.schema
        if not batch.prefill and batch.q_len > schema.step_width:
            raise SchemaError(
                f"a step of {batch.q_len} tokens a slot, and the layer is laid out for "
                f"step_width={schema.step_width}"
            )
        for given, wanted, what in (
            (inputs.compressor, schema.compression, "a compressor's inputs"),
            (inputs.indexer, schema.indexer, "an indexer's inputs"),
        ):
            if bool(given) != bool(wanted):
                verb = "needs" if wanted else "takes no"
                raise SchemaError(f"this {schema.attn_type.name} layer {verb} {what}")
        if query.dim() != 3 or query.shape[2] != schema.entry_head_dim:
            raise SchemaError(
                f"query must be [T, H, {schema.entry_head_dim}], got {list(query.shape)}"
            )
        if inputs.compressor is not None and inputs.compressor.bias.shape[0] != schema.compression:
            raise SchemaError(
                f"the compressor's bias has {inputs.compressor.bias.shape[0]} rows, "
                f"not compression={schema.compression}"
            )


def _with_state(
    inputs: CompressorInputs, tail: TailParts | None, entries: Rows | None
) -> Compressor:
    assert tail is not None and entries is not None
    return Compressor(inputs.values, inputs.gates, inputs.bias, inputs.norm, tail, entries)
