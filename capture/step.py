"""A decode step as a function of no arguments: what is rehearsed, captured, or run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphcache import Batch, DecodeState
from graphcache.errors import SchemaError
from graphcache.probes import probe
from graphcache.scopes import scope

from .batch import StepBatch
from .ladder import Bucket
from .mailbox import Mailbox

__all__ = ["DecodeStep", "Sampler"]

Sampler: TypeAlias = Callable[[Tensor, Batch], Tensor]


class DecodeStep:
    """Builds the step of each bucket: begin, model, sample, advance, publish.

    Args:
        model: gives the logits.
        state: what the step reads and writes.
        inputs: who takes part.
        mailbox: where the tokens go.
        sampler: draws them.
        keep_logits: also copy the logits, to one buffer for all buckets.

    Attributes:
        logits: [tokens, V], those of the newest step; None when they are not kept.
    """

    def __init__(
        self,
        model: Any,
        state: DecodeState,
        inputs: StepBatch,
        mailbox: Mailbox,
        sampler: Sampler,
        *,
        keep_logits: bool,
    ) -> None:
        self._model = model
        self._state = state
        self._inputs = inputs
        self._mailbox = mailbox
        self._sampler = sampler
        self._keep_logits = keep_logits
        self.logits: Tensor | None = None

    def of(self, key: Bucket) -> Callable[[], None]:
        """The step of a bucket."""
        requested = self._inputs.view(key)

        def step() -> None:
            with scope("begin"):
                batch = self._state.begin(requested, key.q_len)
            with scope("model"):
                logits = self._model.decode(batch)
                probe("logits", logits)
            _check_logits(logits, key.tokens, self._state.vocab_size)
            if self._keep_logits:
                with scope("logits"):
                    self._keep(logits)
            with scope("sample"):
                sampled = self._sampler(logits, batch)
            with scope("advance"):
                emitted, reasons = self._state.advance(sampled, batch, requested)
                # Last: a host that sees the step's number may read all that the step has left.
                self._mailbox.publish(emitted, reasons)

        return step

    def _keep(self, logits: Tensor) -> None:
        if self.logits is None:
            # The first run is a rehearsal of the largest bucket, or eager: never inside a capture.
            shape = (self._inputs.requested.shape[0], logits.shape[1])
            self.logits = torch.zeros(shape, dtype=logits.dtype, device=logits.device)
        self.logits[: logits.shape[0]].copy_(logits)


def _check_logits(logits: Any, tokens: int, vocab_size: int) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != tokens:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise SchemaError(f"decode must return logits [{tokens}, V], got {got}")
    if logits.shape[1] < vocab_size:
        raise SchemaError(f"logits of {logits.shape[1]} ids for a vocabulary of {vocab_size}")
