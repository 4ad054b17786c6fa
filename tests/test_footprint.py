"""What a state will take is told to the byte, before it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache import AttentionType, DecodeState, Field, KVLayerSchema, LayerCacheSchema
from graphcache.errors import SchemaError
from graphcache.footprint import state_footprint

KV = st.builds(
    KVLayerSchema,
    st.integers(1, 3),
    st.sampled_from([8, 16]),
    st.sampled_from([8, 24]),
    window=st.sampled_from([None, 1, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
ENTRIES = st.sampled_from(
    [
        LayerCacheSchema(AttentionType.SWA, 5, 24, 8),
        LayerCacheSchema(AttentionType.HCA, 4, 24, 8, compression=8),
        LayerCacheSchema(AttentionType.CSA, 4, 24, 8, compression=4, step_width=2, rewind=1),
    ]
)


def allocated(state: DecodeState) -> int:
    """Bytes of the storages behind all state."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in state.named_tensors().values()
    }
    return sum(storages.values())


@settings(deadline=None, max_examples=60)
@given(
    schemas=st.lists(st.one_of(KV, ENTRIES), max_size=4),
    max_requests=st.integers(1, 5),
    max_context=st.integers(2, 100),
    block_tokens=st.sampled_from([None, 8, 16]),
    kv_blocks=st.sampled_from([None, 1, 7]),
    field=st.booleans(),
    guarded=st.booleans(),
)
def test_it_is_what_is_allocated(
    schemas: list[Any], field: bool, max_requests: int, **options: Any
) -> None:
    fields = [Field("bias", (7,), torch.float32)] if field else []
    options |= {"max_requests": max_requests, "fields": fields}
    told = state_footprint(schemas, **options)
    state = DecodeState(schemas, vocab_size=9, device="cpu", **options)
    assert told.total_bytes == state.memory_bytes() == allocated(state)
    if options["kv_blocks"] is None:
        more = state_footprint(schemas, **{**options, "max_requests": max_requests + 1})
        assert more.total_bytes - told.total_bytes == told.slot_bytes


def test_what_can_not_be_laid_out_is_refused_as_the_state_refuses_it() -> None:
    with pytest.raises(SchemaError):
        state_footprint(
            [KVLayerSchema(1, 8, 8, dtype=torch.float32)],
            max_requests=1, max_context=8, block_tokens=0,
        )  # fmt: skip
