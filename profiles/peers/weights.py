"""A model of transformers' own make that shares the weights of this library's decoder."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["kv_width", "plain_model"]


def kv_width(config: Any) -> tuple[int, int]:
    """Heads of K and V, and the dims of each."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, dim


def plain_model(hosted: Any, attention: str = "sdpa") -> Any:
    """The same decoder without this library's attention and scopes, on the same weights.

    Args:
        hosted: a `TransformersDecoder`.
        attention: name of a registered attention function.
    """
    built = hosted.model
    config = copy.deepcopy(built.config)
    config._attn_implementation = attention
    with torch.device("meta"):
        plain = type(built)(config)
    plain.load_state_dict(built.state_dict(), assign=True)
    plain.tie_weights()
    # Frequencies are no parameters: what was made on meta has no values.
    plain.base_model.rotary_emb = built.base_model.rotary_emb
    plain.set_attn_implementation(attention)
    plain.generation_config = copy.deepcopy(built.generation_config)
    return plain.requires_grad_(False).eval()
