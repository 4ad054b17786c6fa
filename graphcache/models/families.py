"""Kinds of transformers decoders: how their state is read from a config, and what steps them.

A family is an entry of `FAMILIES`, found by `config.model_type`. Nothing else in this package asks
what kind a model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import SchemaError, UnsupportedModel, UnsupportedPlatform
from ..layout import LayerSchema
from ..rows import RowFormat
from ..schema import KVLayerSchema, LayerCacheSchema
from ._hosted import Hosted
from .entry_schemas import WEIGHT_DTYPES, check_written_pattern, read_entry_schemas
from .mamba2_fields import check_mamba2

__all__ = [
    "FAMILIES",
    "Family",
    "check_config",
    "check_device",
    "family_of",
    "read_schemas",
]


def _as_it_is(model: Any, tokenizer: Any) -> Hosted:
    from .transformers_decoder import TransformersDecoder

    return TransformersDecoder(model, tokenizer)


def _anything(written: Mapping[str, Any]) -> None:
    """Nothing to refuse in a config.json."""


@dataclass(frozen=True)
class Family:
    """How one kind of decoder is read, and stepped.

    Args:
        schemas: from a config, the dtype of the weights and the options, what each layer keeps.
        adapter: from a built model, its tokenizer or None and the options, the runtime's model.
            Imports what it needs when it is called.
        options: names of what `schemas` and `adapter` take besides, of the state.
        check_written: refuses, by a config.json as it is written, what transformers' own config
            would fail on without a word about it.
        layers: attribute of the model's body that lists its decoder layers.
        attention: attribute of a layer that attends.
        mlp: attribute of a layer that feeds forward.
    """

    schemas: Callable[..., tuple[LayerSchema, ...]]
    adapter: Callable[..., Hosted] = _as_it_is
    options: tuple[str, ...] = ()
    check_written: Callable[[Mapping[str, Any]], None] = _anything
    layers: str = "layers"
    attention: str = "self_attn"
    mlp: str = "mlp"


def _kv_layers(config: Any, dtype: torch.dtype) -> tuple[LayerSchema, ...]:
    """K and V of one width by head; in windows where the config names sliding layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    whole = KVLayerSchema(kv_heads, k_head_dim=head_dim, v_head_dim=head_dim, dtype=dtype)
    return tuple(replace(whole, window=window) for window in _windows(config))


def _windows(config: Any) -> list[int | None]:
    """The tokens that a query of each layer sees, None for all."""
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * layers
    windows: list[int | None] = []
    for index, kind in enumerate(kinds[:layers]):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(
                f"layer {index} is of type {kind!r} (config.layer_types); served are "
                "full_attention and sliding_attention"
            )
        if kind == "sliding_attention" and not window:
            raise UnsupportedModel(f"layer {index} slides, and config.sliding_window is {window!r}")
        windows.append(window if kind == "sliding_attention" else None)
    return windows


def _latent_layers(config: Any, dtype: torch.dtype) -> tuple[LayerSchema, ...]:
    """Latent attention as transformers runs it: K and V expanded to every head, of two widths."""
    layer = KVLayerSchema(
        config.num_attention_heads,
        k_head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        dtype=dtype,
    )
    return (layer,) * int(config.num_hidden_layers)


def _entries(config: Any, dtype: torch.dtype, **options: Any) -> tuple[LayerSchema, ...]:
    if dtype not in WEIGHT_DTYPES:
        raise UnsupportedModel(f"weights are float32 or bfloat16, got {dtype}")
    return read_entry_schemas(config, **options)


def _deepseek_v4(model: Any, tokenizer: Any, **options: Any) -> Hosted:
    from .deepseek_v4 import DeepseekV4Decoder

    return DeepseekV4Decoder(model, tokenizer, **options)


def _no_layers(config: Any, dtype: torch.dtype) -> tuple[LayerSchema, ...]:
    """A state-space model attends nowhere: what it keeps are its adapter's fields."""
    check_mamba2(config)
    return ()


def _mamba2(model: Any, tokenizer: Any) -> Hosted:
    from .mamba2 import Mamba2Decoder

    return Mamba2Decoder(model, tokenizer)


FAMILIES: dict[str, Family] = {
    "deepseek_v4": Family(
        schemas=_entries,
        adapter=_deepseek_v4,
        options=("row_format", "index_format", "tail_dtype", "step_width", "rewind"),
        check_written=check_written_pattern,
    ),
    "deepseek_v3": Family(schemas=_latent_layers),
    "gemma2": Family(schemas=_kv_layers),
    "gemma3_text": Family(schemas=_kv_layers),
    "gpt_neox": Family(schemas=_kv_layers, attention="attention"),
    "gpt_oss": Family(schemas=_kv_layers),
    "llama": Family(schemas=_kv_layers),
    "mamba2": Family(schemas=_no_layers, adapter=_mamba2),
    "mistral": Family(schemas=_kv_layers),
    "phi3": Family(schemas=_kv_layers),
    "qwen3": Family(schemas=_kv_layers),
    "qwen3_moe": Family(schemas=_kv_layers),
}


