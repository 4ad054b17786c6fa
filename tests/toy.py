"""A small decoder of plain torch, for tests of the runtime, and where to run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphcache import Batch, KVLayerSchema
from graphcache.models import StepFunction

BACKENDS = ["tape", pytest.param("cuda_graph", marks=pytest.mark.gpu)]
VOCAB = 61


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "cuda_graph" else "cpu")


class ToyDecoder:
    """Embedding, attention layers with residuals, head. Positions enter through an embedding.

    Args:
        windows: one layer each; None for full attention.
        device: of the weights.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...] = (None, 6),
        device: torch.device | str = "cpu",
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        vocab: int = VOCAB,
        max_positions: int = 512,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device)

        self.heads, self.kv_heads, self.head_dim, self.vocab = heads, kv_heads, head_dim, vocab
        width = heads * head_dim
        self.embedding = weight(vocab, width) * 4
        self.places = weight(max_positions, width) * 4
        self.layers = [
            {
                "q": weight(heads * head_dim, width),
                "k": weight(kv_heads * head_dim, width),
                "v": weight(kv_heads * head_dim, width),
                "o": weight(width, heads * head_dim),
            }
            for _ in windows
        ]
        self.head = weight(vocab, width)
        self.windows = windows
        self.device = torch.device(device)
        self.schemas = tuple(
            KVLayerSchema(kv_heads, head_dim, head_dim, window=window, dtype=torch.float32)
            for window in windows
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [T, vocab] of a batch."""
        hidden = self.embedding[batch.tokens.long()] + self.places[batch.positions.long()]
        for index, weights in enumerate(self.layers):
            layer: Any = batch.state.layers[index]
            attended = layer.attend(
                (hidden @ weights["q"].T).view(-1, self.heads, self.head_dim),
                (hidden @ weights["k"].T).view(-1, self.kv_heads, self.head_dim),
                (hidden @ weights["v"].T).view(-1, self.kv_heads, self.head_dim),
                batch,
                scale=self.head_dim**-0.5,
            )
            hidden = hidden + attended.flatten(1) @ weights["o"].T
        return hidden @ self.head.T

    def model(self, **options: Any) -> StepFunction:
        """As a runtime's model."""
        return StepFunction(self, self.vocab, schemas=self.schemas, device=self.device, **options)
