"""A model of one layer whose window is kept as FP8 entries, for tests of `StateCachePool` views."""

from __future__ import annotations

import torch
from torch import Tensor

from graphcache import AttentionType, Batch, LayerCacheSchema
from graphcache.entry_layer import EntryLayer
from graphcache.models import StepFunction
from tests.toy import VOCAB

WIDTH, ROPE_DIM = 24, 8


class EntryDecoder:
    """Logits from a weighted sum of the window; no attention of its own.

    Args:
        window: tokens that a step sees.
        device: of the weights.
        step_width, rewind: promises of the schema.
    """

    def __init__(
        self,
        window: int = 5,
        device: torch.device | str = "cpu",
        *,
        step_width: int = 1,
        rewind: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.embedding, self.places = weight(VOCAB, WIDTH), weight(256, WIDTH)
        self.head, self.weights = weight(VOCAB, WIDTH), weight(1, window, 1)
        self.device = torch.device(device)
        self.schemas = (
            LayerCacheSchema(
                AttentionType.SWA, window, WIDTH, ROPE_DIM, step_width=step_width, rewind=rewind
            ),
        )

    def chunk(self, batch: Batch) -> None:
        """Write the batch's entries."""
        entries = self.embedding[batch.tokens.long()] + self.places[batch.positions.long()]
        layer = batch.state.layers[0]
        assert isinstance(layer, EntryLayer)
        layer.cache.append(entries, batch.slots, batch.positions, batch.q_len)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits [T, VOCAB]."""
        self.chunk(batch)
        layer = batch.state.layers[0]
        assert isinstance(layer, EntryLayer)
        entries, _ = layer.cache.read_window(batch.slots, batch.positions)
        return (entries * self.weights).sum(1) @ self.head.T

    def model(self) -> StepFunction:
        """As a runtime's model."""
        return StepFunction(self, VOCAB, schemas=self.schemas, device=self.device, chunk=self.chunk)
