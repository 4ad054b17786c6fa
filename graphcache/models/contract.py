"""What the runtime asks of a model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..batch import Batch
from ..layout import LayerSchema
from ..pool import Field

__all__ = ["DecodeModel"]


class DecodeModel(Protocol):
    """A decoder that keeps nothing of its own between steps: all state is the batch's.

    Both methods run on the current stream without synchronizing, so that they can be captured.
    """

    @property
    def schemas(self) -> tuple[LayerSchema, ...]:
        """What each layer keeps for a slot, in the order of the layers."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """State by slot that the model itself reads; set at admission."""

    @property
    def vocab_size(self) -> int:
        """Ids at or above it are never given, though logits may be wider."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    @property
    def max_context(self) -> int | None:
        """Most tokens of a request that the model can place; None where it has no limit."""

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the logits."""

    @property
    def tokenizer(self) -> Any:
        """Turns text into ids and back, or None."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor whose address a captured step holds, by name."""

    def prefill(self, batch: Batch) -> None:
        """Absorb the batch's tokens into the state: body only, no head and no sampling."""

    def decode(self, batch: Batch) -> Tensor:
        """Absorb the batch's tokens and return logits [T, V] in the model's dtype."""
