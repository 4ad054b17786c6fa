"""A plain function as a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..batch import Batch
from ..pool import Field
from ..schema import KVLayerSchema, LayerCacheSchema

__all__ = ["StepFunction"]


@dataclass(frozen=True)
class StepFunction:
    """Makes a runtime's model of `decode(batch) -> logits`.

    Args:
        step: absorbs the batch's tokens and returns logits [T, V]; runs on the current stream
            without synchronizing.
        vocab_size: ids lie below it.
        schemas: what each layer keeps.
        fields: state by slot that the function reads.
        stop_tokens: ids that end an answer.
        device: where it runs.
        chunk: absorbs a prefill chunk; None to run `step` on it and drop the logits.
    """

    step: Callable[[Batch], Tensor]
    vocab_size: int
    schemas: tuple[KVLayerSchema | LayerCacheSchema, ...] = ()
    fields: tuple[Field, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    device: torch.device | str = "cpu"
    chunk: Callable[[Batch], None] | None = None

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of a `step` that is a module, by name, as they are now."""
        if not isinstance(self.step, nn.Module):
            return {}
        return {**dict(self.step.named_parameters()), **dict(self.step.named_buffers())}

    def prefill(self, batch: Batch) -> None:
        """Absorb a prompt's chunk."""
        if self.chunk is None:
            self.step(batch)
        else:
            self.chunk(batch)

    def decode(self, batch: Batch) -> Tensor:
        """Absorb a step's tokens and return logits [T, V]."""
        return self.step(batch)
