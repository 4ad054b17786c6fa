"""What the layers of a DeepSeek-V4 model keep, read from its config alone."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..errors import SchemaError, UnsupportedModel
from ..rows import RowFormat
from ..schema import AttentionType, IndexerSchema, LayerCacheSchema

__all__ = ["check_written_pattern", "read_entry_schemas"]

_KINDS = {
    "sliding_attention": AttentionType.SWA,
    "compressed_sparse_attention": AttentionType.CSA,
    "heavily_compressed_attention": AttentionType.HCA,
}
CSA_RATIOS = (1, 2, 4)
"""Compression ratios of layers whose blocks overlap and whose entries are selected (V4, V4.1)."""
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
"""Of a model whose layers keep entries: queries and projections come in these."""
BUILT_RATIOS = (0, 4, 128)
"""Compression ratios that transformers' config has a layer type for."""


def read_entry_schemas(
    config: Any,
    *,
    row_format: RowFormat = RowFormat.FP8,
    index_format: RowFormat = RowFormat.FP8,
    tail_dtype: torch.dtype = torch.float32,
    step_width: int = 1,
    rewind: int = 0,
    csa_ratios: Collection[int] = CSA_RATIOS,
    drafting: bool = False,
) -> tuple[LayerCacheSchema, ...]:
    """One schema for each layer, in order.

    The pattern is the config's: `layer_types` with `compress_rates`, as transformers has it, or
    `compress_ratios`, one for each layer, as the model's own config.json has it: 0 for a window
    only, one of `csa_ratios` for CSA, any other for HCA.

    Args:
        config: of a transformers model, or the mapping in its config.json.
        row_format: of windows and compressed entries.
        index_format: of index keys.
        tail_dtype: of tails, float32 or bfloat16.
        step_width: most tokens of one slot in one step (q).
        rewind: how far back a slot can always be rewound (k).
        csa_ratios: which of `compress_ratios` are CSA.
        drafting: include the layers that draft tokens (MTP), which `compress_ratios` lists last.

    Raises:
        UnsupportedModel: for a pattern that can't be read, a layer that can't be laid out, or an
            option that is none.
    """
    get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    try:
        _check_options(row_format, index_format, step_width, rewind)
        head_dim = _need(get, "head_dim")
        rope_dim = _rope_dim(get, head_dim)
        indexer = IndexerSchema(
            heads=_need(get, "index_n_heads"),
            head_dim=_need(get, "index_head_dim"),
            top_k=_need(get, "index_topk"),
            row_format=index_format,
        )
        return tuple(
            LayerCacheSchema(
                kind,
                _need(get, "sliding_window"),
                head_dim,
                rope_dim,
                compression=ratio,
                step_width=step_width,
                rewind=rewind,
                tail_dtype=tail_dtype,
                row_format=row_format,
                indexer=indexer if kind is AttentionType.CSA else None,
            )
            for kind, ratio in _pattern(get, csa_ratios, drafting)
        )
    except SchemaError as error:
        raise UnsupportedModel(f"this model's state can't be laid out: {error}") from error


def check_written_pattern(written: Mapping[str, Any]) -> None:
    """Refuse a config.json whose layers transformers has no type for, naming the first of them.

    Raises:
        UnsupportedModel: for another layer type or compression ratio. Of layers of other ratios the
            state can be laid out (`read_entry_schemas`), but nothing builds the model.
    """
    for name in written.get("layer_types") or ():
        _kind_of(str(name))
    if written.get("layer_types") is not None:
        return
    for index, ratio in enumerate(written.get("compress_ratios") or ()):
        if ratio not in BUILT_RATIOS:
            raise UnsupportedModel(
                f"compression ratio {ratio!r} of layer {index} is not served: transformers builds "
                f"layers of ratio {', '.join(map(str, BUILT_RATIOS))}"
            )


def _check_options(
    row_format: object, index_format: object, step_width: object, rewind: object
) -> None:
    for name, given in (("row_format", row_format), ("index_format", index_format)):
        if not isinstance(given, RowFormat):
            raise SchemaError(f"{name} is a RowFormat, got {given!r}")
    for name, given in (("step_width", step_width), ("rewind", rewind)):
        if not isinstance(given, int) or isinstance(given, bool):
            raise SchemaError(f"{name} is an int, got {given!r}")


def _need(get: Any, name: str) -> int:
    return _whole(_given(get, name), name)


def _given(get: Any, name: str) -> Any:
    value = get(name)
    if value is None:
        raise UnsupportedModel(f"the config has no {name}, which a DeepSeek-V4 model needs")
    return value


def _whole(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UnsupportedModel(f"{name} in the config is a whole number, got {value!r}") from None


def _rope_dim(get: Any, head_dim: int) -> int:
    rope_dim = get("qk_rope_head_dim")
    if rope_dim is not None:
        return _whole(rope_dim, "qk_rope_head_dim")
    return int(head_dim * float(_given(get, "partial_rotary_factor")))


def _pattern(
    get: Any, csa_ratios: Collection[int], drafting: bool
) -> list[tuple[AttentionType, int]]:
    """Each layer's kind and compression."""
    layers = _need(get, "num_hidden_layers")
    drafts = _whole(get("num_nextn_predict_layers") or 0, "num_nextn_predict_layers")
    drafts = drafts if drafting else 0
    types = get("layer_types")
    if types is None or (drafting and get("compress_ratios") is not None):
        return _from_ratios(_given(get, "compress_ratios"), layers + drafts, csa_ratios)
    if drafts:
        raise UnsupportedModel(
            "the config's layer_types don't list the layers that draft; give compress_ratios"
        )
    if len(types) != layers:
        raise UnsupportedModel(f"the config lists {len(types)} layer types for {layers} layers")
    return [_from_type(str(name), get("compress_rates") or {}) for name in types]


def _from_type(name: str, rates: Mapping[str, int]) -> tuple[AttentionType, int]:
    kind = _kind_of(name)
    if kind is AttentionType.SWA:
        return kind, 0
    if name not in rates:
        raise UnsupportedModel(f"the config names no compression rate for {name!r}")
    return kind, _whole(rates[name], f"compress_rates[{name!r}]")


def _kind_of(name: str) -> AttentionType:
    kind = _KINDS.get(name)
    if kind is None:
        raise UnsupportedModel(f"layer type {name!r} is not served; served: {', '.join(_KINDS)}")
    return kind


def _from_ratios(
    ratios: Any, layers: int, csa_ratios: Collection[int]
) -> list[tuple[AttentionType, int]]:
    ratios = [_whole(ratio, "a compression ratio") for ratio in ratios]
    if len(ratios) < layers:
        raise UnsupportedModel(
            f"the config lists {len(ratios)} compression ratios for {layers} layers"
        )
    if any(ratio < 0 for ratio in ratios):
        raise UnsupportedModel(f"compression ratios are at least 0, got {ratios}")
    return [
        (AttentionType.SWA, 0)
        if ratio == 0
        else (AttentionType.CSA if ratio in csa_ratios else AttentionType.HCA, ratio)
        for ratio in ratios[:layers]
    ]
