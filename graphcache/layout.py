"""Where each layer's state lies: in a slot's row of the arena, or in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .block_store import BlockStore
from .control import control_fields
from .kv_layer import KVLayer
from .pool import Field, StatePool
from .schema import KVLayerSchema, LayerCacheSchema
from .state_cache import StateCachePool

__all__ = ["Layer", "LayerSchema", "derived_modulus", "in_blocks", "make_layers", "slot_fields"]

LayerSchema: TypeAlias = KVLayerSchema | LayerCacheSchema
Layer: TypeAlias = KVLayer | StateCachePool


def derived_modulus(schemas: Sequence[LayerSchema]) -> list[int]:
    """Rows of each ring whose next row is kept as a scalar, in the order of the layers."""
    return [schema.swa_rows for schema in schemas if isinstance(schema, LayerCacheSchema)]


def in_blocks(schemas: Sequence[LayerSchema]) -> dict[int, KVLayerSchema]:
    """The layers that keep every token, by index."""
    return {
        index: schema
        for index, schema in enumerate(schemas)
        if isinstance(schema, KVLayerSchema) and schema.window is None
    }


def slot_fields(
    schemas: Sequence[LayerSchema], model_fields: Iterable[Field], max_context: int
) -> list[Field]:
    """All that a slot's row holds."""
    fields = control_fields(len(derived_modulus(schemas)))
    fields.extend(model_fields)
    for index, schema in enumerate(schemas):
        if isinstance(schema, LayerCacheSchema):
            fields.extend(StateCachePool.fields(schema, f"layer{index}.", head=False))
        elif schema.window is not None:
            rows = schema.ring_rows(max_context)
            for name, dim in (("k", schema.k_head_dim), ("v", schema.v_head_dim)):
                shape = (schema.kv_heads, rows, dim)
                fields.append(Field(f"layer{index}.{name}", shape, schema.dtype))
    fields.append(Field("tokens", (max_context,), torch.int32))
    return fields


def make_layers(
    schemas: Sequence[LayerSchema],
    pool: StatePool,
    blocks: BlockStore | None,
    derived: Tensor | None,
) -> list[Layer]:
    """Each layer as views of where its state lies.

    Args:
        schemas: of the layers.
        pool: laid out with `slot_fields`.
        blocks: of the layers that keep every token.
        derived: [S1, n] int32, the scalars of `derived_modulus`.
    """
    layers: list[Layer] = []
    column = 0
    for index, schema in enumerate(schemas):
        prefix = f"layer{index}."
        if isinstance(schema, LayerCacheSchema):
            assert derived is not None
            head = derived[:, column]
            column += 1
            layers.append(
                StateCachePool(schema, pool.rows, pool=pool, prefix=prefix, swa_head=head)
            )
        elif schema.window is not None:
            layers.append(KVLayer(schema, pool[f"{prefix}k"], pool[f"{prefix}v"], None))
        else:
            assert blocks is not None
            k, v = blocks.pool[f"{prefix}k"], blocks.pool[f"{prefix}v"]
            layers.append(KVLayer(schema, k, v, blocks.table))
    return layers
