"""EntryLayer: where its state lies in a DecodeState, and what it refuses before it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphcache import AttentionType, Batch, DecodeState, KVLayerSchema, LayerCacheSchema
from graphcache.entry_layer import CompressorInputs, EntryInputs, EntryLayer, IndexInputs
from graphcache.errors import SchemaError
from graphcache.ops.absorb import Rotation
from graphcache.rows import RowFormat
from graphcache.schema import IndexerSchema

SWA = LayerCacheSchema(AttentionType.SWA, 4, 24, 8, step_width=2)
HCA = LayerCacheSchema(AttentionType.HCA, 4, 24, 8, compression=6, step_width=2)
PLAIN_CSA = LayerCacheSchema(AttentionType.CSA, 4, 24, 8, compression=2, step_width=2)
CSA = replace(PLAIN_CSA, indexer=IndexerSchema(2, 16, 3))
HEADS = 3


def _state(*schemas: Any, **changes: Any) -> DecodeState:
    settings = {"max_requests": 3, "max_context": 40, "vocab_size": 9, "device": "cpu"}
    return DecodeState(schemas, **{"block_tokens": 12, **settings, **changes})


def _layer(state: DecodeState, index: int = 0) -> EntryLayer:
    layer = state.layers[index]
    assert isinstance(layer, EntryLayer)
    return layer


def _compressor(tokens: int, m: int, columns: int, dim: int) -> CompressorInputs:
    return CompressorInputs(
        torch.randn(tokens, columns), torch.randn(tokens, columns), torch.randn(m, columns),
        torch.ones(dim),
    )  # fmt: skip


def _inputs(schema: LayerCacheSchema, tokens: int) -> EntryInputs:
    rotation = Rotation(torch.ones(tokens, 4), torch.zeros(tokens, 4))
    given = EntryInputs(torch.randn(tokens, 24), torch.ones(24), rotation)
    if not schema.compression:
        return given
    streams, m = 1 + schema.overlap, schema.compression
    compressor = _compressor(tokens, m, streams * 24, 24)
    given = replace(given, block_rotation=rotation, compressor=compressor)
    if schema.indexer is None:
        return given
    heads, dim = schema.indexer.heads, schema.indexer.head_dim
    keys = _compressor(tokens, m, streams * dim, dim)
    indexer = IndexInputs(torch.randn(tokens, heads, dim), torch.randn(tokens, heads), keys)
    return replace(given, indexer=indexer)


def _batch(state: DecodeState, rows: int = 1, q_len: int = 2, prefill: bool = False) -> Batch:
    slots = torch.arange(rows, dtype=torch.int32).repeat_interleave(q_len)
    positions = torch.arange(q_len, dtype=torch.int32).repeat(rows)
    return Batch(slots, positions, torch.zeros_like(slots), q_len, state, prefill)


def _attend(
    state: DecodeState, inputs: EntryInputs, batch: Batch, query: torch.Tensor | None = None
) -> torch.Tensor:
    if query is None:
        query = torch.randn(len(batch.slots), HEADS, 24)
    return _layer(state).attend(query, inputs, batch, scale=0.2, sinks=torch.zeros(HEADS))


def _memory(state: DecodeState) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.named_tensors().values()]


# --- construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [1, 4, 9, 64])
def test_compressed_entries_must_not_straddle_blocks(block_tokens: int) -> None:
    with pytest.raises(SchemaError, match=rf"block_tokens={block_tokens} must be a multiple.*6"):
        _state(SWA, HCA, block_tokens=block_tokens)
    with pytest.raises(SchemaError, match="multiple"):
        EntryLayer.block_fields(HCA, "", block_tokens)


def test_a_layer_of_window_only_needs_no_blocks() -> None:
    state = _state(SWA, block_tokens=7)
    layer = _layer(state)
    assert state.blocks is None
    assert layer.entries is None and layer.keys is None and layer.table is None
    assert EntryLayer.block_fields(SWA, "", 7) == ()


def test_entries_and_keys_lie_in_the_blocks() -> None:
    state = _state(HCA, PLAIN_CSA, CSA, kv_blocks=5)
    hca, plain, csa = (_layer(state, index) for index in range(3))
    for layer, count in ((hca, 2), (plain, 6), (csa, 6)):
        assert layer.table is state.blocks.table
        assert layer.entries.values.shape == (6, count, 16)
        assert layer.entries.rope.shape == (6, count, 8)
        assert layer.entries.scales.shape == (6, count)
    assert hca.keys is None and plain.keys is None
    assert csa.keys.values.shape == (6, 6, 16) and csa.keys.rope is None
    memory = state.blocks.pool.arena
    for part in (*csa.entries.parts(), *csa.keys.parts(), *hca.entries.parts()):
        assert part.untyped_storage().data_ptr() == memory.data_ptr()


def test_an_indexer_that_would_select_everything_is_not_asked() -> None:
    for top_k, selects in ((23, True), (24, False)):
        schema = replace(CSA, indexer=IndexerSchema(2, 16, top_k))
        # 40 tokens take 4 blocks of 12, which hold 24 entries.
        assert _layer(_state(schema)).selects == selects
    assert not _layer(_state(PLAIN_CSA)).selects


# --- what a call refuses --------------------------------------------------------------------------


def _without(*names: str) -> Callable[[EntryInputs], EntryInputs]:
    return lambda given: replace(given, **dict.fromkeys(names))


def _taking(other: LayerCacheSchema, *names: str) -> Callable[[EntryInputs], EntryInputs]:
    def changed(given: EntryInputs) -> EntryInputs:
        return replace(given, **{name: getattr(_inputs(other, 2), name) for name in names})

    return changed


@pytest.mark.parametrize(
    ("schema", "change", "says"),
    [
        (HCA, _without("compressor"), "HCA layer needs a compressor's inputs"),
        (CSA, _without("compressor"), "CSA layer needs a compressor's inputs"),
        (CSA, _without("indexer"), "CSA layer needs an indexer's inputs"),
        (HCA, _without("block_rotation"), "needs block_rotation"),
        (SWA, _taking(HCA, "compressor"), "SWA layer takes no .*compressor's inputs"),
        (PLAIN_CSA, _taking(CSA, "indexer"), "CSA layer takes no .*indexer's inputs"),
        (SWA, _taking(CSA, "indexer"), "SWA layer takes no .*indexer's inputs"),
        (HCA, _taking(replace(HCA, compression=3), "compressor"), "3 rows, not compression=6"),
        (PLAIN_CSA, _taking(replace(HCA, compression=2), "compressor"), "bias must be"),
        (SWA, lambda given: replace(given, entries=torch.randn(2, 32)), "of width 32"),
        (SWA, lambda given: replace(given, entries=torch.randn(3, 24)), "slots must be"),
        (SWA, lambda given: replace(given, norm=torch.ones(16)), "norm must be"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_anything_is_written(
    schema, change, says
) -> None:
    state = _state(schema)
    before = _memory(state)
    given = _inputs(schema, 2)
    with pytest.raises(SchemaError, match=says):
        _attend(state, change(given), _batch(state))
    assert all(map(torch.equal, _memory(state), before))
    _attend(state, given, _batch(state))
    assert not torch.equal(_memory(state)[0], before[0])


@pytest.mark.parametrize("shape", [(2, 24), (2, HEADS, 16), (2, 1, HEADS, 24)])
def test_a_query_of_other_dims_is_refused(shape: tuple[int, ...]) -> None:
    state = _state(HCA)
    before = _memory(state)
    with pytest.raises(SchemaError, match=r"query must be \[T, H, 24\]"):
        _attend(state, _inputs(HCA, 2), _batch(state), torch.randn(shape))
    assert all(map(torch.equal, _memory(state), before))


@pytest.mark.parametrize("schema", [SWA, HCA, CSA])
def test_a_step_wider_than_promised_is_refused_and_a_chunk_is_not(schema) -> None:
    state = _state(schema)
    before = _memory(state)
    with pytest.raises(SchemaError, match=r"a step of 3 tokens a slot.*step_width=2"):
        _attend(state, _inputs(schema, 3), _batch(state, q_len=3))
    assert all(map(torch.equal, _memory(state), before))
    out = _attend(state, _inputs(schema, 3), _batch(state, q_len=3, prefill=True))
    assert out.shape == (3, HEADS, 24)


# --- in a DecodeState -----------------------------------------------------------------------------


@pytest.mark.parametrize("row_format", [RowFormat.FP8, RowFormat.BF16, RowFormat.FP32])
def test_memory_is_arena_blocks_and_tables(row_format: RowFormat) -> None:
    hca, csa = replace(HCA, row_format=row_format), replace(CSA, row_format=row_format)
    state = _state(SWA, hca, csa, kv_blocks=7)
    tensors = state.named_tensors()
    assert list(tensors) == ["state arena", "K/V blocks", "block tables"]
    assert state.memory_bytes() == sum(t.numel() * t.itemsize for t in tensors.values())
    row = {RowFormat.FP8: 16 + 2 * 8 + 4, RowFormat.BF16: 2 * 24, RowFormat.FP32: 4 * 24}
    block = 2 * row[row_format] + 6 * row[row_format] + 6 * (16 + 4)
    stride = state.blocks.pool.row_stride_bytes
    assert block <= stride < block + 256 + 6 * 16
    caches = sum(_layer(state, index).cache.memory_bytes() for index in range(3)) // 4
    assert caches < state.pool.row_stride_bytes
    assert list(_state(SWA).named_tensors()) == ["state arena"]


def test_every_tensor_of_a_layer_lies_in_the_arena_or_the_blocks() -> None:
    state = _state(SWA, KVLayerSchema(1, 8, 8), CSA)
    cache = _layer(state, 2).cache
    for part in (*cache.swa.parts(), cache.swa_pos, cache.swa_head, cache.tail_len, *cache.tail,
                 *cache.index_tail):  # fmt: skip
        assert part.untyped_storage().data_ptr() == state.pool.arena.data_ptr()
    assert "layer1.k" in state.blocks.pool.fields and "layer2.keys_fp8" in state.blocks.pool.fields


def test_heads_and_tail_lengths_follow_the_length() -> None:
    """After a prefill, steps that take some of their tokens, and a rewind."""
    state = _state(SWA, HCA, KVLayerSchema(1, 8, 8), CSA)
    slot = state.open(stop=())
    state.absorbed(slot, state.append_tokens(slot, [1] * 10))
    state.complete_prefill(slot)
    row = state.slots.row_of(slot)
    caches = [_layer(state, index).cache for index in (0, 1, 3)]

    def check(length: int) -> None:
        assert state.length_of(slot) == length
        assert [int(cache.swa_head[row]) for cache in caches] == [length % 5] * 3
        assert caches[0].tail_len is None
        assert int(caches[1].tail_len[row]) == length % 6
        assert int(caches[2].tail_len[row]) == length % 2
        for cache in caches:
            assert not cache.swa_head[[r for r in range(4) if r != row]].any()

    check(9)
    requested = torch.tensor([row, row, -1, -1], dtype=torch.int32)
    length = 9
    for accepted in (2, 1, 1, 2, 2):
        batch = state.begin(requested, 2)
        sampled = torch.full((4,), 3, dtype=torch.int32)
        state.advance(sampled, batch, requested, torch.tensor([accepted, 0], dtype=torch.int32))
        length += accepted
        check(length)
    state.rewind(slot, length)
    check(length)
