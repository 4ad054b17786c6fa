"""A decoder over paged K/V whose block table the caller holds: what serving patterns run on.

Modules, kernels and weights are those this library decodes with, so that a pattern differs by what
its host does each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from graphcache.ops.decode_attention import decode_attention
from graphcache.ops.kv_append import kv_append
from graphcache.ops.prefill_attention import prefill_attention

from .weights import kv_width, plain_model

__all__ = ["BLOCK_TOKENS", "PagedDecoder"]

ATTENTION = "graphcache_profiles_paged"
BLOCK_TOKENS = 64


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query [1, H, T, D], key and value [1, Hkv, T, D], rotated; T tokens of many rows."""
    decoder, rows, positions, width, prefill = paged
    index: Any = module.layer_idx
    k_cache, v_cache, table = decoder.k[index], decoder.v[index], decoder.table
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if prefill:
        attended = prefill_attention(
            q, k, v, k_cache, v_cache, rows, positions, width, scale, table, 0, 0.0, None
        )
        kv_append(k, v, k_cache, v_cache, rows, positions, width, table)
    else:
        kv_append(k, v, k_cache, v_cache, rows, positions, width, table)
        attended = decode_attention(q, k_cache, v_cache, rows, positions, width, scale, table)
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


class PagedDecoder:
    """The model's body and head over blocks.

    Args:
        hosted: a `TransformersDecoder`, whose weights are shared.
        rows: of a step.
        length: the most tokens of a row.

    Attributes:
        blocks: by row, the numbers of its blocks.
        table: [rows + 1, width] int32 on the device; the last row is nobody's.
        k, v: by layer, [blocks, kv_heads, BLOCK_TOKENS, head_dim].
    """

    def __init__(self, hosted: Any, rows: int, length: int) -> None:
        self.model = plain_model(hosted, ATTENTION)
        config, like = self.model.config, next(self.model.parameters())
        heads, dim = kv_width(config)
        self.width = -(-length // BLOCK_TOKENS)
        self.blocks = [list(range(row * self.width, (row + 1) * self.width)) for row in range(rows)]
        count = rows * self.width + 1
        shape = (count, heads, BLOCK_TOKENS, dim)
        layers = range(config.num_hidden_layers)
        self.k = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in layers]
        self.v = [torch.zeros_like(self.k[0]) for _ in layers]
        scratch = [count - 1] * self.width
        self.table = torch.tensor([*self.blocks, scratch], dtype=torch.int32, device=like.device)
        self.rows = torch.arange(rows, dtype=torch.int32, device=like.device)
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=like.device)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Absorb prompts, a row at a time."""
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor(list(prompt), device=self.table.device)
            rows = torch.full((len(prompt),), row, dtype=torch.int32, device=self.table.device)
            positions = torch.arange(len(prompt), dtype=torch.int32, device=self.table.device)
            self._body(tokens, (self, rows, positions, len(prompt), True))

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [rows] of all rows: hidden states [rows, hidden]."""
        return self._body(tokens, (self, self.rows, positions, 1, False))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, V]."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def _body(self, tokens: Tensor, paged: tuple[Any, ...]) -> Tensor:
        hidden: Tensor = self.model.base_model(
            input_ids=tokens.unsqueeze(0), position_ids=paged[2].unsqueeze(0),
            attention_mask=self._no_mask, use_cache=False, paged=paged,
        ).last_hidden_state[0]  # fmt: skip
        return hidden