def family_of(config: Any, options: Iterable[str] = ()) -> Family:
    """The family that serves a config; takes no memory.

    Args:
        config: of a transformers model.
        options: names of what is asked of its state.

    Raises:
        UnsupportedModel: naming the part that no adapter serves, or the option it doesn't take.
    """
    model_type = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{model_type!r} is an encoder-decoder; only decoders that read their own tokens are "
            "served"
        )
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"no adapter serves model_type {model_type!r}; served: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        raise UnsupportedModel(
            f"the state of model_type {model_type!r} has no option {', '.join(unknown)}; "
            f"it has {', '.join(family.options) or 'none'}"
        )
    _check_weights_format(config)
    _check_attention(config)
    _check_rope(config)
    return family


def check_config(config: Any) -> Family:
    """The family of a config whose modules are stepped as they are, by `TransformersDecoder`.

    Raises:
        UnsupportedModel: naming the part that no adapter serves, or an adapter of its own.
    """
    family = family_of(config)
    if family.adapter is not _as_it_is:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} has an adapter of its own: give the model to "
            "load_model"
        )
    return family


def read_schemas(config: Any, dtype: torch.dtype, **options: Any) -> tuple[LayerSchema, ...]:
    """What each layer of a served model keeps.

    Args:
        config: of a transformers model.
        dtype: of its weights.
        options: of the state, those that the model's family has.

    Raises:
        UnsupportedModel: when the model isn't served, or a layer of it can't be laid out.
    """
    try:
        return family_of(config, options).schemas(config, dtype, **options)
    except SchemaError as error:
        raise UnsupportedModel(f"K and V of this model can't be laid out: {error}") from error


FP8_CAPABILITY = (8, 9)
"""Compute capability from which kernels can convert e4m3."""


def check_device(schemas: Iterable[LayerSchema], device: torch.device) -> None:
    """See to it that a device can keep and read rows of these layers' formats.

    Raises:
        UnsupportedPlatform: naming the format and what would do.
    """
    entries = [schema for schema in schemas if isinstance(schema, LayerCacheSchema)]
    formats = {schema.row_format for schema in entries}
    formats |= {schema.indexer.row_format for schema in entries if schema.indexer is not None}
    if entries and device.type not in ("cpu", "cuda"):
        raise UnsupportedPlatform(
            f"layers with compressed entries run on cpu and cuda, not on {device.type}"
        )
    coded = sorted(row.value for row in formats & {RowFormat.FP8, RowFormat.MODEL1})
    if coded and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise UnsupportedPlatform(
                f"rows in {' and '.join(coded)} need a GPU of compute capability 8.9 or more, and "
                f"{device} has {capability[0]}.{capability[1]}; use row_format and index_format "
                "RowFormat.BF16"
            )


def _check_weights_format(config: Any) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
    # GGUF weights are dequantised as they are read, so the built model has plain ones.
    if method != "gguf":
        raise UnsupportedModel(
            f"weights quantised by {method!r} are not served; load the model unquantised"
        )


def _check_attention(config: Any) -> None:
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(
            "attention that looks ahead is not served (config.use_bidirectional_attention)"
        )
    if not getattr(config, "is_causal", True):
        raise UnsupportedModel("attention that is not causal is not served (config.is_causal)")
    relative = str(getattr(config, "position_embedding_type", None) or "absolute")
    if getattr(config, "alibi", False) or relative.startswith("relative"):
        raise UnsupportedModel("a position bias inside attention (ALiBi, relative) is not served")


def _check_rope(config: Any) -> None:
    for rope_type in _rope_types(config):
        # These choose frequencies by the longest position of a batch: a host read in every step,
        # and other numbers for a request by the company it keeps.
        if "dynamic" in rope_type or rope_type == "longrope":
            raise UnsupportedModel(
                f"rotary embeddings of type {rope_type!r} depend on the batch's positions; "
                "served are those whose frequencies are fixed (default, linear, yarn, llama3)"
            )


def _rope_types(config: Any) -> set[str]:
    """Every rope type in a config, which has one set of parameters or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return {
        str(entry.get("rope_type", entry.get("type", "default"))) for entry in [parameters, *nested]
    }
