"""DeepSeek-V4-Flash's attention as a subject: state without a prefill, layers without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphcache import Batch, DecodeState, LayerCacheSchema
from graphcache.models.entry_schemas import read_entry_schemas
from graphcache.ops.absorb import Compressor, Rotation
from graphcache.rows import Rows

from ..standing import standing_slots

__all__ = [
    "DIM",
    "HEADS",
    "INDEX_DIM",
    "INDEX_HEADS",
    "ROPE_DIM",
    "TOP_K",
    "WINDOW",
    "flash_config",
    "flash_schemas",
    "long_state",
    "step_batch",
]

DIM, ROPE_DIM, WINDOW, HEADS = 512, 64, 128, 64
INDEX_DIM, INDEX_HEADS, TOP_K = 128, 64, 512
BLOCK_TOKENS = 1024
PATTERN = ["sliding_attention"] * 2 + [
    "compressed_sparse_attention" if index % 2 == 0 else "heavily_compressed_attention"
    for index in range(41)
]


def flash_config(layers: int = 43) -> Any:
    """V4-Flash's dims and its pattern of layers, as transformers' config."""
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        num_hidden_layers=layers,
        layer_types=PATTERN[:layers],
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )


def flash_schemas(layers: int = 43, **options: Any) -> tuple[LayerCacheSchema, ...]:
    """What the layers keep."""
    return read_entry_schemas(flash_config(layers), **options)


def long_state(
    schemas: tuple[LayerCacheSchema, ...], slots: int, context: int
) -> tuple[DecodeState, list[int]]:
    """A state whose slots have about `context` tokens each, without a model having run.

    Lengths differ by slot, so that a step completes blocks of some and not of others. Rows hold
    random finite values.
    """
    state = DecodeState(
        schemas,
        max_requests=slots,
        max_context=context + 256,
        vocab_size=1024,
        device="cuda",
        block_tokens=BLOCK_TOKENS,
    )
    _fill(state.pool.arena[:, state.pool.byte_range("tokens")[1] :])
    layers: list[Any] = list(state.layers)
    for layer in layers:
        _fill_rows(layer.cache.swa)
        for ring in (layer.cache.tail, layer.cache.index_tail):
            for part in ring or ():
                if part is not None:
                    part.normal_()
        for rows in (layer.entries, layer.keys):
            if rows is not None:
                _fill_rows(rows)
    handles = standing_slots(state, (context - 64 + index % 64 for index in range(slots)))
    torch.cuda.synchronize()
    return state, handles


def _fill(rows: Tensor) -> None:
    """Random bytes that are finite numbers in every format."""
    if rows.numel():
        rows.random_(0, 0x40)


def _fill_rows(rows: Rows) -> None:
    if rows.scales is None:
        rows.values.normal_()
        return
    rows.values.random_(0x20, 0x40)
    if rows.rope is not None:
        rows.rope.normal_()
    if rows.scales.dtype == torch.float32:
        rows.scales.fill_(0.5)
    else:
        rows.scales.fill_(127)


def step_batch(state: DecodeState, handles: list[int]) -> Batch:
    """The batch of a step that all the slots take part in."""
    rows = [state.slots.row_of(handle) for handle in handles]
    return state.begin(torch.tensor(rows, dtype=torch.int32, device="cuda"))


def rotations(positions: Tensor, *shifts: int) -> list[Rotation]:
    """Of the last `ROPE_DIM` dims, at the positions and at positions + shift."""
    frequencies = 160000.0 ** (-torch.arange(0, ROPE_DIM, 2, device="cuda") / ROPE_DIM)
    made = []
    for shift in (0, *shifts):
        angle = (positions + shift).float().unsqueeze(1) * frequencies
        made.append(Rotation(angle.cos(), angle.sin()))
    return made


def compressor_of(layer: Any, rows: int, *, index: bool) -> Compressor:
    """Random inputs for a layer's compressor, or its indexer's, with the layer's state."""
    schema = layer.schema
    width = INDEX_DIM if index else DIM
    columns = (1 + schema.overlap) * width
    gathered = torch.randn((rows, 2 * columns), device="cuda", dtype=torch.bfloat16)
    return Compressor(
        gathered[:, :columns],
        gathered[:, columns:],
        torch.randn((schema.compression, columns), device="cuda"),
        torch.ones(width, device="cuda"),
        layer.cache.index_tail if index else layer.cache.tail,
        layer.keys if index else layer.entries,
    )
