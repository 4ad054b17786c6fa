"""Kinds of transformers decoders: for each, how to read from its config what its layers keep.

A family is an entry of `FAMILIES`, found by `config.model_type`. Nothing else in this package asks
what kind a model is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SchemaError, UnsupportedModel
from ..schema import KVLayerSchema

__all__ = ["FAMILIES", "Family", "check_config", "read_schemas"]


@dataclass(frozen=True)
class Family:
    """How one kind of decoder is read.

    Args:
        schemas: from a config and the dtype of the weights, what each layer keeps.
        layers: attribute of the model's body that lists its decoder layers.
        attention: attribute of a layer that attends.
        mlp: attribute of a layer that feeds forward.
    """

    schemas: Callable[[Any, torch.dtype], tuple[KVLayerSchema, ...]]
    layers: str = "layers"
    attention: str = "self_attn"
    mlp: str = "mlp"


def _every_layer_whole(config: Any, dtype: torch.dtype) -> tuple[KVLayerSchema, ...]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layer = KVLayerSchema(kv_heads, k_head_dim=head_dim, v_head_dim=head_dim, dtype=dtype)
    return (layer,) * int(config.num_hidden_layers)


FAMILIES: dict[str, Family] = {
    "llama": Family(schemas=_every_layer_whole),
}


def check_config(config: Any) -> Family:
    """The family that serves a config; takes no memory.

    Args:
        config: of a transformers model.

    Raises:
        UnsupportedModel: naming the part that no adapter serves.
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
    _check_weights_format(config)
    _check_attention(config)
    _check_rope(config)
    return FAMILIES[model_type]


def read_schemas(config: Any, dtype: torch.dtype) -> tuple[KVLayerSchema, ...]:
    """What each layer of a served model keeps, in `dtype`.

    Raises:
        UnsupportedModel: when the model isn't served, or a layer of it can't be laid out.
    """
    try:
        return check_config(config).schemas(config, dtype)
    except SchemaError as error:
        raise UnsupportedModel(f"K and V of this model can't be laid out: {error}") from error


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
