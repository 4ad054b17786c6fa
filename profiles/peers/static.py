"""Attention over a static cache: all rows at one position, every step reads the whole cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from .weights import kv_width, plain_model

__all__ = ["StaticDecoder"]

ATTENTION = "graphcache_profiles_static"
PREFILL_ROWS = 8


class _StaticKV:
    """K and V of all layers, [rows, kv_heads, length, head_dim] each."""

    def __init__(self, config: Any, rows: int, length: int, like: Tensor) -> None:
        heads, dim = kv_width(config)
        shape = (rows, heads, length, dim)
        layers = range(config.num_hidden_layers)
        self.k = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in layers]
        self.v = [torch.zeros_like(self.k[0]) for _ in layers]
        for tensor in (*self.k, *self.v):
            # Else a compiled step that writes to them would be denied its graph.
            torch._dynamo.mark_static_address(tensor)
        self.places = torch.arange(length, device=like.device)

    def rows(self, chosen: slice) -> _StaticKV:
        part: _StaticKV = object.__new__(_StaticKV)
        part.k = [k[chosen] for k in self.k]
        part.v = [v[chosen] for v in self.v]
        part.places = self.places
        return part


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    static_kv: Any = None,
    static_position: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query [rows, H, T, D], key and value [rows, Hkv, T, D], rotated; no position: prefill."""
    index: Any = module.layer_idx
    k, v = static_kv.k[index], static_kv.v[index]
    shared = query.shape[1] // key.shape[1]
    if static_position is None:
        k[:, :, : key.shape[2]], v[:, :, : key.shape[2]] = key, value
        mask = None
    else:
        k[:, :, static_position], v[:, :, static_position] = key, value
        key, value = k, v
        mask = (static_kv.places <= static_position).view(1, 1, 1, -1)
    attended = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(shared, dim=1),
        value.repeat_interleave(shared, dim=1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return attended.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


class StaticDecoder:
    """The step as a function of tokens and a position, over a static cache.

    Args:
        hosted: a `TransformersDecoder`, whose weights are shared.
        rows, length: of the cache.
    """

    def __init__(self, hosted: Any, rows: int, length: int) -> None:
        self.model = plain_model(hosted, ATTENTION)
        self.kv = _StaticKV(self.model.config, rows, length, next(self.model.parameters()))
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=hosted.device)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Absorb prompts, all of one length, a few rows at a time."""
        device = self._no_mask.device
        tokens = torch.tensor(list(prompts), device=device)
        places = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
        for start in range(0, len(tokens), PREFILL_ROWS):
            chosen = slice(start, start + PREFILL_ROWS)
            self.model.base_model(
                input_ids=tokens[chosen], position_ids=places, attention_mask=self._no_mask,
                use_cache=False, static_kv=self.kv.rows(chosen),
            )  # fmt: skip

    def step(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [rows, 1] at position [1], int64: the next [rows, 1], and logits [rows, V]."""
        logits = self.model(
            input_ids=tokens, position_ids=position.unsqueeze(0), attention_mask=self._no_mask,
            use_cache=False, static_kv=self.kv, static_position=position,
        ).logits[:, -1]  # fmt: skip
        return logits.argmax(-1, keepdim=True), logits
