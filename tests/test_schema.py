"""Schemas: what they refuse, and the row counts they derive."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphcache.errors import GraphCacheError, SchemaError
from graphcache.schema import AttentionType, KVLayerSchema, LayerCacheSchema, ring_rows

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA


def test_ring_rows_by_hand() -> None:
    # (read window, q, k) -> rows; k = 1 costs nothing, for a step accepts at least one token.
    by_hand = {
        (8, 1, 0): 8,
        (8, 1, 1): 8,
        (8, 1, 2): 9,
        (8, 4, 0): 11,
        (8, 4, 1): 11,
        (8, 4, 5): 15,
        (1, 1, 0): 1,
        (128, 2, 2): 130,
    }
    assert {key: ring_rows(*key) for key in by_hand} == by_hand
    assert ring_rows(8) == 8


def test_defaults_are_the_seeds() -> None:
    schema = LayerCacheSchema(attn_type=SWA, swa_window_size=128, entry_head_dim=512, rope_dim=64)
    assert schema.swa_rows == 128
    assert schema.tail_buffer_size == 0
    assert (schema.compression, schema.step_width, schema.rewind) == (0, 1, 0)
    assert schema.tail_dtype is torch.float32
    assert schema.overlap == 0


def test_the_promise_widens_every_ring() -> None:
    for q, k, extra in ((1, 1, 0), (3, 0, 2), (3, 1, 2), (3, 4, 5)):
        promise = {"step_width": q, "rewind": k}
        csa = LayerCacheSchema(CSA, 16, 24, 8, compression=4, **promise)
        hca = LayerCacheSchema(HCA, 16, 24, 8, compression=128, **promise)
        assert csa.swa_rows == hca.swa_rows == 16 + extra
        assert csa.tail_buffer_size == 8 + extra  # the block before it too
        assert hca.tail_buffer_size == 128 + extra


def test_overlap_is_csas_alone() -> None:
    assert LayerCacheSchema(CSA, 16, 24, 8, compression=4).overlap == 1
    assert LayerCacheSchema(HCA, 16, 24, 8, compression=4).overlap == 0


@pytest.mark.parametrize("compression", [1, 2, 4, 128])
def test_compression_is_not_hard_coded(compression: int) -> None:
    assert LayerCacheSchema(HCA, 16, 24, 8, compression=compression).tail_buffer_size == compression


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_type": AttentionType.FULL}, "use KVLayerSchema"),
        ({"swa_window_size": 0}, "swa_window_size"),
        ({"rope_dim": 0}, "rope_dim"),
        ({"rope_dim": 24}, "rope_dim"),
        ({"rope_dim": -8}, "rope_dim"),
        ({"entry_head_dim": 32}, "multiple of 16"),
        ({"entry_head_dim": 20, "rope_dim": 4}, "rope_dim of 8"),
        ({"compression": 4}, "no compressed entries"),
        ({"attn_type": CSA}, "compression >= 1"),
        ({"attn_type": HCA, "compression": -1}, "compression >= 1"),
        ({"step_width": 0}, "step_width"),
        ({"rewind": -1}, "rewind"),
        ({"tail_dtype": torch.float64}, "tail_dtype"),
        ({"tail_dtype": torch.float16}, "tail_dtype"),
    ],
)
def test_an_entry_layer_that_cannot_be_laid_out_is_refused(change: dict, says: str) -> None:
    given = {"attn_type": SWA, "swa_window_size": 8, "entry_head_dim": 24, "rope_dim": 8}
    LayerCacheSchema(**given)
    with pytest.raises(SchemaError, match=says):
        LayerCacheSchema(**given | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_heads": 0}, "kv_heads"),
        ({"k_head_dim": 0}, "k_head_dim"),
        ({"k_head_dim": 12}, "k_head_dim"),
        ({"v_head_dim": 4}, "v_head_dim"),
        ({"window": 0}, "window"),
        ({"dtype": torch.float64}, "dtype"),
        ({"dtype": torch.int8}, "dtype"),
        ({"step_width": 0}, "step_width"),
        ({"rewind": -1}, "rewind"),
    ],
)
def test_a_head_layer_that_cannot_be_laid_out_is_refused(change: dict, says: str) -> None:
    given = {"kv_heads": 3, "k_head_dim": 64, "v_head_dim": 64}
    KVLayerSchema(**given)
    with pytest.raises(SchemaError, match=says):
        KVLayerSchema(**given | change)


def test_head_layers_whole_and_windowed() -> None:
    whole = KVLayerSchema(3, 64, 128)
    assert whole.attn_type is AttentionType.FULL
    with pytest.raises(SchemaError, match="has no ring"):
        whole.ring_rows(100)

    local = KVLayerSchema(3, 64, 64, window=32, step_width=2, rewind=3)
    assert local.attn_type is SWA
    assert local.ring_rows(1000) == 32 + 1 + 2
    assert local.ring_rows(35) == 35
    assert local.ring_rows(20) == 20


def test_schemas_are_values() -> None:
    one, other = (LayerCacheSchema(SWA, 8, 24, 8) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != LayerCacheSchema(SWA, 8, 24, 8, rewind=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rewind = 2


def test_a_schema_error_is_a_value_error_of_the_library() -> None:
    assert issubclass(SchemaError, ValueError) and issubclass(SchemaError, GraphCacheError)
