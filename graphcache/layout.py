"""Where each layer's state lies: in a slot's row of the arena, or in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .block_store import BlockStore
from .control import control_fields
from .entry_layer import EntryLayer
from .errors import SchemaError
from .kv_layer import KVLayer
from .pool import Field, StatePool
from .schema import KVLayerSchema, LayerCacheSchema
from .state_cache import StateCachePool

__all__ = [
    "Layer",
    "LayerSchema",
    "block_fields",
    "block_tokens_for",
    "derived_modulus",
    "make_layers",
    "slot_fields",
]

LayerSchema: TypeAlias = KVLayerSchema | LayerCacheSchema
Layer: TypeAlias = KVLayer | EntryLayer


def derived_modulus(schemas: Sequence[LayerSchema]) -> list[int]:
    """What each scalar that follows from the length is modulo, in the order of the layers."""
    return [
        modulus
        for schema in schemas
        if isinstance(schema, LayerCacheSchema)
        for modulus in StateCachePool.moduli(schema)
    ]


def block_tokens_for(schemas: Sequence[LayerSchema], at_least: int = 64) -> int:
    """Tokens of a block that every layer's compressed entries fill evenly.

    Args:
        schemas: of the layers.
        at_least: the answer is the first fitting number from here on.
    """
    step = math.lcm(
        *(s.compression for s in schemas if isinstance(s, LayerCacheSchema) and s.compression)
    )
    return -(-at_least // step) * step


def block_fields(schemas: Sequence[LayerSchema], block_tokens: int) -> list[Field]:
    """What a block of `block_tokens` tokens holds of the layers that grow with length.

    Raises:
        SchemaError: for a block of no tokens, or of entries that are not whole.
    """
    if block_tokens < 1:
        raise SchemaError(f"block_tokens must be at least 1, got {block_tokens}")
    fields: list[Field] = []
    for index, schema in enumerate(schemas):
        if isinstance(schema, LayerCacheSchema):
            fields.extend(EntryLayer.block_fields(schema, f"layer{index}.", block_tokens))
        elif schema.window is None:
            for name, dim in (("k", schema.k_head_dim), ("v", schema.v_head_dim)):
                shape = (schema.kv_heads, block_tokens, dim)
                fields.append(Field(f"layer{index}.{name}", shape, schema.dtype))
    return fields


def slot_fields(
    schemas: Sequence[LayerSchema], model_fields: Iterable[Field], max_context: int
) -> list[Field]:
    """All that a slot's row holds."""
    fields = control_fields(len(derived_modulus(schemas)))
    fields.extend(model_fields)
    for index, schema in enumerate(schemas):
        if isinstance(schema, LayerCacheSchema):
            fields.extend(StateCachePool.fields(schema, f"layer{index}.", heads=False))
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
        blocks: of the layers that grow with length.
        derived: [S1, n] int32, the scalars of `derived_modulus`.
    """
    layers: list[Layer] = []
    column = 0
    for index, schema in enumerate(schemas):
        prefix = f"layer{index}."
        if isinstance(schema, LayerCacheSchema):
            assert derived is not None
            count = len(StateCachePool.moduli(schema))
            heads = derived[:, column : column + count]
            column += count
            cache = StateCachePool(schema, pool.rows, pool=pool, prefix=prefix, heads=heads)
            layers.append(EntryLayer(schema, cache, blocks, prefix))
        elif schema.window is not None:
            layers.append(KVLayer(schema, pool[f"{prefix}k"], pool[f"{prefix}v"], None))
        else:
            assert blocks is not None
            k, v = blocks.pool[f"{prefix}k"], blocks.pool[f"{prefix}v"]
            layers.append(KVLayer(schema, k, v, blocks.table))
    return layers
